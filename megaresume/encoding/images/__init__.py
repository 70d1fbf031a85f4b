"""Image-text records to documents: text to tokens, images to pixels.

encoder.py       `ImageTextEncoder`: a record to tokens, images and what is trained on
spec.py          what defines an encoder, as JSON; a model's own preprocessor_config.json as options
document.py      a record, what the model is given of it, and what becomes of one that cannot be encoded

templates.py     how text and images of a record follow each other: caption, interleaved, chat
pieces.py        what a template makes of a record; a page longer than a document, to several documents

rgb.py           bytes to an RGB image, its size from the header alone; declared random changes, keyed
processor.py     what a processor promises, and whether it keeps that; one's own, from a factory
processors.py    processors by kind; an image to tiles or patches, as CLIP, InternVL, Qwen2-VL do
hugging_face.py  a model's own processor, of transformers
pixels.py        cut and normalised as Pillow and torchvision do it, into the batch
resampling.py    and resized in 8 bits, as they do it
"""
