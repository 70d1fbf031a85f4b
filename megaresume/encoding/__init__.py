"""Turns records into what is trained on: text to tokens, images to tokens and pixels.

text/      tokenizers, conversations, and which of their tokens are trained
images/    image-text records: processors, templates, augmentation
"""
