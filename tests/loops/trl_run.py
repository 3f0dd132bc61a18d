# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train a tiny model with a trainer of TRL, and write the prompts that each rank has read.

torchrun --nproc-per-node 2 trl_run.py grpo FOLDER STEPS [resume]
"""

import os
import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from energon_ext.loader.plan_sampler import PlanSampler

#: The name of the source of each sample, and their weights.
SOURCES = ["math"] * 9 + ["code"] * 5
WEIGHTS = {"math": 1, "code": {"step": {0: 1, 2: 3}}}

#: Samples of a step, and steps of the run, which is one epoch.
STEP, STEPS = 4, 8


def new_sampler():
    return PlanSampler(SOURCES, WEIGHTS, rows_per_step=STEP, samples=STEP * STEPS)


def new_tokenizer():
    vocabulary = {character: n for n, character in enumerate(["[PAD]", "[EOS]", *"0123456789 "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", padding_side="left"
    )


def new_model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )  # fmt: skip
    )


def options(folder, ranks, per_prompt, steps):
    return {
        "output_dir": str(folder / "saved"),
        "per_device_train_batch_size": STEP * per_prompt // ranks,
        "max_steps": steps,
        "save_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "bf16": False,
    }


def grpo(folder, ranks, steps, read):
    """The dataset is put into the order of the plan; TRL does everything else."""

    def reward(prompts, completions, **_):
        read.extend(prompts)
        return [float(len(completion)) for completion in completions]

    prompts = Dataset.from_dict({"prompt": [str(n) for n in range(len(SOURCES))]})
    return GRPOTrainer(
        new_model(),
        reward,
        GRPOConfig(
            **options(folder, ranks, 2, steps),
            num_generations=2,
            max_completion_length=3,
            shuffle_dataset=False,
        ),
        prompts.select(list(new_sampler())),
        processing_class=new_tokenizer(),
    )


class PlannedTrainer(SFTTrainer):
    read: list

    def _get_train_sampler(self, dataset=None):
        return new_sampler()

    def training_step(self, model, inputs, *rest):
        texts = self.processing_class.batch_decode(inputs["input_ids"], skip_special_tokens=True)
        self.read += [text.replace(" ", "") for text in texts]
        return super().training_step(model, inputs, *rest)


def sft(folder, ranks, steps, read):
    texts = Dataset.from_dict({"text": [str(n) for n in range(len(SOURCES))]})
    trainer = PlannedTrainer(
        new_model(),
        SFTConfig(**options(folder, ranks, 1, steps), max_length=16),
        train_dataset=texts,
        processing_class=new_tokenizer(),
    )
    trainer.read = read
    return trainer


def main(kind, folder, steps, resume=False):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    read = []
    trainer = {"grpo": grpo, "sft": sft}[kind](Path(folder), ranks, int(steps), read)
    trainer.train(resume_from_checkpoint=bool(resume))
    Path(folder, f"read_{ranks}_{rank}.txt").write_text("\n".join(read))


if __name__ == "__main__":
    main(*sys.argv[1:])
