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

from megatron_gpt import run
from megatron_sampler import MegatronSampler
from policy import Task, parse_policy_args, warm_up_and_reinforce
from sorting import SAMPLING, TOKENIZER, accuracies, sorting_records


def build_sampler(model, reward):
    return MegatronSampler(model, reward or exact_match, group_size=8, sampling=SAMPLING)


def exact_match(prompt, responses):
    """Return 1 for the sorted digits and an end, else 0."""
    answer = [*TOKENIZER.encode(prompt.metadata["answer"])[1:]]
    return [float(response.tokens == answer) for response in responses]


#: The longest sample: bos 7 2 5 4 > 2 4 5 7 eos.
SORT = Task(sorting_records, build_sampler, accuracies, longest_sample=11, tokenizer=TOKENIZER)

if __name__ == "__main__":
    example = "python examples/03_grpo.py --run-dir runs/grpo"
    run(lambda args: warm_up_and_reinforce(args, SORT), parse_policy_args(__doc__, example))
