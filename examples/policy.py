# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop of 03 and 09: a warm-up teaches the format of answers, GRPO what they should say.

10 begins with the same warm-up.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from megatron_gpt import build_model
from options import add_arguments, count, count_or_none, new_parser
from train_data import build_source
from train_loop import train

from energon_ext import PromptTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.megatron import data_parallel_worker_config
from energon_ext.rl import RLDataset
from energon_ext.tokenizers.protocol import Tokenizer

SEQ_LEN = 66
METADATASET = """\
__module__: energon_ext
__class__: ScheduledMetadataset
splits: {{train: {{blend: [{{path: {path}, weight: 1}}]}}}}
"""


class CharacterTokenizer(Tokenizer):
    """Ten digits and a few signs."""

    vocab_size, bos_id, eos_id, pad_id = 16, 13, 11, 12
    add_bos = add_eos = True
    ids = {character: number for number, character in enumerate("0123456789>")} | {"+": 14, "=": 15}

    def encode_array(self, text):
        return self._surround(np.array([self.ids[character] for character in text], np.int64))

    def decode(self, tokens):
        characters = {number: character for character, number in self.ids.items()}
        return "".join(characters.get(token, "") for token in tokens)

    def fingerprint(self):
        return {"kind": "digits"}


@dataclass(frozen=True)
class Task:
    """A policy's task.

    Attributes:
        records: seed -> prompts, prompts with random responses in the right format, and held-out
            prompts.
        build_sampler: model, reward or None for that of the task -> sampler of groups.
        accuracies: model, held-out prompts -> shares of correct answers by name.
        longest_sample: tokens of the longest prompt and answer.
    """

    records: Callable
    build_sampler: Callable
    accuracies: Callable
    longest_sample: int
    group_size: int = 8
    tokenizer: Tokenizer = field(default_factory=CharacterTokenizer)


def policy_parser(doc, example, **defaults):
    """Make a parser for a tiny GPT that is warmed up, trained further, and evaluated.

    ``--train-iters``, ``--stop-after`` and ``--save-interval`` count the steps after the warm-up.
    """
    parser = new_parser(doc.splitlines()[0], example)
    add = parser.add_argument
    add_arguments(parser)
    add("--warm-up-iters", type=count, default=150, help="steps of SFT first")
    add("--eval-interval", type=count, help="steps between two evaluations")
    add("--eval-prompts", type=count, default=512, help="held-out prompts per evaluation")
    sizes = {"num_layers": 2, "hidden_size": 64, "seq_length": SEQ_LEN}
    parser.set_defaults(seed=1, lr=8e-4, lr_warmup_iters=5, **sizes, **defaults)
    return parser


def parse_policy_args(doc, example, **defaults):
    """Parse the options of a GRPO run."""
    parser = policy_parser(
        doc, example, train_iters=160, save_interval=40, eval_interval=20, num_workers=0, **defaults
    )
    add = parser.add_argument
    add("--prompts-per-call", type=count, default=32, help="prompts sampled together")
    add("--groups-per-batch", type=count, default=16, help="groups with varying rewards per step")
    add("--max-staleness", type=count_or_none, help="steps a group may wait; default: no limit")
    add("--ratio-limit", type=float, help="limit of importance weights; default: no weights")
    add("--shuffle-rewards", action="store_true", help="reward answers at random")
    return parser.parse_args()


def warm_up_and_reinforce(args, task):
    """Train a model in two runs, in ``warm_up`` and ``grpo`` of the run folder."""
    prompts, formats, held_out = task.records(args.seed)
    write_data(args.run_dir / "data", {"prompts": prompts, "formats": formats})
    model = build_model(args, task.tokenizer.vocab_size)
    if not warm_up(args, task.tokenizer, model):
        grpo(args, task, model, held_out[: args.eval_prompts])


def write_data(folder, files):
    """Write records as JSON Lines, each with its metadataset."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in files.items():
            path = folder / f"{name}.jsonl"
            text = "".join(json.dumps(record) + "\n" for record in records)
            if path.exists() and path.read_text() == text:
                continue  # what is known of a file holds until it is written again
            path.write_text(text)
            CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))
            path.with_suffix(".yaml").write_text(METADATASET.format(path=path.name))
    dist.barrier()


def warm_up(args, tokenizer, model):
    """Teach the format of answers; return True if a signal stopped it."""
    args = copy.copy(args)
    args.train_iters, args.lr, args.stop_after = args.warm_up_iters, 2e-3, None
    args.ratio_limit = None
    args.metadataset = args.run_dir / "data" / "formats.yaml"
    args.micro_batch_rows = 11
    args.global_batch_rows = 11 * parallel_state.get_data_parallel_world_size()
    encoder = SFTTaskEncoder(tokenizer, SEQ_LEN, packing_buffer_docs=64)
    return train(args, args.run_dir / "warm_up", model, build_source(args, encoder))


def grpo(args, task, model, held_out):
    sampler = task.build_sampler(model, shuffled_reward if args.shuffle_rewards else None)
    prompts = get_train_dataset(
        args.run_dir / "data" / "prompts.yaml",
        worker_config=data_parallel_worker_config(num_workers=0, seed=args.seed),
        batch_size=args.prompts_per_call,
        task_encoder=PromptTaskEncoder(task.tokenizer),
    )
    answers, answers_per_row = (
        args.groups_per_batch * task.group_size,
        SEQ_LEN // task.longest_sample,
    )
    args.micro_batches, args.micro_batch_rows = 1, -(-answers // answers_per_row)
    args.global_batch_rows = args.micro_batch_rows * parallel_state.get_data_parallel_world_size()
    source = RLDataset(
        prompts,
        sampler,
        seq_len=SEQ_LEN,
        rows=args.micro_batch_rows,
        groups_per_batch=args.groups_per_batch,
        max_staleness=args.max_staleness,
        pad_id=task.tokenizer.pad_id,
        seed=args.seed,
    )

    def evaluate(step):
        if step % args.eval_interval and step != args.train_iters:
            return {}
        return {f"eval/{name}": value for name, value in task.accuracies(model, held_out).items()}

    folder, tokenizer = args.run_dir / "grpo", task.tokenizer
    train(args, folder, model, source, evaluate=evaluate, may_begin=True, tokenizer=tokenizer)


def shuffled_reward(prompt, responses):
    """Return 1 for two random answers, which teaches nothing."""
    rewards = [1.0, 1.0] + [0.0] * (len(responses) - 2)
    tokens = [response.tokens for response in responses]
    random.Random(f"{prompt.tokens.tolist()} {tokens}").shuffle(rewards)
    return rewards
