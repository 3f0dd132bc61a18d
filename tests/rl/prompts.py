# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts on disk and samplers with known answers."""

import json

import torch
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import PromptTaskEncoder, get_train_dataset
from energon_ext.rl import ScoredGroup
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, loader_for, write_mix


def write_prompts(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))
    return path


def write_sums(folder):
    """Two sources of prompts in a blend."""
    for source, count in (("easy", 12), ("hard", 7)):
        records = [{"prompt": f"{source[0]}{n}?", "answer": n} for n in range(count)]
        write_prompts(folder / f"{source}.jsonl", records)
    entries = [("easy.jsonl", {"linear": {0: 3, 20: 1}}), ("hard.jsonl", 1)]
    return write_mix(folder / "mix.yaml", entries)


def prompt_loader(path, **options):
    return loader_for(prompt_dataset(path, **options))


def prompt_dataset(
    path, *, prompts_per_call=2, num_workers=0, rank=0, world_size=1, repeat=True, **options
):
    return get_train_dataset(
        path,
        worker_config=config(num_workers, rank, world_size),
        batch_size=prompts_per_call,
        repeat=repeat,
        task_encoder=PromptTaskEncoder(ByteTokenizer(add_eos=False), **options),
    )


class Dice:
    """Returns answers of random length, content and reward that depend on their seed alone."""

    def __init__(self, group_size=3, longest=4):
        self.group_size = group_size
        self.longest = longest

    def sample_and_score_batch(self, prompts, seeds):
        groups = []
        for prompt, seed in zip(prompts, seeds):
            random = torch.Generator().manual_seed(seed)

            def draw(low, high, count, random=random):
                return torch.randint(low, high + 1, (count,), generator=random).tolist()

            lengths = draw(1, self.longest, self.group_size)
            groups.append(
                ScoredGroup.from_responses(
                    prompt.tokens,
                    [draw(100, 120, length) for length in lengths],
                    [[-0.5] * length for length in lengths],
                    draw(0, 1, self.group_size),
                )
            )
        return groups


class Fixed:
    """Returns two answers with the given rewards, one pair per call."""

    def __init__(self, *rewards):
        self.rewards = iter(rewards)
        self.asked = []

    def sample_and_score(self, prompt):
        self.asked.append(prompt.tolist())
        tokens = torch.cat([prompt.repeat(2, 1), torch.tensor([[50, 51], [60, 61]])], dim=1)
        rewards = torch.tensor(next(self.rewards), dtype=torch.float32)
        return ScoredGroup(tokens, torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), rewards, len(prompt))
