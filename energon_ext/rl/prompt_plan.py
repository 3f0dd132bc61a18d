# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The prompts of a run: one plan, from which the data-parallel ranks take batches in turn.

Every rank draws all batches and reads only its own, so that all ranks are at the same place of the
plan, and a run continues there with any number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError
from energon_ext.keyed import stable_hash
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.resume_log import log_resume
from energon_ext.plan.cursor import restore_cursor, save_cursor
from energon_ext.plan.progress import DescribedBatch, Round
from energon_ext.plan.topology import Topology
from energon_ext.samples.numbered import as_worker
from energon_ext.state.match import SourceChange


@dataclass(frozen=True)
class PlannedPrompt:
    """A prompt that was drawn, as JSON values.

    Attributes:
        number: prompts that all ranks drew before it since the run began.
        source: key of its source.
        row: what its source needs to read it.
    """

    number: int
    source: str
    row: Any

    def seed(self, run_seed: int) -> int:
        """Return the random seed of its answers, which depends on no rank."""
        return stable_hash(f"{run_seed}/{self.number}")


class PromptPlan:
    """Draws prompts for the ranks.

    Args:
        dataset: planned prompts; its state does not change.

    Attributes:
        run: the prompts in the order in which all ranks draw them.
        sources: keys of the sources.
        ended: whether every source has reached its ``max_epochs``.
        changes: effect of the restore on each source.

    Raises:
        ConfigError: not a planned dataset, or one that is read once.
    """

    def __init__(self, dataset: Any):
        if not isinstance(dataset, PlannedDataset):
            raise ConfigError(
                f"prompts: a {type(dataset).__name__} found; pass the dataset that "
                f"energon_ext.get_train_dataset returns for a PromptTaskEncoder."
            )
        run = dataset.run
        if run.options.restarts:
            raise ConfigError(
                "prompts: a dataset with repeat=False found, which has no next epoch; leave it out "
                "and set `max_epochs: 1` for every source."
            )
        if run.loss_weights:
            raise ConfigError(
                f"loss_weight: {next(iter(run.loss_weights))} has one, but its prompts are not "
                f"trained; give its answers `sample_weights` in their ScoredGroup."
            )
        rows = run.topology.batch_rows
        self.run = run.over(Topology(rows, rows))
        self._dataset = PlannedDataset(
            self.run, dataset.batches, worker_config=dataset.worker_config
        )
        self.sources = self.run.keys
        self.ended = False
        self.changes: list[SourceChange] = []
        self._stream: Iterator[Round] | None = None

    @property
    def epoch_limits(self) -> dict[str, int]:
        """``max_epochs`` by source if all have one; else empty."""
        return self.run.epoch_limits

    @property
    def prompts_per_call(self) -> int:
        """Prompts of a batch."""
        return self.run.topology.batch_rows

    @property
    def vocab_size(self) -> int:
        return int(self.run.fingerprint.get("vocab_size", 2**31))

    def draw(self, ranks: Sequence[int], own: int) -> list[PlannedPrompt]:
        """Take a batch for each of some ranks, in order; return those of rank ``own``.

        At the end of the plan, the last ranks get fewer prompts or none.
        """
        prompts: list[PlannedPrompt] = []
        for rank in ranks:
            first = self.run.progress.read
            round_ = self._next_round()
            if round_ is None:
                break
            if rank == own:
                prompts += [
                    PlannedPrompt(first + place, self.sources[source], row)
                    for place, (source, row, is_padding, _) in enumerate(round_.batch.rows)
                    if not is_padding
                ]
        return prompts

    def _next_round(self) -> Round | None:
        if self._stream is None:
            self._dataset.begin()
            self._stream = self.run.rounds(self.run.draw_own_steps())
        try:
            round_ = next(self._stream, None)
        except BaseException:
            self._stream = None  # begins again at the same place
            raise
        if round_ is None:
            self.ended = True
        else:
            self._dataset.hand_out(round_)
        return round_

    def read(self, prompts: Sequence[PlannedPrompt]) -> list[Prompt]:
        """Read and encode prompts; raises what reading samples of a plan may raise."""
        number = {key: number for number, key in enumerate(self.sources)}
        with as_worker():
            batch = DescribedBatch(
                [(number[each.source], each.row, False, None) for each in prompts]
            )
            return self._dataset.batches.read(batch)

    def save_state(self) -> dict[str, Any]:
        """Return the cursor after the last drawn batch, equal on all ranks."""
        return save_cursor(self.run)

    def restore_state(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor; raises as :func:`~energon_ext.plan.cursor.restore_cursor`."""
        self.changes = restore_cursor(self.run, cursor)
        if self._dataset.worker_config.rank == 0:
            log_resume(self.changes, cursor, self.run)
