"""Hugging Face's Trainer; one line makes it elastic.

Run it with ``dask elastic run examples/trainers/with_transformers.py``. The marked line is new.
"""

from __future__ import annotations

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import nbelastic.transformers

Trainer = nbelastic.transformers.elastic(transformers.Trainer)  # new


def main() -> None:
    """Train a small language model on random tokens."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (128, 16))
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    arguments = TrainingArguments(
        output_dir="output",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main()
