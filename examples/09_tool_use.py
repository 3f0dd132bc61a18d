# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Teach a tiny GPT to add with a calculator, by GRPO over answers of several turns, on a CPU.

    python examples/09_tool_use.py --run-dir runs/tool
    python examples/09_tool_use.py --run-dir runs/tool-shuffled --shuffle-rewards   (must not learn)

A prompt such as ``38+5>`` has an answer of three turns::

    38+5=    the policy calls the calculator
    43>      the calculator answers; these tokens are not trained on
    43       the policy answers

The warm-up teaches this format with random orders of the digits, in both turns of the policy. GRPO
rewards the right sum with 1, so the policy must learn what to ask, and to repeat what it was told.
"""

import random

from megatron_gpt import run
from megatron_sampler import MegatronSampler, Sampling
from policy import CharacterTokenizer, Task, parse_policy_args, warm_up_and_reinforce

from energon_ext.rl import Response, Turn

TOKENIZER = CharacterTokenizer()
EQUALS, END, SIZE = TOKENIZER.ids["="], TOKENIZER.eos_id, TOKENIZER.vocab_size


def calculate(call):
    """Return the calculator's answer to tokens of a call such as ``38+5=``."""
    try:
        first, second = TOKENIZER.decode(call).removesuffix("=").split("+")
        result = f"{(int(first) + int(second)) % 100:02}>"
    except ValueError:
        result = "00>"  # no sum
    return [TOKENIZER.ids[character] for character in result]


class CalculatorSampler(MegatronSampler):
    """Answers in three turns: a call, the calculator's result, and the answer."""

    temperature = 1.0

    def answer(self, prompts, seeds):
        turns = [[Turn(*drawn)] for drawn in zip(*self._draw(prompts, seeds, 5, EQUALS))]
        asked = [number for number, (call,) in enumerate(turns) if call.tokens[-1] == EQUALS]
        for number in asked:
            turns[number].append(Turn(calculate(turns[number][0].tokens)))
        longer = [
            [*prompts[number], *(token for turn in turns[number] for token in turn.tokens)]
            for number in asked
        ]
        drawn = self._draw(longer, [seeds[number] + 2**40 for number in asked], 3, END)
        for number, last in zip(asked, zip(*drawn)):
            turns[number].append(Turn(*last))
        ends = [each[-1].tokens[-1] == END for each in turns]
        return [
            Response.from_turns(each, "stop" if is_complete else "length")
            for each, is_complete in zip(turns, ends)
        ]

    def _draw(self, prompts, seeds, count, stop):
        sampling = Sampling(count, temperature=self.temperature, stop_id=stop, vocab_size=SIZE)
        return self.generate(prompts, seeds, sampling)


class GreedySampler(CalculatorSampler):
    temperature = 0


def sum_records(seed):
    """Return prompts, both turns in random orders of their digits, and a quarter held out."""
    rng = random.Random(f"sum/{seed}")
    pairs = [(first, second) for first in range(10, 100) for second in range(10)]
    pairs = [(first, second) for first, second in pairs if first + second < 100]
    rng.shuffle(pairs)
    held_out, trained = pairs[:200], pairs[200:]
    formats = []
    for first, second in trained * 4:
        a, b, c = rng.sample(f"{first}{second}", 3)
        prompt, call = f"{first}+{second}>", f"{a}{b}+{c}="
        told = f"{(int(a + b) + int(c)) % 100:02}"
        answer = "".join(rng.sample(told, 2))
        formats.append({"prompt": prompt, "response": call})
        formats.append({"prompt": f"{prompt}{call}{told}>", "response": answer})
    return prompts_of(trained), formats, prompts_of(held_out)


def prompts_of(pairs):
    return [{"prompt": f"{a}+{b}>", "answer": f"{a + b:02}"} for a, b in pairs]


def build_sampler(model, reward):
    return CalculatorSampler(model, reward or is_right, group_size=8, sampling=Sampling(1))


def is_right(prompt, responses):
    """Return 1 if the last turn is the sum and an end, else 0."""
    return [float(is_sum(prompt.metadata["answer"], response)) for response in responses]


def is_sum(answer, response):
    return response.tokens[-3:] == [*TOKENIZER.encode(answer)[1:]] and not all(
        response.response_mask
    )


def accuracies(model, held_out):
    """Return the share of prompts that are answered correctly."""
    prompts = [TOKENIZER.encode(record["prompt"])[:-1] for record in held_out]
    shares = {}
    for name, kind in {"sampled": CalculatorSampler, "greedy": GreedySampler}.items():
        sampler = kind(model, is_right, group_size=1, sampling=Sampling(1))
        answers = sampler.answer(prompts, range(len(prompts)))
        right = [is_sum(each["answer"], answer) for each, answer in zip(held_out, answers)]
        shares[name] = sum(right) / len(right)
    return shares


#: The longest sample: bos 38+5> 38+5= 43> 43 eos.
ADD = Task(sum_records, build_sampler, accuracies, longest_sample=17, tokenizer=TOKENIZER)

if __name__ == "__main__":
    example = "python examples/09_tool_use.py --run-dir runs/tool"
    args = parse_policy_args(__doc__, example, warm_up_iters=300)
    run(lambda args: warm_up_and_reinforce(args, ADD), args)
