# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Four digits to sort, the task of 03 and 10: its records, and the share of right answers."""

import itertools
import operator
import random

from megatron_sampler import Sampling, generate
from policy import CharacterTokenizer

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


def accuracies(model, held_out):
    """Return the share of prompts that are answered correctly."""
    prompts = [TOKENIZER.encode(prompt)[:-1] for prompt, _ in held_out]
    answers = [TOKENIZER.encode(answer)[1:] for _, answer in held_out]
    shares = {}
    for name, sampling in {"sampled": SAMPLING, "greedy": GREEDY}.items():
        responses, _ = generate(model, prompts, sampling)
        shares[name] = sum(map(operator.eq, responses, answers)) / len(answers)
    return shares
