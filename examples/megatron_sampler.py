# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers sampled from the model in training.

Every token takes a forward pass over all tokens so far, in one batch. Megatron-core 0.16 has a
key-value cache, but its attention without Transformer Engine does not read it, and it requires
prompts of equal length. Recomputing works for all layers and batches.
"""

from dataclasses import dataclass, field
from typing import Sequence

import torch
from lockstep import Lockstep

from energon_ext.arguments import check_integers, check_number
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SamplerError
from energon_ext.rl import Response, ScoredGroup
from energon_ext.rl.rewards import RewardFunction, Rewards, score_all
from energon_ext.state.together import on_all_ranks


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        max_new_tokens: maximum tokens per response, >= 1.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_p: draw from the most likely tokens with this total probability, in (0, 1].
        stop_id: token that ends a response and is part of it; None for full length.
        vocab_size: draw only ids below this size; None for all, including padding.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_id: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_integers("Sampling", max_new_tokens=self.max_new_tokens)
        check_number("Sampling.temperature", self.temperature)
        check_number("Sampling.top_p", self.top_p, most=1, above_zero=True)
        if self.vocab_size is not None:
            check_integers("Sampling", vocab_size=self.vocab_size)

    def finish_reason(self, response: Sequence[int]) -> str | None:
        """Return why a response ended; None if all have full length."""
        if self.stop_id is None:
            return None
        return "stop" if response[-1] == self.stop_id else "length"


@dataclass(kw_only=True, eq=False)
class MegatronSampler:
    """A :class:`~energon_ext.rl.BatchSampler` over a ``GPTModel`` in this process.

    Tensor, pipeline and expert parallelism are supported. All ranks of a replica have an
    ``RLDataset`` with the same arguments and call this with the same prompts and seed; all get the
    same groups, with rewards computed on the first rank. Replicas that share experts must make the
    same number of calls: :meth:`agree` tells an ``RLDataset`` if another replica needs a call.

    Args:
        model: a ``GPTModel``, wrapped or not.
        reward: ``(prompt, responses) -> rewards``, as for an ``OpenAISampler``.
        group_size: answers per prompt, >= 1.
        rows_per_pass: maximum answers per forward pass; None for all answers of a call.

    Raises:
        ConfigError: groups of no answers; context parallelism, virtual pipeline stages,
            or tensor and expert groups of which neither contains the other.
        SamplerError: from a call: the reward failed on the answers to a prompt, or the ranks of a
            replica ask for different prompts.
    """

    model: torch.nn.Module = field(kw_only=False)
    reward: RewardFunction = field(kw_only=False)
    group_size: int
    sampling: Sampling
    rows_per_pass: int | None = None

    def __post_init__(self) -> None:
        check_integers("MegatronSampler", group_size=self.group_size)
        _check_rows("MegatronSampler", self.rows_per_pass)
        self._lockstep = Lockstep()

    def sample_and_score_batch(
        self, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[ScoredGroup]:
        """Return a group for each prompt, in order; the same for the same seeds and weights.

        Without prompts, this rank only takes part in the forward passes of the others.
        """
        keys = [prompt.__key__ for prompt in prompts]
        if any(other != keys for other in on_all_ranks(lambda: keys, self._lockstep.replica)):
            raise SamplerError(
                "the ranks of a model ask for different prompts; give their RLDatasets the same "
                "data-parallel rank and seed"
            )
        size = self.group_size
        repeated = [prompt.tokens.tolist() for prompt in prompts for _ in range(size)]
        answers = self.answer(repeated, [seed + n for seed in seeds for n in range(size)])
        groups = [answers[start : start + size] for start in range(0, len(answers), size)]

        def scores() -> list[Rewards]:
            if self._lockstep.replica.rank() > 0:
                return []
            return score_all(self.reward, prompts, groups)

        # Score on one rank of a replica, as a reward (such as a judge) may not be deterministic.
        first, *_ = on_all_ranks(scores, self._lockstep.replica)
        tokens = [prompt.tokens for prompt in prompts]
        return list(map(ScoredGroup.from_answers, tokens, groups, first))

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Response]:
        """Return one answer to each prompt; override for answers of several turns.

        The ranks that share the model call :func:`generate` equally often.
        """
        responses, log_probs = self.generate(prompts, seeds, self.sampling)
        reasons = [self.sampling.finish_reason(response) for response in responses]
        return list(map(Response, responses, log_probs, reasons))

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Continue prompts, see :func:`generate`."""
        rows = self.rows_per_pass
        return generate(self.model, prompts, sampling, seeds=seeds, rows_per_pass=rows)

    def agree(self, status: int) -> int:
        """Return the largest status of all ranks that must generate together."""
        return self._lockstep.max(status)[0]


