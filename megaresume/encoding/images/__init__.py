"""Image-text records to documents: text to tokens, images to pixels.

encoder.py      `ImageTextEncoder`: a record to tokens, images and what is trained on
spec.py         what defines an encoder, as JSON
processors/     an image to tiles or patches, as CLIP, InternVL, Qwen2-VL do
templates/      how text and images of a record follow each other
pages.py        a page longer than a document may be, to several documents
augment.py      declared random changes of an image, keyed
decode.py       bytes to an RGB image, and its size from the header alone
document.py     a record, and what the model is given of it
faults.py       what becomes of a record that cannot be encoded; a document cut, or filled up, to a length
checks.py       does a processor keep its promises?
"""
