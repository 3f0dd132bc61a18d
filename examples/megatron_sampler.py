# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers from the very model that is being trained.

Every token is a forward pass over all tokens so far, in one batch. Megatron-core 0.16 has a cache
of keys and values, but its attention without Transformer Engine does not read it, and with it a
batch must have prompts of one length; recomputing is right for every layer and every batch.
"""

from dataclasses import dataclass, field
from typing import Sequence

import torch
from lockstep import Lockstep

from energon_ext.arguments import check_integers, check_number
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SamplerError
from energon_ext.rl.sampler import RewardFunction, ScoredGroup, score
from energon_ext.state.together import on_all_ranks


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        max_new_tokens: longest response, >= 1.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_p: the likeliest tokens that together hold this much probability, in (0, 1].
        stop_id: token that ends a response and belongs to it; None for full length.
        vocab_size: ids that may be drawn are below it; None for all, padding included.
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


@dataclass(kw_only=True, eq=False)
class MegatronSampler:
    """A :class:`~energon_ext.rl.BatchSampler` over a ``GPTModel`` in this process.

    The model may be split by tensors, pipeline stages and experts. All ranks of a replica have an
    ``RLDataset`` of the same arguments and call this with the same prompts and seed; each gets the
    same groups, with the rewards of the first. Where replicas share experts, they call it as often
    as each other: :meth:`agree` tells an ``RLDataset`` when another needs it.

    Args:
        model: a ``GPTModel``, wrapped or not.
        reward: ``(prompt, responses) -> rewards``; responses are lists of token ids.
        group_size: answers to a prompt, >= 2.
        rows_per_pass: most answers in one forward pass; None for all of a call.

    Raises:
        ConfigError: a group of less than two; context parallelism, stages of several chunks, or
            tensors and experts that are split so that neither group holds the other.
        SamplerError: from a call: the reward failed on the answers to a prompt, or the ranks of a
            replica ask for different prompts.
    """

    model: torch.nn.Module = field(kw_only=False)
    reward: RewardFunction = field(kw_only=False)
    group_size: int
    sampling: Sampling
    rows_per_pass: int | None = None

    def __post_init__(self) -> None:
        check_integers("MegatronSampler", least=2, group_size=self.group_size)
        _check_rows("MegatronSampler", self.rows_per_pass)
        self._lockstep = Lockstep()

    def sample_and_score_batch(self, prompts: Sequence[Prompt], seed: int) -> list[ScoredGroup]:
        """A group for each prompt, in order; the same for the same seed and weights.

        Without prompts this rank takes part in the passes of the others.
        """
        keys = [prompt.__key__ for prompt in prompts]
        if any(other != keys for other in on_all_ranks(lambda: keys, self._lockstep.replica)):
            raise SamplerError(
                "the ranks of a model ask for different prompts; give their RLDatasets one "
                "data-parallel rank and seed"
            )
        size = self.group_size
        asked = [prompt.tokens.tolist() for prompt in prompts for _ in range(size)]
        responses, log_probs = generate(
            self.model, asked, self.sampling, seed=seed, rows_per_pass=self.rows_per_pass
        )
        owned = [slice(index * size, (index + 1) * size) for index in range(len(prompts))]

        def scores() -> list[Sequence[float]]:
            if self._lockstep.replica.rank() > 0:
                return []
            return [score(self.reward, p, responses[own]) for p, own in zip(prompts, owned)]

        # Once for a replica: a reward that asks a judge need not say the same twice.
        first, *_ = on_all_ranks(scores, self._lockstep.replica)
        groups = []
        for prompt, own, rewards in zip(prompts, owned, first):
            stop = self.sampling.stop_id
            cut = None if stop is None else [response[-1] != stop for response in responses[own]]
            found = responses[own], log_probs[own], rewards, cut
            groups.append(ScoredGroup.from_responses(prompt.tokens, *found))
        return groups

    def agree(self, status: int) -> int:
        """The largest status of all ranks that must generate together."""
        return self._lockstep.most(status)[0]


def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seed: int = 0,
    rows_per_pass: int | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Continue prompts with a Megatron model.

    All ranks over which the model or its experts are split call it together; those of a replica
    with the same prompts, others with prompts of their own or none.

    Args:
        prompts: token ids, at least one each; lengths may differ.
        seed: of the draws.
        rows_per_pass: most prompts in one forward pass; None for all.

    Returns:
        Response tokens of each prompt, the stop token included, and the log-probability that the
        model gives each of them: at temperature 1 and without ``top_p``, as it is trained.

    Raises:
        ConfigError: a layout that :class:`MegatronSampler` refuses, or an empty prompt.
    """
    lockstep = Lockstep()
    _check_rows("generate", rows_per_pass)
    if not all(map(len, prompts)):
        raise ConfigError("generate: a token in each prompt is needed.")
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    step = rows_per_pass or max(1, len(prompts))
    responses: list[list[int]] = []
    log_probs: list[list[float]] = []
    try:
        (passes,) = lockstep.most(-(-len(prompts) // step))
        for start in range(0, passes * step, step):
            asked = prompts[start : start + step]
            found = _generate_rows(model, lockstep, asked, sampling, generator)
            responses += found[0]
            log_probs += found[1]
    finally:
        model.train(was_training)
    return responses, log_probs


def _check_rows(owner: str, rows_per_pass: int | None) -> None:
    if rows_per_pass is not None:
        check_integers(owner, rows_per_pass=rows_per_pass)


@torch.no_grad()
def _generate_rows(
    model: torch.nn.Module,
    lockstep: Lockstep,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[list[list[int]], list[list[float]]]:
    device = generator.device
    starts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device=device)
    width = max(map(len, prompts), default=0) + sampling.max_new_tokens
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.as_tensor(prompt)
    log_probs = torch.zeros(len(prompts), width, device=device)
    ends = starts.clone()
    going = torch.arange(len(prompts), device=device)
    while True:
        longest = int(ends[going].max()) if len(going) else 0
        rows, used = lockstep.most(len(going), longest)
        if not rows:
            break
        logits = lockstep.next_logits(model, tokens[going], ends[going], rows, used)
        # Both in one message: tokens are whole numbers far below what a double holds exactly.
        drawn = torch.zeros(2, len(going), dtype=torch.float64, device=device)
        if logits is not None and len(going):
            logits = logits[:, : sampling.vocab_size]
            drawn[0] = draw(logits, sampling, generator)
            drawn[1] = torch.log_softmax(logits, dim=-1).gather(1, drawn[0].long()[:, None])[:, 0]
        drawn = lockstep.share(drawn)
        chosen = drawn[0].long()
        tokens[going, ends[going]] = chosen
        log_probs[going, ends[going]] = drawn[1].float()
        ends[going] += 1
        goes_on = ends[going] - starts[going] < sampling.max_new_tokens
        if sampling.stop_id is not None:
            goes_on &= chosen != sampling.stop_id
        going = going[goes_on]
    spans = list(enumerate(zip(starts.tolist(), ends.tolist())))
    return (
        [tokens[row, start:end].tolist() for row, (start, end) in spans],
        [log_probs[row, start:end].tolist() for row, (start, end) in spans],
    )


def draw(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw a token for each row of logits: float [rows, V] to int64 [rows]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        chances = torch.zeros_like(chances).scatter(-1, order, ordered)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]
