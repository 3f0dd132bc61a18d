# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Teach a tiny GPT to sort four digits with GRPO, on a CPU, in a minute or two.

    python examples/03_grpo.py --run-dir runs/grpo
    python examples/03_grpo.py --run-dir runs/grpo-shuffled --shuffle-rewards    (must not learn)
    torchrun --nproc-per-node 2 examples/03_grpo.py --run-dir runs/grpo-split \
        --tensor-model-parallel-size 2     (or pipeline; by default data parallel)

1. A warm-up on random orders of the digits teaches the format, but not sorting. A warm-up on sorted
   digits would already solve the task.
2. GRPO samples eight answers per prompt and rewards the exact answer with 1, in the same loop and
   with the same step.

The evaluation's prompts are in neither data set. A stopped run continues exactly with --resume.
"""

import copy
import itertools
import json
import operator
import random

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from megatron_gpt import build_model, run
from megatron_sampler import MegatronSampler, Sampling, generate
from options import add_arguments, count, count_or_none, new_parser
from train_loop import build_source, train

from energon_ext import PromptTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.megatron import data_parallel_worker_config
from energon_ext.rl import RLDataset
from energon_ext.tokenizers.protocol import Tokenizer

SEQ_LEN = 66  # six samples of: bos 7 2 5 4 > 2 4 5 7 eos
GROUP_SIZE = 8
METADATASET = """\
__module__: energon_ext
__class__: ScheduledMetadataset
splits: {{train: {{blend: [{{path: {path}, weight: 1}}]}}}}
"""


class DigitTokenizer(Tokenizer):
    """Ten digits and ``>``."""

    vocab_size, bos_id, eos_id, pad_id = 16, 13, 11, 12
    add_bos = add_eos = True
    _CHARACTERS = "0123456789>"

    def encode_array(self, text):
        return self._surround(np.array([self._CHARACTERS.index(c) for c in text], np.int64))

    def decode(self, tokens):
        return "".join(self._CHARACTERS[t] for t in tokens if t < len(self._CHARACTERS))

    def fingerprint(self):
        return {"kind": "digits"}


def parse_args():
    parser = new_parser(__doc__.splitlines()[0], "python examples/03_grpo.py --run-dir runs/grpo")
    add = parser.add_argument
    add_arguments(parser)
    add("--warm-up-iters", type=count, default=150, help="steps before GRPO")
    add("--eval-interval", type=count, default=20, help="steps between two evaluations")
    add("--eval-prompts", type=count, default=512, help="held-out prompts per evaluation")
    add("--prompts-per-call", type=count, default=32, help="prompts sampled together")
    add("--groups-per-batch", type=count, default=16, help="groups with varying rewards per step")
    add("--max-staleness", type=count_or_none, help="steps a group may wait; default: no limit")
    add("--ratio-limit", type=float, help="limit of importance weights; default: no weights")
    add("--shuffle-rewards", action="store_true", help="reward answers at random")
    parser.set_defaults(
        train_iters=160,  # steps of GRPO, as in --stop-after and --save-interval
        save_interval=40,
        seed=1,
        num_layers=2,
        hidden_size=64,
        lr=8e-4,
        lr_warmup_iters=5,
        seq_length=SEQ_LEN,
        num_workers=0,
    )
    return parser.parse_args()


def warm_up_and_reinforce(args):
    tokenizer = DigitTokenizer()
    held_out = write_data(args.run_dir / "data", args.seed)
    model = build_model(args, tokenizer.vocab_size)
    was_stopped = warm_up(copy.copy(args), tokenizer, model)
    if not was_stopped:
        grpo(args, tokenizer, model, held_out[: args.eval_prompts])


def write_data(folder, seed):
    """Write both data sets; return the held-out prompts, a tenth of all, with their answers."""
    rng = random.Random(f"sort/{seed}")
    orders = ["".join(digits) for digits in itertools.product("0123456789", repeat=4)]
    rng.shuffle(orders)
    held_out, trained = orders[:1000], orders[1000:]
    answer = {digits: "".join(sorted(digits)) for digits in orders}
    prompts = [{"prompt": f"{digits}>", "answer": answer[digits]} for digits in trained]
    formats = [
        {"prompt": f"{digits}>", "response": "".join(rng.sample(digits, 4))} for digits in trained
    ]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in (("prompts", prompts), ("formats", formats)):
            path = folder / f"{name}.jsonl"
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))
            path.with_suffix(".yaml").write_text(METADATASET.format(path=path.name))
    dist.barrier()
    return [(f"{digits}>", answer[digits]) for digits in held_out]


def warm_up(args, tokenizer, model):
    args.train_iters, args.lr, args.stop_after = args.warm_up_iters, 2e-3, None
    args.ratio_limit = None
    args.metadataset = args.run_dir / "data" / "formats.yaml"
    args.micro_batch_rows = 11
    args.global_batch_rows = 11 * parallel_state.get_data_parallel_world_size()
    encoder = SFTTaskEncoder(tokenizer, SEQ_LEN, packing_buffer_docs=64)
    return train(args, args.run_dir / "warm_up", model, build_source(args, encoder))


def grpo(args, tokenizer, model, held_out):
    sampling = Sampling(max_new_tokens=5, stop_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size)
    prompts = get_train_dataset(
        args.run_dir / "data" / "prompts.yaml",
        worker_config=data_parallel_worker_config(num_workers=0, seed=args.seed),
        batch_size=args.prompts_per_call,
        task_encoder=PromptTaskEncoder(tokenizer),
    )
    reward = shuffled_reward if args.shuffle_rewards else exact_match
    sampler = MegatronSampler(model, reward, group_size=GROUP_SIZE, sampling=sampling)
    args.micro_batches, args.micro_batch_rows = 1, -(-args.groups_per_batch * GROUP_SIZE // 6)
    args.global_batch_rows = args.micro_batch_rows * parallel_state.get_data_parallel_world_size()
    source = RLDataset(
        prompts,
        sampler,
        seq_len=SEQ_LEN,
        rows=args.micro_batch_rows,
        groups_per_batch=args.groups_per_batch,
        max_staleness=args.max_staleness,
        pad_id=tokenizer.pad_id,
        seed=args.seed,
    )

    def evaluate(step):
        if step % args.eval_interval and step != args.train_iters:
            return {}
        return {
            "eval/sampled": accuracy(model, tokenizer, held_out, sampling),
            "eval/greedy": accuracy(
                model, tokenizer, held_out, Sampling(5, temperature=0, stop_id=tokenizer.eos_id)
            ),
        }

    train(args, args.run_dir / "grpo", model, source, evaluate=evaluate, may_begin=True)


def exact_match(prompt, responses):
    """Return 1 for the sorted digits and an end, else 0."""
    answer = [*DigitTokenizer().encode(prompt.metadata["answer"])[1:]]
    return [float(response.tokens == answer) for response in responses]


def shuffled_reward(prompt, responses):
    """Return 1 for two random answers, which teaches nothing."""
    rewards = [1.0, 1.0] + [0.0] * (len(responses) - 2)
    tokens = [response.tokens for response in responses]
    random.Random(f"{prompt.tokens.tolist()} {tokens}").shuffle(rewards)
    return rewards


def accuracy(model, tokenizer, held_out, sampling):
    """Return the share of prompts that are answered correctly."""
    prompts = [tokenizer.encode(prompt)[:-1] for prompt, _ in held_out]
    responses, _ = generate(model, prompts, sampling)
    answers = [tokenizer.encode(answer)[1:] for _, answer in held_out]
    return sum(map(operator.eq, responses, answers)) / len(answers)


if __name__ == "__main__":
    run(warm_up_and_reinforce, parse_args())
