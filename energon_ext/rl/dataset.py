# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts, a sampler and rewards as a stream of packed batches."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Callable

import torch.distributed as dist

from energon_ext.arguments import check_integers
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.columns import Column, check_described, columns_to_json
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.loader.compare import Comparison
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.rl.answers import Answers
from energon_ext.rl.group_queue import GroupQueue
from energon_ext.rl.group_rows import WaitingGroup, build_row
from energon_ext.rl.place import Place
from energon_ext.rl.prompt_plan import PromptPlan
from energon_ext.rl.request import check_ahead
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.rounds import Rounds
from energon_ext.rl.sampler import BatchSampler, Sampler
from energon_ext.rl.scoring import Scoring, ScoringOptions
from energon_ext.rl.state import RLState, restored
from energon_ext.state.match import SourceChange
from energon_ext.state.together import end_together

#: Arguments that are integers >= 1.
_SIZES = (
    *("seq_len", "rows", "alignment", "groups_per_batch", "batches_per_step"),
    *("steps_per_version", "epochs_per_batch", "max_attempts"),
)

#: Arguments of :class:`~energon_ext.rl.answers.Answers`.
_OF_ANSWERS = ("sampler", "replica_group", "sync_weights", "seed", "max_attempts")


@dataclass(kw_only=True, eq=False, repr=False)
class RLDataset(ScoringOptions):
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

    Without ``ahead``, only waiting groups are older than the current policy.

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
        max_staleness: versions of the weights that a group may wait before it is dropped and
            counted; 0 drops the groups that a version leaves over. None keeps all. Each step has a
            new version, unless ``steps_per_version``, ``epochs_per_batch`` or ``ahead`` say
            otherwise.
        batches_per_step: batches per optimizer step, its micro-batches on this rank.
        steps_per_version: optimizer steps whose answers are sampled together when the first of them
            begins, and each of which trains on its own part of them, as PPO's minibatches do.
        epochs_per_batch: passes over the answers of a version, each with the same steps and
            batches, as in PPO: for a loss with a ratio to the policy that answered, such as
            :func:`energon_ext.losses.clipped_ratio_losses`.
        ahead: steps whose answers are asked for together, while the steps before train: the prompts
            of the steps ``[n + ahead, n + 2 * ahead)`` get the weights of step n, a multiple of
            ``ahead``. All steps of ``[n, n + ahead)`` are one version. The sampler runs in a
            thread. 0 asks for the answers of a step when it begins.
        exact: let :meth:`save_state` wait for the answers that are asked for ahead. Otherwise their
            prompts are asked again after a resume, with the weights of that time.
        sync_weights: ``step -> None``, to give a server the weights: called on every rank with an
            RLDataset before the first answers of a step, after a resume and after an error.
        replica_group: the ranks of one model, which all have an RLDataset with the same arguments:
            the first asks the sampler and the others receive the answers, see
            :func:`energon_ext.megatron.create_replica_group`. None if every rank asks its own.
        pad_id: token on positions without a sample.
        alignment: every sample begins at a multiple of this many positions, as for
            :class:`~energon_ext.batch.collate.BatchAssembler`.
        columns: the ``columns`` of groups that are not one number per response token, by name, such
            as ``{"experts": Column("int16", (layers, k), at="input", fill=-1)}``.
        document_means: give batches what ``denominator="documents"`` needs, by answer.
        seed: random seed for a BatchSampler: the seed of a prompt's answers depends on it and on
            the number of the prompt in the run.

    Raises:
        ConfigError: an argument is out of range, or there are several data-parallel ranks without
            torch.distributed.
        RankError: from the first ``next()``: ranks differ, or some do not come.
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
    groups: at most those of one call of the sampler, or with ``ahead`` about those of two versions.
    A resumed run may change the number of ranks, ``groups_per_batch``, ``batches_per_step``,
    ``steps_per_version``, ``epochs_per_batch``, ``seq_len``, ``rows``, ``alignment``, ``pad_id``,
    ``max_attempts`` and the prompts; the ranks and the numbers of batches, steps and passes only
    between two steps, and after all passes over the same answers.
    """

    prompts: PlannedDataset = field(kw_only=False)
    sampler: BatchSampler | Sampler = field(kw_only=False)
    seq_len: int
    rows: int
    groups_per_batch: int
    max_attempts: int = 1000
    max_staleness: int | None = None
    batches_per_step: int = 1
    steps_per_version: int = 1
    epochs_per_batch: int = 1
    ahead: int = 0
    exact: bool = True
    sync_weights: Callable[[int], Any] | None = None
    replica_group: dist.ProcessGroup | None = None
    pad_id: int = 0
    alignment: int = 1
    document_means: bool = False
    seed: int = 0
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integers("RLDataset", **{name: getattr(self, name) for name in _SIZES})
        staleness = 0 if self.max_staleness is None else self.max_staleness
        least_0 = {"pad_id": self.pad_id, "max_staleness": staleness, "ahead": self.ahead}
        check_integers("RLDataset", least=0, **least_0)
        methods = ("sample_and_score_batch", "sample_and_score")
        if not any(callable(getattr(self.sampler, name, None)) for name in methods):
            raise ConfigError(
                f"sampler: a {type(self.sampler).__name__} found; it needs {' or '.join(methods)}."
            )
        if self.ahead:
            check_ahead(self.ahead, self.sampler, self.steps_per_version, self.max_staleness)
        options = {each.name: getattr(self, each.name) for each in fields(ScoringOptions)}
        check_described(self.columns, "RLDataset: columns")
        self._scoring = Scoring(**options)
        self._plan = PromptPlan(self.prompts)
        self._workers = self.prompts.worker_config
        self._assembler = BatchAssembler(
            self.seq_len,
            pad_id=self.pad_id,
            alignment=self.alignment,
            document_means=self.document_means,
        )
        self._rollout = RolloutMetrics(self._plan.sources, tuple(self.reward_weights or ()))
        size = (self.rows, self.seq_len, self.alignment)
        self._queue = GroupQueue(self._scoring, self._rollout, size)
        self._rounds = Rounds(self._workers, self.sampler, self.replica_group)
        self._answers = Answers(
            plan=self._plan,
            queue=self._queue,
            rules=replace(self._scoring.rules(self._plan.vocab_size), described=self.columns),
            rounds=self._rounds,
            rank=self._workers.rank,
            groups_ahead=self.ahead * self.batches_per_step * self.groups_per_batch,
            **{name: getattr(self, name) for name in _OF_ANSWERS},
        )
        self._place = Place()
        self._steps_of_version = max(self.steps_per_version, self.ahead)
        self._kept: list[list[WaitingGroup]] = []  # the batches of a pass that will be repeated
        self._has_begun, self._comparison = False, Comparison(self._workers)

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
        return self._place.step

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
        place = self._place
        self._comparison.run(self._plan.run, self._settings(), {"place": vars(place)})
        if place.passes:
            groups = self._kept[place.steps_of_pass * self.batches_per_step + place.batches]
        else:
            groups = self._next_groups()
        weigh = functools.partial(self._scoring.weigh, [waiting.group for waiting in groups])
        # A function of the user may fail on one rank.
        weights = self._rounds.run(weigh) if callable(self.advantages) else weigh()
        arrangement = self._queue.arrange(groups)
        assert arrangement is not None, "the groups of a batch fit"
        rows = [build_row(groups, weights, each, self.columns) for each in arrangement]
        batch = self._assembler(rows, self._plan.sources, self.columns)
        if not place.passes:
            self._queue.remove(len(groups))
            if self.epochs_per_batch > 1:
                self._kept.append(groups)
        self._rollout.end_batch([place.step - waiting.step for waiting in groups])
        version = place.version
        place.end_batch(self.batches_per_step, self._steps_of_version, self.epochs_per_batch)
        if place.version > version:
            self._kept = []
        return batch

    def _next_groups(self) -> list[WaitingGroup]:
        """Sample the groups of the next batch, which remain in the queue."""
        if self.max_staleness is not None:
            self._queue.drop_before(self._place.version - self.max_staleness)
        least, place = self.groups_per_batch, self._place
        if self.steps_per_version > 1 and not (place.steps_of_pass or place.batches):
            least *= self.batches_per_step * self.steps_per_version
        self._answers.fill(least, place)
        if limits := self._plan.epoch_limits:
            index = self._rollout.counts["batches"]
            end_together(bool(self._queue.groups), limits, index, self._workers, is_planned=False)
        return self._queue.first(self.groups_per_batch)

    # State --------------------------------------------------------------------------------------

    def save_state(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the state of this rank after the last batch, as JSON values.

        Args:
            folder: an existing folder for a binary file with the answers, whose name and digest are
                in the state; None to have the answers in the state itself. With ``ahead`` there are
                many.
        """
        return self._state().to_json(folder)

    def _state(self) -> RLState:
        drawn, answered, asked_in = self._answers.in_flight(self.exact)
        return RLState(
            **self._settings(),
            prompts=self._plan.save_state(),
            ranks=self._workers.world_size,
            rank=self._workers.rank,
            place=Place(**vars(self._place)),
            asked_in=asked_in,
            kept=self._kept,
            drawn=drawn,
            groups=self._queue.groups,
            answered=answered,
            rollout=self._rollout.save_state(),
        )

    def _settings(self) -> dict[str, Any]:
        """Return the settings that are the same on all ranks, as fields of an RLState."""
        common = {"max_staleness": self.max_staleness, "seed": self.seed}
        return {
            "fingerprint": {
                **common,
                **self._scoring.fingerprint(),
                **columns_to_json(self.columns),  # waiting groups have these
            },
            "batches_per_step": self.batches_per_step,
            "steps_per_version": self._steps_of_version,
            "epochs_per_batch": self.epochs_per_batch,
        }

    def restore_state(
        self,
        states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        folder: Path | None = None,
    ) -> None:
        """Continue after the batch that a state was saved after.

        Args:
            states: the states of all data-parallel ranks, in any order, whose prompts and groups
                the present ranks share; or only that of this rank, if their number is the same.
            folder: the folder of the files with their answers, if they have such files.

        Raises:
            StateFormatError: a state or its file is damaged or missing, or has another version.
            StateMismatchError: a state was saved with other arguments, or by another class.
            ConfigError: this dataset has already drawn prompts.
        """
        saved = restored(states, self._state(), folder)
        if any(self._queue.arrange(groups) is None for groups in saved.kept):
            raise ConfigError(
                "seq_len, rows: the answers of a step that must be repeated no longer fit; resume "
                "with at least the saved values."
            )
        if self._has_begun:
            raise ConfigError("Restore a state before the first batch, in a new RLDataset.")
        saved = saved.of_sources(self._plan.sources)
        self._plan.restore_state(saved.prompts)
        self._place, self._kept = Place(**vars(saved.place)), [*map(list, saved.kept)]
        self._rollout.restore_state(saved.rollout)
        self._answers.restore([*saved.drawn], [*saved.answered], saved.asked_in)
        self._queue.restore(saved.groups)
