# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts, a sampler and rewards as a stream of packed batches."""

import copy
import math
from typing import Any, Callable, Iterator

import torch
from megatron.energon import SavableDataLoader

from energon_ext.arguments import check_integers, check_number
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.documents.permutation import stable_hash
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SampleError, SamplerError, StateFormatError
from energon_ext.losses import group_advantages
from energon_ext.plan.lookup import find_blend
from energon_ext.rl.group_rows import WeightedGroup, arrange, write_groups
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.sampler import BatchSampler, Sampler, ScoredGroup, check_group
from energon_ext.state.exhaustion import end_together
from energon_ext.state.match import check_fingerprint
from energon_ext.state.schema import check_seal, sealed

STATE_VERSION = 1

#: What a rank tells the others; 1 that it needs groups, 0 that it has enough.
_FAILED = 2


class RLDataset:
    """Yields a :class:`~energon_ext.PackedBatch` of ``rows`` rows from sampled answers.

    1. Prompts are drawn, as many as the loader's batch has, and sampled.
    2. Rewards are clipped. A group whose rewards do not vary teaches nothing and is dropped.
    3. Once ``groups_per_batch`` groups are there, their samples are packed, the longest first, each
       into the row with the fewest tokens. A group that does not fit, or was one too many, comes
       with the next batch; a row that gets no sample is padding.
    4. ``token_weights`` are the advantage of the sample on its response and 0 on the prompt;
       ``log_probs`` and ``rewards`` of the batch are for metrics.

    Nothing is sampled ahead, so the policy that answers is the one that is trained. Only groups
    that wait are older: by so many batches as one call of the sampler fills, at most.

    Args:
        prompts: a savable loader over a dataset of :class:`~energon_ext.PromptTaskEncoder`.
        sampler: a :class:`~energon_ext.rl.BatchSampler`, or a :class:`~energon_ext.rl.Sampler`,
            which is asked prompt by prompt.
        seq_len: T, positions of a row.
        rows: rows of a batch.
        groups_per_batch: groups in a batch; fewer where no more fit.
        reward_clip, advantage_clip: see :func:`~energon_ext.losses.group_advantages`.
        min_reward_std: groups whose clipped rewards have no larger unbiased deviation are dropped.
        max_attempts: so many groups in a row that do not vary are an error.
        pad_id: token on positions without a sample.
        alignment: every sample begins at a multiple of so many positions, as for
            :class:`~energon_ext.BatchAssembler`.
        seed: of what a BatchSampler draws.

    Raises:
        ConfigError: an argument is out of range.
        SamplerError: from ``next()``: the sampler raised, returned something that is not a group,
            or groups never vary. It names the prompt and the counts so far. The next
            ``next()`` asks for the same prompts again; a state saved meanwhile does so as well.
        SampleError: from ``next()``: a sample is longer than a row.
        DataExhaustedError: from ``next()``: every source of prompts has reached its ``max_epochs``,
            here or on another rank; the last batch may have fewer groups.

    State: the loader's, the prompts that were drawn and not sampled, the groups that wait, and
    counters. It grows with the groups that wait: at most those of one call of the sampler.
    """

    def __init__(
        self,
        prompts: SavableDataLoader,
        sampler: BatchSampler | Sampler,
        *,
        seq_len: int,
        rows: int,
        groups_per_batch: int,
        reward_clip: float | None = None,
        advantage_clip: float | None = None,
        min_reward_std: float = 1e-6,
        max_attempts: int = 1000,
        pad_id: int = 0,
        alignment: int = 1,
        seed: int = 0,
    ):
        sizes = {"seq_len": seq_len, "rows": rows, "groups_per_batch": groups_per_batch}
        check_integers("RLDataset", **sizes, max_attempts=max_attempts, alignment=alignment)
        check_integers("RLDataset", least=0, pad_id=pad_id)
        check_number("RLDataset.min_reward_std", min_reward_std)
        methods = ("sample_and_score_batch", "sample_and_score")
        if not any(callable(getattr(sampler, name, None)) for name in methods):
            raise ConfigError(
                f"sampler: a {type(sampler).__name__} found; it needs {' or '.join(methods)}."
            )
        group_advantages([0.0, 1.0], reward_clip, advantage_clip)  # refuses bad clips now
        self.prompts = prompts
        self.sampler = sampler
        self.rows = rows
        self.groups_per_batch = groups_per_batch
        self.reward_clip = reward_clip
        self.advantage_clip = advantage_clip
        self.min_reward_std = min_reward_std
        self.max_attempts = max_attempts
        self._assembler = BatchAssembler(seq_len, pad_id=pad_id, alignment=alignment)
        blend = find_blend(prompts)
        self._sources = blend.keys
        self._epoch_limits = blend.epoch_limits
        self._vocab_size: int = blend.fingerprint.get("vocab_size", 2**31)
        self._seed = f"{seed}/{prompts.worker_config.rank}"
        self._fingerprint = {
            "seed": self._seed,
            **sizes,
            "alignment": alignment,
            "reward_clip": reward_clip,
            "advantage_clip": advantage_clip,
            "min_reward_std": min_reward_std,
        }
        self._iterator: Iterator[list[Prompt]] | None = None
        self._drawn: list[Prompt] = []
        self._groups: list[WeightedGroup] = []
        self._calls = 0
        self._rollout = RolloutMetrics()

    @property
    def metrics(self) -> dict[str, float]:
        """``rollout/*`` of the last batch, see :class:`~energon_ext.rl.RolloutMetrics`."""
        return self._rollout.of_last_batch

    @property
    def counts(self) -> dict[str, int]:
        """Groups sampled, those that varied, those that did not, and batches, since the start."""
        return self._rollout.counts

    def __iter__(self) -> "RLDataset":
        return self

    def __next__(self) -> PackedBatch:
        """Sample until a batch is full, or the prompts have reached their ``max_epochs``.

        Where every source of prompts has one, the data-parallel ranks call this together: the first
        that has no group left ends the run for all of them.
        """
        self._fill()
        if self._epoch_limits:
            end_together(
                bool(self._groups),
                self._epoch_limits,
                self.counts["batches"],
                self.prompts.worker_config,
                is_shared=False,
            )
        taken = self._groups[: self.groups_per_batch]
        while (arrangement := self._arrange(taken)) is None:
            taken.pop()
        batch = write_groups(taken, arrangement, self._assembler, self._sources)
        del self._groups[: len(taken)]
        self._rollout.end_batch(len(taken))
        return batch

    def save_state(self) -> dict[str, Any]:
        """The state after the last batch, which a ``CheckpointStore`` takes as it is."""
        return sealed(
            {
                "version": STATE_VERSION,
                "fingerprint": dict(self._fingerprint),
                # Energon shares objects between its states and itself.
                "prompts": copy.deepcopy(self.prompts.save_state_rank()),
                "drawn": [_save_prompt(prompt) for prompt in self._drawn],
                "groups": [_save_group(group) for group in self._groups],
                "calls": self._calls,
                "rollout": self._rollout.save_state(),
            }
        )

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch that ``state`` was saved after.

        Raises:
            StateFormatError: ``state`` is damaged, something else, or of another version.
            StateMismatchError: saved under other arguments.
            ConfigError: this dataset has drawn prompts already.
        """
        _check_state(state, self.save_state())
        check_seal(state)
        if self._iterator is not None:
            raise ConfigError("Restore a state before the first batch, in a new RLDataset.")
        check_fingerprint(state["fingerprint"], self._fingerprint)
        self.prompts.restore_state_rank(copy.deepcopy(state["prompts"]))
        self._drawn = [_load_prompt(prompt) for prompt in state["drawn"]]
        self._groups = [_load_group(group) for group in state["groups"]]
        self._calls = state["calls"]
        self._rollout.restore_state(state["rollout"])

    def _fill(self) -> None:
        """Sample until there are groups for a batch, or no prompts.

        Ranks that must generate in step (``sampler.agree``) go on while one of them needs it, and
        fail where one fails: a rank that left alone would leave the others waiting for ever.
        """
        agree = getattr(self.sampler, "agree", int)
        error: Exception | None = None
        while True:
            wants = False
            try:
                wants = error is None and len(self._groups) < self.groups_per_batch and self._draw()
            except Exception as caught:  # whatever reading prompts may raise
                error = caught
            status = agree(_FAILED if error else int(wants))
            if status == _FAILED:
                raise error or SamplerError("another rank failed to sample; its error says why")
            if not status:
                return
            try:
                if wants:
                    self._sample()
                elif hasattr(self.sampler, "sample_and_score_batch"):
                    self.sampler.sample_and_score_batch([], 0)  # takes part
            except Exception as caught:  # said to the others first, then raised
                error = caught

    def _sample(self) -> None:
        """Sample the prompts that were drawn; nothing has changed if that fails."""
        groups = self._ask_sampler(self._drawn)
        weighted = [self._weigh(prompt, group) for prompt, group in zip(self._drawn, groups)]
        last_prompt = self._drawn[-1]
        self._drawn = []
        self._calls += 1
        self._rollout.add([group.rewards for group in groups], [w is not None for w in weighted])
        self._groups += [group for group in weighted if group is not None]
        if self._rollout.failures_in_a_row >= self.max_attempts:
            failures, self._rollout.failures_in_a_row = self._rollout.failures_in_a_row, 0
            raise self._error(
                last_prompt.__key__,
                f"the rewards of {failures} groups in a row do not vary (max_attempts="
                f"{self.max_attempts}); look at the reward function, or take other prompts",
            )

    def _ask_sampler(self, prompts: list[Prompt]) -> list[ScoredGroup]:
        if hasattr(self.sampler, "sample_and_score_batch"):
            seed = stable_hash(f"{self._seed}/{self._calls}")
            return self._call(prompts, self.sampler.sample_and_score_batch, prompts, seed)
        ask = self.sampler.sample_and_score
        return [
            self._call([prompt], lambda tokens: [ask(tokens)], torch.as_tensor(prompt.tokens))[0]
            for prompt in prompts
        ]

    def _call(
        self, prompts: list[Prompt], call: Callable[..., list[ScoredGroup]], *asked: Any
    ) -> list[ScoredGroup]:
        key = prompts[0].__key__
        if len(prompts) > 1:
            key += f" (and {len(prompts) - 1} more in the same call)"
        try:
            groups = call(*asked)
        except SamplerError as error:
            raise self._error(error.key or key, error.reason) from error
        except Exception as error:  # a user's sampler may raise anything
            raised = f"the sampler raised {type(error).__name__}: {error}"
            raise self._error(key, raised) from error
        if not isinstance(groups, list) or len(groups) != len(prompts):
            found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
            raise self._error(key, f"the sampler returned {found} for {len(prompts)} prompts")
        for prompt, group in zip(prompts, groups):
            try:
                check_group(group, prompt, self._vocab_size)
            except SampleError as error:
                raise self._error(prompt.__key__, str(error)) from error
        return [group.plain() for group in groups]

    def _weigh(self, prompt: Prompt, group: ScoredGroup) -> WeightedGroup | None:
        """The group with its advantages; None if its rewards do not vary."""
        clip = self.reward_clip or math.inf
        rewards = group.rewards.double().clamp(-clip, clip)
        if float(rewards.std()) <= self.min_reward_std:
            return None
        advantages = group_advantages(group.rewards, self.reward_clip, self.advantage_clip)
        weighted = WeightedGroup(prompt.__key__, prompt.source, group, advantages)
        seq_len, lengths = self._assembler.seq_len, group.sample_lengths()
        if max(lengths) > seq_len:
            sample = next(n for n, length in enumerate(lengths) if length > seq_len)
            raise SampleError(
                f"Sample {sample} of prompt {weighted.key} has {lengths[sample]} tokens, a row has "
                f"{seq_len}: give shorter answers or prompts, or longer rows."
            )
        if self._arrange([weighted]) is None:
            raise SampleError(
                f"The group of prompt {weighted.key} has {sum(lengths)} tokens and does not fit "
                f"into {self.rows} rows of {seq_len}: use more rows."
            )
        return weighted

    def _arrange(self, groups: list[WeightedGroup]) -> list[list[tuple[int, int]]] | None:
        assembler = self._assembler
        return arrange(groups, self.rows, assembler.seq_len, assembler.alignment)

    def _draw(self) -> bool:
        """Draw prompts, unless some wait for a sampler that failed; False where there are none."""
        if not self._drawn and self._iterator is not None:
            self._drawn = next(self._iterator, [])
        if not self._drawn:  # not begun, or at the end of an epoch
            self._iterator = iter(self.prompts)
            self._drawn = next(self._iterator, [])
        if not self._drawn and not self._epoch_limits:
            raise ConfigError("The dataset has no prompts for this rank; use fewer ranks.")
        return bool(self._drawn)

    def _error(self, key: str, reason: str) -> SamplerError:
        return SamplerError(reason, key=key, counts=self.counts)


def _check_state(state: Any, fresh: dict[str, Any]) -> None:
    """Raise StateFormatError for another version, or fields unlike those of a fresh state."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise StateFormatError(
            f"A state of RLDataset, version {STATE_VERSION}, is needed, found "
            f"{state.get('version') if isinstance(state, dict) else type(state).__name__!r}. "
            "Restore another checkpoint."
        )
    for name, value in fresh.items():
        if not isinstance(state.get(name), type(value)) and name != "prompts":
            raise StateFormatError(
                f"The state of RLDataset is damaged: {name} is {state.get(name)!r:.80}, a "
                f"{type(value).__name__} is needed. Restore another checkpoint."
            )


def _save_prompt(prompt: Prompt) -> dict[str, Any]:
    fields = {name: getattr(prompt, name) for name in ("source", "tokens", "metadata")}
    return {"key": prompt.__key__, **fields}


def _load_prompt(state: dict[str, Any]) -> Prompt:
    fields = {name: value for name, value in state.items() if name != "key"}
    return Prompt(__key__=state["key"], __restore_key__=(), __subflavors__=None, **fields)


def _save_group(weighted: WeightedGroup) -> dict[str, Any]:
    return {**vars(weighted), "group": dict(vars(weighted.group))}


def _load_group(state: dict[str, Any]) -> WeightedGroup:
    return WeightedGroup(**{**state, "group": ScoredGroup(**state["group"])})
