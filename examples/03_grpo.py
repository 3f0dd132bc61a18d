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

import itertools
import operator
import random

from megatron_gpt import run
from megatron_sampler import MegatronSampler, Sampling, generate
from policy import CharacterTokenizer, Task, parse_policy_args, warm_up_and_reinforce

TOKENIZER = CharacterTokenizer()
SAMPLING = Sampling(5, stop_id=TOKENIZER.eos_id, vocab_size=TOKENIZER.vocab_size)
GREEDY = Sampling(5, temperature=0, stop_id=TOKENIZER.eos_id)


def sorting_records(seed):
    """Return prompts, prompts with random orders of their digits, and a tenth held out."""
    rng = random.Random(f"sort/{seed}")
    orders = ["".join(digits) for digits in itertools.product("0123456789", repeat=4)]
    rng.shuffle(orders)
    held_out, trained = orders[:1000], orders[1000:]
    answer = {digits: "".join(sorted(digits)) for digits in orders}
    prompts = [{"prompt": f"{digits}>", "answer": answer[digits]} for digits in trained]
    formats = [
        {"prompt": f"{digits}>", "response": "".join(rng.sample(digits, 4))} for digits in trained
    ]
    return prompts, formats, [(f"{digits}>", answer[digits]) for digits in held_out]


def build_sampler(model, reward):
    return MegatronSampler(model, reward or exact_match, group_size=8, sampling=SAMPLING)


def exact_match(prompt, responses):
    """Return 1 for the sorted digits and an end, else 0."""
    answer = [*TOKENIZER.encode(prompt.metadata["answer"])[1:]]
    return [float(response.tokens == answer) for response in responses]


def accuracies(model, held_out):
    """Return the share of prompts that are answered correctly."""
    prompts = [TOKENIZER.encode(prompt)[:-1] for prompt, _ in held_out]
    answers = [TOKENIZER.encode(answer)[1:] for _, answer in held_out]
    shares = {}
    for name, sampling in {"sampled": SAMPLING, "greedy": GREEDY}.items():
        responses, _ = generate(model, prompts, sampling)
        shares[name] = sum(map(operator.eq, responses, answers)) / len(answers)
    return shares


#: The longest sample: bos 7 2 5 4 > 2 4 5 7 eos.
SORT = Task(sorting_records, build_sampler, accuracies, longest_sample=11, tokenizer=TOKENIZER)

if __name__ == "__main__":
    example = "python examples/03_grpo.py --run-dir runs/grpo"
    run(lambda args: warm_up_and_reinforce(args, SORT), parse_policy_args(__doc__, example))
