"""Image-text records to documents: text to tokens, images to pixels.

encoder.py       `ImageTextEncoder`: a record to tokens, images and the mask of trained tokens
spec.py          what defines an encoder, as JSON; a model's own preprocessor_config.json as options
document.py      a record, the document made of it, and what happens to one that cannot be encoded

templates.py     the order of text and images of a record: caption, interleaved, chat
pieces.py        the pieces that a template makes; splits a page longer than a document into several

rgb.py           bytes to an RGB image, its size from the header alone; declared random changes, keyed
processor.py     the contract of a processor, and its check; custom ones from a factory
processors.py    processors by kind; an image to tiles or patches, as CLIP, InternVL, Qwen2-VL do
hugging_face.py  a model's own processor from transformers
pixels.py        crops and normalises like Pillow and torchvision, into the batch
resampling.py    resizes in 8 bits, like them
"""
