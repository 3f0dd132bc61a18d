# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Teach a tiny GPT to sort four digits from preferences (DPO), on a CPU, in a few minutes.

    python examples/10_dpo.py --run-dir runs/dpo
    python examples/10_dpo.py --run-dir runs/dpo-shuffled --shuffle-preferences    (must not learn)
    torchrun --nproc-per-node 2 examples/10_dpo.py --run-dir runs/dpo-split \
        --tensor-model-parallel-size 2     (or pipeline; by default data parallel)

1. A warm-up on random orders of the digits teaches the format, but not sorting. The model that it
   leaves is the reference.
2. A first pass over the preferences computes what the reference says of each answer, once.
3. DPO prefers the sorted digits to another order, in the same loop and with the same step.

The evaluation's prompts are in no dataset. A stopped run continues exactly with --resume.
"""

import functools
import random

from megatron.core.utils import unwrap_model
from megatron_gpt import build_model, run
from options import count
from policy import SEQ_LEN, policy_parser, warm_up, write_data
from sorting import TOKENIZER, accuracies, sorting_records
from train_data import build_source
from train_loop import train

from energon_ext import PreferenceTaskEncoder
from energon_ext.losses import dpo_loss
from energon_ext.megatron import forward_step, write_reference_of


def parse_args():
    example = "python examples/10_dpo.py --run-dir runs/dpo"
    parser = policy_parser(__doc__, example, train_iters=400, save_interval=100, eval_interval=50)
    add = parser.add_argument
    add("--orders", type=count, default=9000, help="orders of digits to learn from")
    add("--beta", type=float, default=0.02, help="how near the policy stays to the reference")
    add("--global-batch-rows", type=count, default=32, help="packed rows of three pairs per step")
    add("--micro-batch-rows", type=count, help="default: all rows of a data-parallel rank")
    add("--shuffle-preferences", action="store_true", help="choose one of the two at random")
    add("--num-workers", type=int, default=0, help="worker processes per rank")
    return parser.parse_args()


def warm_up_and_prefer(args):
    prompts, formats, held_out = sorting_records(args.seed)
    data = args.run_dir / "data"
    pairs = preferences(args, prompts[: args.orders])
    write_data(data, {"formats": formats[: args.orders], "pairs": pairs})
    args.metadataset = data / "pairs.yaml"
    model = build_model(args, TOKENIZER.vocab_size)
    was_stopped = warm_up(args, TOKENIZER, model)
    if not was_stopped:
        dpo(args, model, held_out[: args.eval_prompts])


def preferences(args, prompts):
    """Return pairs for each prompt: the sorted digits, and two neighbours swapped or any order."""
    rng, records = random.Random(f"preferences/{args.seed}"), []
    for record in prompts:
        prompt, right = record["prompt"], record["answer"]
        places = [place for place in range(3) if right[place] < right[place + 1]]
        if not places:  # four times the same digit
            continue
        place = rng.choice(places)
        wrong = [right[:place] + right[place + 1] + right[place] + right[place + 2 :]]
        if (other := "".join(rng.sample(right, 4))) != right:
            wrong.append(other)
        for answers in ([right, each] for each in wrong):
            if args.shuffle_preferences:
                rng.shuffle(answers)
            records.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return records


def dpo(args, model, held_out):
    reference = f"warm-up of {args.warm_up_iters} steps, seed {args.seed}"
    encoder = PreferenceTaskEncoder(TOKENIZER, SEQ_LEN, reference=reference)
    write_reference_of(model, args.metadataset, encoder)
    losses = functools.partial(dpo_loss, beta=args.beta)
    unwrap_model(model).forward_step = functools.partial(
        forward_step, position_losses=losses, denominator="pairs"
    )

    def evaluate(step):
        if step % args.eval_interval and step != args.train_iters:
            return {}
        return {f"eval/{name}": share for name, share in accuracies(model, held_out).items()}

    source = build_source(args, encoder)
    train(args, args.run_dir / "dpo", model, source, evaluate=evaluate, may_begin=True)


if __name__ == "__main__":
    run(warm_up_and_prefer, parse_args())
