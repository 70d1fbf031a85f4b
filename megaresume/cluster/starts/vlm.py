"""Train a model that names colours on the pictures of data.yaml, or resume where it was killed: python train.py"""

import torch

import megaresume

VOCABULARY, IMAGE, STEPS = 258, 257, 160  # tokens: bytes, the end of a document, and a part of an image,
PATCHES = 4 * 3 * 2 * 14 * 14  # which is four patches of 2 (frames) x 14 x 14 pixels


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.vision = torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(PATCHES, 64)
        self.mixer, self.head = torch.nn.GRU(64, 64, batch_first=True), torch.nn.Linear(64, VOCABULARY)

    def forward(self, batch):
        is_image = (batch["tokens"] == IMAGE)[..., None]
        features = self.vision(batch["pixel_values"].view(-1, PATCHES))
        return self.head(self.mixer(self.words(batch["tokens"]).masked_scatter(is_image, features))[0])


torch.manual_seed(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
stream, schedule = megaresume.open_stream("data.yaml"), megaresume.BatchSchedule.constant(8)  # samples of a step
loader = megaresume.StreamLoader(stream, schedule, micro_batch_size=8)
loop = megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints="checkpoints")
loop.load()  # the newest complete checkpoint, if there is one
for _, batch in zip(range(loop.step, STEPS), loop, strict=False):
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)  # -100: not trained
    loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loop.stepped()
    print(f"step {loop.step} loss {loss.item():.9g}", flush=True)
    if loop.step % 20 == 0:
        loop.save()
loop.finish()
