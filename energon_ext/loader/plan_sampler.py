# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A plan over the samples of a dataset that the user reads himself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch.utils.data import Sampler

from energon_ext.arguments import check_choice, check_integer, choices
from energon_ext.errors import ConfigError
from energon_ext.loader.resume_log import log_resume
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import BLEND, INTERLEAVE, blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.numbered_rows import NumberedRows
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.run import Run, RunOptions
from energon_ext.plan.source import PlannedSource, Reader
from energon_ext.plan.spec import SAMPLES, KindSpec, Spec
from energon_ext.plan.topology import Topology
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.packers import OnePerRow
from energon_ext.state.match import SourceChange
from energon_ext.state.schema import check_seal, seal
from energon_ext.weights import ScheduleAxis, weight_from_config

#: Samples that a source plans together.
_BUFFER = 4096


class PlanSampler(Sampler[int]):
    """Yields the indices of your own dataset in the order of a plan.

    Each sample is a row that counts as one token. As in a metadataset, weights may be schedules,
    an ``interleave`` keeps shares exact, and each source is shuffled again in every epoch. Each
    ``iter()`` continues where the last one ended, with the next ``samples`` indices; an iterator
    that is left early is not read again.

    Args:
        sources: the name of the source of each sample, in the order of the dataset, [samples].
        weights: weight of each source as in a metadataset; by default its number of samples.
        rows_per_step: samples of a global batch; breakpoints count these steps.
        rule: ``interleave`` or ``blend``.
        max_epochs: limits of sources, by name.
        schedule_axis: unit of the breakpoints, ``steps`` or ``samples``.
        seed: selects the draws and the order of each source.
        samples: indices of one pass, over all ranks; by default those of the dataset in whole
            steps, or all of a plan in which every source has a limit.
        rank, ranks: this rank gets every ``ranks``-th index. For a loop that distributes batches
            itself, such as accelerate's, there is one rank.

    Attributes:
        changes: effect of a restored state on each source.

    Raises:
        ConfigError: an argument is out of range, or a source is unknown.

    State: a cursor, the same on every rank. It may be saved after any sample if all ranks have
    drawn equally many, and continues with any number of ranks and other weights. If a source has
    another number of samples, it is refused.

    Example:
        >>> sampler = PlanSampler(["a", "a", "b", "a"], {"a": 1, "b": 1}, rows_per_step=2)
        >>> list(sampler)
        [1, 2, 3, 2]
    """

    def __init__(
        self,
        sources: Sequence[str],
        weights: Mapping[str, Any] | None = None,
        *,
        rows_per_step: int,
        rule: str = INTERLEAVE,
        max_epochs: Mapping[str, int] | None = None,
        schedule_axis: str = "steps",
        seed: int = 0,
        samples: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        check_integer("PlanSampler: rows_per_step", rows_per_step, 1)
        check_integer("PlanSampler: seed", seed, -(2**63))
        check_integer("PlanSampler: ranks", ranks, 1)
        check_integer("PlanSampler: rank", rank, 0)
        check_choice("PlanSampler: rule", rule, (INTERLEAVE, BLEND))
        if rank >= ranks:
            raise ConfigError(f"PlanSampler: rank {rank} found; it must be below {ranks}.")
        self._places = _places_by_name(list(sources))
        run = _plan(
            {name: len(places) for name, places in self._places.items()},
            weights,
            max_epochs or {},
            rule,
            Clock(ScheduleAxis(schedule_axis), Topology(rows_per_step)),
            seed,
        )
        self._rows, self._next = NumberedRows(run), 0
        self._limit = self._rows.count()
        whole = max(1, len(sources) // rows_per_step) * rows_per_step
        self._samples = (self._limit or whole) if samples is None else samples
        check_integer("PlanSampler: samples", self._samples, 1)
        self._rank, self._ranks = rank, ranks
        self.changes: list[SourceChange] = []
        self._check_even("samples", self._samples)
        self._check_even_end()

    def _check_even(self, what: str, count: int) -> None:
        if count % self._ranks:
            raise ConfigError(
                f"PlanSampler: {what}: {count:,} found, a multiple of {self._ranks} ranks is "
                f"needed, so that all of them draw equally many."
            )

    def _check_even_end(self) -> None:
        if self._limit is not None:
            self._check_even("samples left until max_epochs", self._limit - self._next)

    def __len__(self) -> int:
        """Return the indices of this rank in a pass; the last one may end with ``max_epochs``."""
        begin, stop = self._pass()
        return (stop - begin) // self._ranks

    def _pass(self) -> tuple[int, int]:
        """Return the first sample of the pass that ``iter()`` continues or begins, and its end."""
        begin = self._next // self._samples * self._samples
        stop = begin + self._samples
        return begin, stop if self._limit is None else max(begin, min(stop, self._limit))

    def __iter__(self) -> Iterator[int]:
        _, stop = self._pass()
        while self._next < stop:
            number = self._next + self._rank
            self._next += self._ranks
            yield self.index(number)

    def set_epoch(self, epoch: int) -> None:
        """Refuse all epochs but the first: accelerate and loops like it call this before each.

        They resume by counting batches from the beginning of an epoch, and do not always say of
        which one, so the samples of the first would come again.

        Raises:
            ConfigError: the epoch is not 0.
        """
        if epoch:
            raise ConfigError(
                f"PlanSampler: epoch {epoch} of a loop found; let its first epoch be the whole run "
                f"(samples=rows_per_step x steps). In a loop of your own, leave out set_epoch: "
                f"each iter() continues the plan."
            )

    def index(self, number: int) -> int:
        """Return the index of a sample, given by its number in the plan."""
        source, (documents, *_), _, _ = self._rows[number]
        return int(self._places[self._rows.run.keys[source]][documents[0]])

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last index of all ranks, as JSON values."""
        return seal(self._rows.cursor(self._next))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of any rank.

        Raises:
            StateFormatError: the state is damaged, or not a data state.
            StateMismatchError: it belongs to another configuration.
        """
        content = check_seal(state)
        self._next, self.changes = self._rows.restore(content)
        self._limit = self._rows.count()
        self._check_even_end()
        if self._rank == 0:
            log_resume(self.changes, content, self._rows.run)


def _places_by_name(sources: list[str]) -> dict[str, np.ndarray]:
    """Return the indices of the samples of each source, int64 [n]."""
    for index, name in enumerate(sources):
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"PlanSampler: sources: {name!r:.80} found for sample {index}, a name is needed."
            )
    if not sources:
        raise ConfigError("PlanSampler: sources: none found; name the source of each sample.")
    names, source_of = np.unique(sources, return_inverse=True)
    return {name: np.flatnonzero(source_of == n) for n, name in enumerate(names.tolist())}


def _plan(
    sizes: Mapping[str, int],
    weights: Mapping[str, Any] | None,
    max_epochs: Mapping[str, int],
    rule: str,
    clock: Clock,
    seed: int,
) -> Run:
    """Plan samples of which only the numbers are known."""
    weights = sizes if weights is None else weights
    for argument, given in (("weights", weights), ("max_epochs", max_epochs)):
        for name in given:
            if name not in sizes:
                has = choices(name, sizes)
                raise ConfigError(f"PlanSampler: {argument}: no source {name!r}; there are {has}")
    if missing := sorted(sizes.keys() - weights.keys()):
        raise ConfigError(
            f"PlanSampler: weights: none of {missing[0]}; give every source one, or 0."
        )
    for name, epochs in max_epochs.items():
        check_integer(f"PlanSampler: max_epochs of {name}", epochs, 1)
    found = {name: weight_from_config(weights[name], f"weight of {name}") for name in sizes}
    tree = blend_of(found, rule)
    check_mixture(tree, clock.axis, {name: max_epochs.get(name) for name in sizes}, {}, {})
    spec = Spec(kinds={SAMPLES: KindSpec(packer=None)}, seed=seed, own={"dataset": "own"})
    sources = [
        PlannedSource(
            name,
            _rows(name, size, seed, max_epochs.get(name)),
            cast(Reader, None),  # the user reads
            documents=size,
            max_epochs=max_epochs.get(name),
        )
        for name, size in sizes.items()
    ]
    return Run(sources, tree=tree, clock=clock, options=RunOptions(spec=spec))


def _rows(name: str, size: int, seed: int, epochs: int | None) -> PackedRows:
    return PackedRows(
        OneEach(size, {"documents": size}),
        source=name,
        packer=OnePerRow(),
        order=EpochOrder(size, f"{seed}/{name}", epochs=epochs),
        buffer_docs=_BUFFER,
        kind=SAMPLES,
        load_packer=None,
    )
