"""The tools that are compared: a file each, with the way of resuming that its documentation describes.

base.py          what a tool brings
torch_loader.py  torch's DataLoader: the epoch begun again; batches skipped
torchdata.py     StatefulDataLoader
hugging_face.py  Trainer
litdata.py, mosaicml.py, grain.py
ours.py          megaresume's DataLoader
"""

from benchmarks.peers.tools import grain, hugging_face, litdata, mosaicml, ours, torch_loader, torchdata

#: In the order of the table.
TOOLS = {
    "torch": torch_loader.BEGUN_AGAIN,
    "torch-skip": torch_loader.SKIPPED,
    "torchdata": torchdata.TOOL,
    "hugging-face": hugging_face.TOOL,
    "litdata": litdata.TOOL,
    "mosaicml": mosaicml.TOOL,
    "grain": grain.PIPELINE,
    "grain-elastic": grain.ELASTIC,
    "megaresume": ours.TOOL,
}
