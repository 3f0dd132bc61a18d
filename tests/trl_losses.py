# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Print TRL's tokens and losses of pairs as JSON: python trl_losses.py FOLDER BETA.

The folder has two models, a tokenizer and records. It runs in a process of its own, with the
package ``trl`` on its path.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

SIDES = ("chosen", "rejected")


def loss(folder, beta, kind):
    """Return the loss of all pairs, the norm of its gradient, and the tokens of both answers."""
    models = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "ref")]
    records = json.loads((folder / "records.json").read_text())
    trainer = DPOTrainer(
        model=models[0],
        ref_model=models[1],
        args=DPOConfig(
            output_dir=str(folder / "out"),
            loss_type=kind,
            beta=beta,
            per_device_train_batch_size=len(records),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_length=None,
            gradient_checkpointing=False,
            disable_dropout=True,
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )
    rows = [trainer.train_dataset[number] for number in range(len(records))]
    found = trainer.compute_loss(models[0], trainer.data_collator(rows))
    found.backward()
    gradients = torch.cat([p.grad.double().flatten() for p in models[0].parameters()])
    tokens = [[row["prompt_ids"] + row[f"{side}_ids"] for side in SIDES] for row in rows]
    return [found.item(), gradients.norm().item(), tokens]


if __name__ == "__main__":
    folder, beta = Path(sys.argv[1]), float(sys.argv[2])
    print(json.dumps({kind: loss(folder, beta, kind) for kind in ("sigmoid", "ipo")}))
