"""Sentence Transformers' own trainer, as its examples use it: python embed.py OUTPUT BATCH_SIZE [OPTIONS, as JSON]

Beside OUTPUT are model/ and data.jsonl of tiny.py: item i is the pair "say wI", "yes".
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss


def main() -> None:
    output, size, *options = sys.argv[1:]
    pairs = [json.loads(line)["messages"] for line in Path(output).with_name("data.jsonl").open()]
    dataset = Dataset.from_list([{"first": pair[0]["content"], "second": "yes", "label": 0.5} for pair in pairs])
    model = SentenceTransformer(str(Path(output).with_name("model")), device="cpu")
    args = SentenceTransformerTrainingArguments(
        output_dir=output,
        num_train_epochs=2,
        per_device_train_batch_size=int(size),
        save_steps=5,
        report_to=[],
        use_cpu=True,
        **json.loads(options[0] if options else "{}"),
    )
    trainer = SentenceTransformerTrainer(model, args, train_dataset=dataset, loss=CosineSimilarityLoss(model))
    trainer.train()


if __name__ == "__main__":
    main()
