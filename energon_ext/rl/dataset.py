# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts, a sampler and rewards as a stream of packed batches."""

from dataclasses import dataclass, field, fields
from typing import Any, Callable, Iterator, Mapping

import torch.distributed as dist
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.arguments import check_integers
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SamplerError, log_of
from energon_ext.keyed import stable_hash
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.lookup import find_blend
from energon_ext.rl.advantages import AdvantageFunction
from energon_ext.rl.group_rows import WaitingGroup, arrange, build_row
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.sampler import (
    BatchSampler,
    Sampler,
    Unanswered,
    ask_together,
    run_together,
    sample_in_step,
)
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.rl.scoring import Scoring
from energon_ext.rl.state import build_state, read_state
from energon_ext.state.together import end_together

_logger = log_of(__name__)

#: Arguments that are integers >= 1, and those besides the seed that a state depends on.
_SIZES = ("seq_len", "rows", "groups_per_batch", "max_attempts", "batches_per_step", "alignment")
_SAVED_ARGUMENTS = ("groups_per_batch", "max_staleness", "batches_per_step", "alignment")


@dataclass(kw_only=True, eq=False, repr=False)
class RLDataset:
    """Yields a :class:`~energon_ext.PackedBatch` of ``rows`` rows from sampled answers.

    1. Draw one batch of the prompt loader and sample answers.
    2. Add named rewards and clip the rewards. Drop groups whose rewards do not vary, as they teach
       nothing; drop and log groups that are unanswered or too long for a batch.
    3. Once there are ``groups_per_batch`` groups, pack their samples, the longest first, each into
       the row with the fewest tokens. Groups that do not fit, or are too many, wait for the next
       batch; a row without samples is padding.
    4. ``token_weights`` are the advantage of the sample on its response, times its
       ``sample_weights``, and 0 on the prompt and where its ``response_mask`` is False.
       ``log_probs`` and ``rewards`` of the batch are for metrics.

    Nothing is sampled ahead, so only waiting groups are older than the current policy.

    Args:
        prompts: a dataset of :class:`~energon_ext.PromptTaskEncoder`, or any loader over one with
            ``state_dict`` and ``load_state_dict``.
        sampler: a :class:`~energon_ext.rl.BatchSampler`, or a :class:`~energon_ext.rl.Sampler`,
            which is called once per prompt.
        seq_len: T, positions per row.
        rows: rows per batch.
        groups_per_batch: groups per batch; fewer if no more fit.
        advantages: how advantages are computed from the rewards ``r`` of a group without its own:
            ``grpo``, ``(r - mean) / (std + 1e-8)`` with the unbiased deviation; ``dr_grpo``,
            ``r - mean``; ``rloo``, ``r`` less the mean of the other answers; ``reinforce``, ``r``
            less the mean over all answers of the batch on this rank. Or a function of the rewards
            of each group of a batch, a list of float64 [N], that returns such a list.
        reward_weights: factors of named rewards, whose sum is the reward; None if rewards have no
            names. Each name has the metric ``reward/<name>``.
        reward_clip: clips rewards to ``[-reward_clip, reward_clip]`` before anything else.
        advantage_clip: clips advantages to ``[-advantage_clip, advantage_clip]``.
        drop_equal: drop groups whose rewards do not vary, or whose own advantages are all 0.
        min_reward_std: rewards vary if, clipped, they have a larger unbiased deviation.
        mask_truncated: do not train on truncated answers; they count in the mean of their group.
        max_attempts: raise an error after this many groups in a row that cannot be trained on.
        max_staleness: optimizer steps that a group may wait before it is dropped and counted; 0
            drops the groups that a step leaves over. None keeps all.
        batches_per_step: batches per optimizer step, its micro-batches on this rank.
        sync_weights: ``step -> None``, called on every rank with an RLDataset before the first
            batch of each step, after a resume and after an error, to give a server the weights.
        replica_group: the ranks of one model, which all have an RLDataset with the same arguments:
            the first asks the sampler and the others receive the answers, see
            :func:`energon_ext.megatron.create_replica_group`. None if every rank asks its own.
        pad_id: token on positions without a sample.
        alignment: every sample begins at a multiple of this many positions, as for
            :class:`~energon_ext.BatchAssembler`.
        seed: random seed for a BatchSampler.

    Raises:
        ConfigError: an argument is out of range.
        SamplerError: from ``next()``: the sampler raised, returned something that is not a group,
            or ``max_attempts`` is reached. It names the prompt and the counts so far. The next
            ``next()``, also in a run resumed from a state saved meanwhile, samples the same prompts
            again, or the following ones after ``max_attempts``.
        DataExhaustedError: from ``next()``: every source of prompts has reached its ``max_epochs``,
            here or on another rank; the last batch may have fewer groups.

    State: the loader's state, prompts drawn but not yet sampled, waiting groups, and counters. It
    grows with the waiting groups: at most those of one call of the sampler. A resumed run may
    change ``seq_len``, ``rows``, ``pad_id``, ``max_attempts`` and the prompts.
    """

    prompts: Any = field(kw_only=False)
    sampler: BatchSampler | Sampler = field(kw_only=False)
    seq_len: int
    rows: int
    groups_per_batch: int
    advantages: str | AdvantageFunction = "grpo"
    reward_weights: Mapping[str, float] | None = None
    reward_clip: float | None = None
    advantage_clip: float | None = None
    drop_equal: bool = True
    min_reward_std: float = 1e-6
    mask_truncated: bool = False
    max_attempts: int = 1000
    max_staleness: int | None = None
    batches_per_step: int = 1
    sync_weights: Callable[[int], Any] | None = None
    replica_group: dist.ProcessGroup | None = None
    pad_id: int = 0
    alignment: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_integers("RLDataset", **{name: getattr(self, name) for name in _SIZES})
        staleness = 0 if self.max_staleness is None else self.max_staleness
        check_integers("RLDataset", least=0, pad_id=self.pad_id, max_staleness=staleness)
        methods = ("sample_and_score_batch", "sample_and_score")
        if not any(callable(getattr(self.sampler, name, None)) for name in methods):
            raise ConfigError(
                f"sampler: a {type(self.sampler).__name__} found; it needs {' or '.join(methods)}."
            )
        if self.replica_group is not None and hasattr(self.sampler, "agree"):
            raise ConfigError(
                f"replica_group: the ranks of a {type(self.sampler).__name__} sample together; "
                f"leave replica_group out."
            )
        names = [each.name for each in fields(Scoring)]
        self._scoring = Scoring(**{name: getattr(self, name) for name in names})
        if isinstance(self.prompts, SavableDataset):
            self.prompts = open_loader(self.prompts)
        self._synchronized: int | None = None
        self._size = (self.rows, self.seq_len, self.alignment)
        self._assembler = BatchAssembler(self.seq_len, pad_id=self.pad_id, alignment=self.alignment)
        blend = find_blend(self.prompts)
        self._sources = blend.keys
        self._epoch_limits = blend.epoch_limits
        self._rules = self._scoring.rules(blend.fingerprint.get("vocab_size", 2**31))
        self._seed = f"{self.seed}/{self.prompts.worker_config.rank}"
        own = {name: getattr(self, name) for name in _SAVED_ARGUMENTS}
        self._fingerprint = {**own, **self._scoring.fingerprint(), "seed": self._seed}
        self._iterator: Iterator[list[Prompt]] | None = None
        self._drawn: list[Prompt] = []
        self._groups: list[WaitingGroup] = []
        self._calls = 0
        self._rollout = RolloutMetrics(self._sources, tuple(self.reward_weights or ()))
        self._last_refusal = ""

    @property
    def metrics(self) -> dict[str, float]:
        """``rollout/*`` of the last batch, see :class:`~energon_ext.rl.RolloutMetrics`."""
        return self._rollout.means()

    def metrics_of_all_ranks(self) -> dict[str, float]:
        """Return :attr:`metrics` over the data-parallel ranks, which call this together."""
        group = self.prompts.worker_config.data_parallel_group
        return self._rollout.means(group, all_ranks=True)

    @property
    def counts(self) -> dict[str, int]:
        """Groups sampled, by outcome, and batches, since the start."""
        return self._rollout.counts

    @property
    def step(self) -> int:
        """Number of optimizer steps whose batches have all been yielded."""
        return self.counts["batches"] // self.batches_per_step

    def __iter__(self) -> "RLDataset":
        return self

    def __next__(self) -> PackedBatch:
        """Sample until a batch is full, or the prompts have reached their ``max_epochs``.

        If every source of prompts has a ``max_epochs``, the data-parallel ranks call this together:
        the first rank without groups ends the run for all.
        """
        try:
            self._synchronize()
            self._drop_stale()
            sample_in_step(self.sampler, self._wants, self._sample)
        except BaseException:
            self._synchronized = None  # a server that was started again has other weights
            raise
        if limits := self._epoch_limits:
            index, workers = self.counts["batches"], self.prompts.worker_config
            end_together(bool(self._groups), limits, index, workers, is_planned=False)
        taken = self._groups[: self.groups_per_batch]
        while (arrangement := arrange(taken, *self._size)) is None:
            taken.pop()
        weights = self._scoring.weigh([waiting.group for waiting in taken])
        rows = [build_row(taken, weights, members) for members in arrangement]
        batch = self._assembler(rows, self._sources)
        del self._groups[: len(taken)]
        self._rollout.end_batch([self.step - waiting.step for waiting in taken])
        return batch

    def save_state(self) -> dict[str, Any]:
        """Return the state of this rank after the last batch, as JSON values."""
        return build_state(
            self._fingerprint,
            self.prompts.state_dict(),
            self._drawn,
            self._groups,
            self._calls,
            self._rollout.save_state(),
        )

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch that ``state`` was saved after.

        Raises:
            StateFormatError: the state is damaged, or has another version.
            StateMismatchError: the state was saved with other arguments, or by another class.
            ConfigError: this dataset has already drawn prompts.
        """
        saved = read_state(state, self._fingerprint)
        if self._iterator is not None:
            raise ConfigError("Restore a state before the first batch, in a new RLDataset.")
        self.prompts.load_state_dict(saved["prompts"])
        self._calls = saved["calls"]
        self._rollout.restore_state(saved["rollout"])
        drawn, groups = saved["drawn"], saved["groups"]
        if removed := {each.source for each in drawn + groups} - {*self._sources}:
            _logger.warning("Dropped prompts and groups of removed sources: %s", sorted(removed))
        self._drawn = [each for each in drawn if each.source not in removed]
        kept = [each for each in groups if each.source not in removed]
        self._groups = [each for each in kept if self._fits(each)]
        self._rollout.count("too_long_groups", len(kept) - len(self._groups))

    def _wants(self) -> bool:
        return len(self._groups) < self.groups_per_batch and self._draw()

    def _synchronize(self) -> None:
        """Give the server the weights of this step, once per step."""
        if self.sync_weights is not None and self._synchronized != self.step:
            run_together(self.sync_weights, self.step, self.replica_group)
            self._synchronized = self.step

    def _sample(self) -> None:
        """Sample the drawn prompts; change nothing if that fails."""
        seed = stable_hash(f"{self._seed}/{self._calls}")
        try:
            arguments = (self.sampler, self._drawn, seed, self._rules)
            groups = ask_together(*arguments, self.replica_group)
        except SamplerError as error:
            raise SamplerError(error.reason, key=error.key, counts=self.counts) from error
        prompts, self._drawn = self._drawn, []
        self._calls += 1
        for prompt, group in zip(prompts, groups):
            self._add(prompt, group)
        if sum(self._rollout.failures_in_a_row.values()) >= self.max_attempts:
            failures = self._rollout.failures(self._last_refusal)
            self._rollout.failures_in_a_row = {}
            reason = f"no group could be trained on (max_attempts={self.max_attempts}): {failures}"
            raise SamplerError(reason, key=prompts[-1].__key__, counts=self.counts)

    def _add(self, prompt: Prompt, group: ScoredGroup | Unanswered) -> None:
        """Add a group to those that wait, unless nothing can be learned from it."""
        key, source = prompt.__key__, prompt.source
        if isinstance(group, Unanswered):
            _logger.warning("Prompt %s is dropped: %s", key, group.reason)
            self._last_refusal = group.reason
            self._rollout.add(source, None, "unanswered_groups")
            return
        group, parts = self._scoring.combine_rewards(group)
        waiting = WaitingGroup(key, source, group, self.step)
        dropped = None
        if not self._scoring.teaches(group):
            dropped = "zero_var_groups"
        elif not self._fits(waiting):
            dropped = "too_long_groups"
        self._rollout.add(source, group, dropped, parts)
        if dropped is None:
            self._groups.append(waiting)

    def _fits(self, waiting: WaitingGroup) -> bool:
        """Return True if a batch has room for this group alone; otherwise log it."""
        if arrange([waiting], *self._size) is not None:
            return True
        lengths = waiting.group.sample_lengths()
        _logger.warning(
            "The answers to prompt %s are dropped: with the prompt they have %s tokens, the "
            "longest %s, and a batch has %s rows of %s.",
            *(waiting.key, sum(lengths), max(lengths), self.rows, self.seq_len),
        )
        return False

    def _drop_stale(self) -> None:
        if self.max_staleness is None:
            return
        oldest = self.step - self.max_staleness
        kept = [waiting for waiting in self._groups if waiting.step >= oldest]
        self._rollout.count("stale_groups", len(self._groups) - len(kept))
        self._groups = kept

    def _draw(self) -> bool:
        """Draw prompts, unless some are left from a failed call; return False if there are none."""
        if not self._drawn and self._iterator is not None:
            self._drawn = next(self._iterator, [])
        if not self._drawn:  # the first epoch, or the end of one
            self._iterator = iter(self.prompts)
            self._drawn = next(self._iterator, [])
        if not self._drawn and not self._epoch_limits:
            raise ConfigError("The dataset has no prompts for this rank; use fewer ranks.")
        return bool(self._drawn)
