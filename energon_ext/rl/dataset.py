# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts, a sampler and rewards as a stream of packed batches."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Callable

import torch.distributed as dist

from energon_ext.arguments import check_integers
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SamplerError, log_of
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.rl.advantages import AdvantageFunction
from energon_ext.rl.group_queue import GroupQueue
from energon_ext.rl.group_rows import build_row
from energon_ext.rl.prompt_plan import PlannedPrompt, PromptPlan
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.rounds import Need, Rounds
from energon_ext.rl.sampler import BatchSampler, Sampler, ask_together, run_together
from energon_ext.rl.scoring import Scoring
from energon_ext.rl.state import RLState, restored
from energon_ext.state.match import SourceChange
from energon_ext.state.together import end_together

_logger = log_of(__name__)

#: Arguments that are integers >= 1.
_SIZES = ("seq_len", "rows", "groups_per_batch", "max_attempts", "batches_per_step", "alignment")


@dataclass(kw_only=True, eq=False, repr=False)
class RLDataset:
    """Yields a :class:`~energon_ext.PackedBatch` of ``rows`` rows from sampled answers.

    1. Take the next batch of prompts from the plan that all data-parallel ranks share, and sample
       answers. Only ranks that need more groups take one.
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
        prompts: a dataset of :class:`~energon_ext.PromptTaskEncoder`; its ``batch_size`` is the
            number of prompts that a rank samples together.
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
        seed: random seed for a BatchSampler: the seed of a prompt's answers depends on it and on
            the number of the prompt in the run.

    Raises:
        ConfigError: an argument is out of range, or there are several data-parallel ranks without
            torch.distributed.
        SamplerError: from ``next()``: the sampler raised, returned something that is not a group,
            or ``max_attempts`` is reached. It names the prompt and the counts so far. If one rank
            fails, ``next()`` raises on all data-parallel ranks. The next ``next()``, also in a run
            resumed from a state saved meanwhile, samples the same prompts again, or the following
            ones after ``max_attempts``.
        DataExhaustedError: from ``next()``: every source of prompts has reached its ``max_epochs``,
            here or on another rank; the last batch may have fewer groups.

    Attributes:
        changes: effect of a restore on each source of prompts.

    State: the place in the prompts, which is the same on all ranks, and what only this rank has:
    prompts drawn but not yet sampled, waiting groups, and counters. It grows with the waiting
    groups: at most those of one call of the sampler. A resumed run may change the number of ranks,
    ``groups_per_batch``, ``batches_per_step``, ``seq_len``, ``rows``, ``alignment``, ``pad_id``,
    ``max_attempts`` and the prompts; the first three only between two steps.
    """

    prompts: PlannedDataset = field(kw_only=False)
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
        self._synchronized: int | None = None
        self._plan = PromptPlan(self.prompts)
        self._workers = self.prompts.worker_config
        self._rounds = Rounds(self._workers, self.sampler, self.replica_group)
        self._assembler = BatchAssembler(self.seq_len, pad_id=self.pad_id, alignment=self.alignment)
        self._rules = self._scoring.rules(self._plan.vocab_size)
        self._rollout = RolloutMetrics(self._plan.sources, tuple(self.reward_weights or ()))
        size = (self.rows, self.seq_len, self.alignment)
        self._queue = GroupQueue(self._scoring, self._rollout, size)
        self._drawn: list[PlannedPrompt] = []  # and not answered yet
        self._prompts: list[Prompt] = []  # those of them that a round asks about
        self._step = self._batches = 0
        self._has_begun = False

    @property
    def metrics(self) -> dict[str, float]:
        """``rollout/*`` of the last batch, see :class:`~energon_ext.rl.RolloutMetrics`."""
        return self._rollout.means()

    def metrics_of_all_ranks(self) -> dict[str, float]:
        """Return :attr:`metrics` over the data-parallel ranks, which call this together."""
        return self._rollout.means(self._workers.data_parallel_group, all_ranks=True)

    @property
    def counts(self) -> dict[str, int]:
        """Groups sampled, by outcome, and batches, since the start."""
        return self._rollout.counts

    @property
    def step(self) -> int:
        """Number of optimizer steps whose batches have all been yielded."""
        return self._step

    @property
    def changes(self) -> list[SourceChange]:
        return self._plan.changes

    def __iter__(self) -> "RLDataset":
        return self

    def __next__(self) -> PackedBatch:
        """Sample until a batch is full, or the prompts have reached their ``max_epochs``.

        The data-parallel ranks call this together, since they share the prompts. If every source
        has a ``max_epochs``, the first rank without groups ends the run for all.
        """
        self._has_begun = True
        self._sample()
        if limits := self._plan.epoch_limits:
            index = self._rollout.counts["batches"]
            end_together(bool(self._queue.groups), limits, index, self._workers, is_planned=False)
        taken, arrangement = self._queue.first(self.groups_per_batch)
        weights = self._scoring.weigh([waiting.group for waiting in taken])
        rows = [build_row(taken, weights, members) for members in arrangement]
        batch = self._assembler(rows, self._plan.sources)
        self._queue.remove(len(taken))
        self._rollout.end_batch([self._step - waiting.step for waiting in taken])
        self._batches += 1
        if self._batches == self.batches_per_step:
            self._step, self._batches = self._step + 1, 0
        return batch

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the state of this rank after the last batch, as JSON values."""
        return self._state().to_json()

    def _state(self) -> RLState:
        common = {"max_staleness": self.max_staleness, "seed": self.seed}
        return RLState(
            fingerprint={**common, **self._scoring.fingerprint()},
            prompts=self._plan.save_state(),
            ranks=self._workers.world_size,
            rank=self._workers.rank,
            batches_per_step=self.batches_per_step,
            step=self._step,
            batches=self._batches,
            drawn=self._drawn,
            groups=self._queue.groups,
            rollout=self._rollout.save_state(),
        )

    def restore_state(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue after the batch that a state was saved after.

        Args:
            states: the states of all data-parallel ranks, in any order, whose prompts and groups
                the present ranks share; or only that of this rank, if their number is the same.

        Raises:
            StateFormatError: a state is damaged, has another version, or one is missing.
            StateMismatchError: a state was saved with other arguments, or by another class.
            ConfigError: this dataset has already drawn prompts.
        """
        saved = restored(states, self._state())
        if self._has_begun:
            raise ConfigError("Restore a state before the first batch, in a new RLDataset.")
        self._plan.restore_state(saved.prompts)
        self._step, self._batches = saved.step, saved.batches
        self._rollout.restore_state(saved.rollout)
        sources = [*(each.source for each in saved.drawn), *(each.source for each in saved.groups)]
        if removed := {*sources} - {*self._plan.sources}:
            _logger.warning("Dropped prompts and groups of removed sources: %s", sorted(removed))
        self._drawn = [each for each in saved.drawn if each.source not in removed]
        self._queue.restore(each for each in saved.groups if each.source not in removed)

    # Sampling -----------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Sample until every rank has enough groups; if one of them fails, all raise."""
        try:
            error = self._attempt(self._begin_step)
            while any(needs := self._rounds.agree(self._need(), error)):
                error = self._attempt(functools.partial(self._read, needs))
                self._rounds.agree(Need.NOTHING, error)
                error = self._attempt(self._ask)
        except BaseException:
            self._synchronized = None  # a server that was started again has other weights
            raise

    @staticmethod
    def _attempt(work: Callable[[], Any]) -> Exception | None:
        """Return the error of some work, which is raised once the other ranks know of it."""
        try:
            work()
        except Exception as error:  # a sampler, or what reads prompts, may raise anything
            return error
        return None

    def _begin_step(self) -> None:
        """Give the server the weights of this step, once per step, and drop stale groups."""
        if self.sync_weights is not None and self._synchronized != self._step:
            run_together(self.sync_weights, self._step, self.replica_group)
            self._synchronized = self._step
        if self.max_staleness is not None:
            self._queue.drop_before(self._step - self.max_staleness)

    def _need(self) -> Need:
        if len(self._queue.groups) >= self.groups_per_batch:
            return Need.NOTHING
        if self._drawn:  # and not answered, as a call failed
            return Need.ANSWERS
        return Need.NOTHING if self._plan.ended else Need.PROMPTS

    def _read(self, needs: Sequence[Need]) -> None:
        """Draw prompts for the ranks that need some; read those that this rank asks about.

        After a failed call only its prompts are asked about, as if it had not failed.
        """
        if Need.ANSWERS not in needs:
            ranks = [rank for rank, need in enumerate(needs) if need == Need.PROMPTS]
            self._drawn += self._plan.draw(ranks, self._workers.rank)
        asks = self._drawn and needs[self._workers.rank] != Need.NOTHING
        self._prompts = self._plan.read(self._drawn) if asks else []

    def _ask(self) -> None:
        """Sample answers; change nothing if that fails."""
        prompts = self._prompts
        if not prompts and not hasattr(self.sampler, "agree"):
            return
        seeds = [each.seed(self.seed) for each in self._drawn] if prompts else []
        try:
            arguments = (self.sampler, prompts, seeds, self._rules)
            groups = ask_together(*arguments, self.replica_group)
        except SamplerError as error:
            raise SamplerError(error.reason, key=error.key, counts=self.counts) from error
        if not prompts:  # this rank took part in the passes of others
            return
        drawn, self._drawn = self._drawn, []
        for planned, prompt, group in zip(drawn, prompts, groups):
            self._queue.add(planned.number, prompt, group, self._step)
        if sum(self._rollout.failures_in_a_row.values()) >= self.max_attempts:
            failures = self._rollout.failures(self._queue.last_refusal)
            self._rollout.failures_in_a_row = {}
            reason = f"no group could be trained on (max_attempts={self.max_attempts}): {failures}"
            raise SamplerError(reason, key=prompts[-1].__key__, counts=self.counts)