def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int] | None = None,
    rows_per_pass: int | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Continue prompts with a Megatron model.

    All ranks that share the model or its experts call this together: the ranks of a replica with
    the same prompts, other replicas with other prompts or none.

    Args:
        prompts: token ids, at least one each; lengths may differ.
        seeds: random seed of each prompt, so that its response does not depend on the others; None
            for 0, 1, 2 ...
        rows_per_pass: maximum prompts per forward pass; None for all.

    Returns:
        Response tokens of each prompt, including the stop token, and the model's log-probability of
        each token: at temperature 1 and without ``top_p``, as in training.

    Raises:
        ConfigError: a layout that :class:`MegatronSampler` does not support, or an empty prompt.
    """
    lockstep = Lockstep()
    _check_rows("generate", rows_per_pass)
    if not all(map(len, prompts)):
        raise ConfigError("generate: every prompt needs at least one token.")
    was_training = model.training
    model.eval()
    draws = _uniform_draws(range(len(prompts)) if seeds is None else seeds, sampling)
    step = rows_per_pass or max(1, len(prompts))
    responses: list[list[int]] = []
    log_probs: list[list[float]] = []
    try:
        (passes,) = lockstep.max(-(-len(prompts) // step))
        for start in range(0, passes * step, step):
            rows = slice(start, start + step)
            new_responses, new_log_probs = _generate_rows(
                model, lockstep, prompts[rows], sampling, draws[rows]
            )
            responses += new_responses
            log_probs += new_log_probs
    finally:
        model.train(was_training)
    return responses, log_probs


def _check_rows(owner: str, rows_per_pass: int | None) -> None:
    if rows_per_pass is not None:
        check_integers(owner, rows_per_pass=rows_per_pass)


def _uniform_draws(seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """Return the random numbers in [0, 1) of each response: float64 [n, max_new_tokens]."""
    count = sampling.max_new_tokens
    generators = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]
    drawn = [torch.rand(count, generator=each, dtype=torch.float64) for each in generators]
    return torch.stack(drawn) if drawn else torch.zeros(0, count, dtype=torch.float64)


@torch.no_grad()
def _generate_rows(
    model: torch.nn.Module,
    lockstep: Lockstep,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    draws: torch.Tensor,
) -> tuple[list[list[int]], list[list[float]]]:
    device = next(model.parameters()).device
    draws = draws.to(device)
    starts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device=device)
    width = max(map(len, prompts), default=0) + sampling.max_new_tokens
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.as_tensor(prompt)
    log_probs = torch.zeros(len(prompts), width, device=device)
    ends = starts.clone()
    active = torch.arange(len(prompts), device=device)  # rows whose responses have not ended
    while True:
        longest = int(ends[active].max()) if len(active) else 0
        rows, pass_width = lockstep.max(len(active), longest)
        if not rows:
            break
        logits = lockstep.next_logits(model, tokens[active], ends[active], rows, pass_width)
        # One message for both: a double represents token ids exactly.
        drawn = torch.zeros(2, len(active), dtype=torch.float64, device=device)
        if logits is not None and len(active):
            logits = logits[:, : sampling.vocab_size]
            drawn[0] = draw(logits, sampling, draws[active, (ends - starts)[active]])
            drawn[1] = torch.log_softmax(logits, dim=-1).gather(1, drawn[0].long()[:, None])[:, 0]
        drawn = lockstep.share(drawn)
        next_tokens = drawn[0].long()
        tokens[active, ends[active]] = next_tokens
        log_probs[active, ends[active]] = drawn[1].float()
        ends[active] += 1
        continues = ends[active] - starts[active] < sampling.max_new_tokens
        if sampling.stop_id is not None:
            continues &= next_tokens != sampling.stop_id
        active = active[continues]
    spans = list(enumerate(zip(starts.tolist(), ends.tolist())))
    return (
        [tokens[row, start:end].tolist() for row, (start, end) in spans],
        [log_probs[row, start:end].tolist() for row, (start, end) in spans],
    )


def draw(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row of logits: float [rows, V] to int64 [rows].

    Args:
        uniform: random numbers in [0, 1), float64 [rows], at which the distribution is inverted.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probs = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    sums = probs.cumsum(-1)
    found = (sums <= uniform[:, None] * sums[:, -1:]).sum(-1)
    return found.clamp(max=logits.shape[-1] - 1)
