# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The base class of all blends: their sources, and the shares that a tree of weights gives them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import Tree
from energon_ext.plan.clock import Clock, RowLengths
from energon_ext.plan.epochs import EpochCount
from energon_ext.plan.source import Source
from energon_ext.plan.topology import Topology
from energon_ext.state.match import ENCODER, SourceNames
from energon_ext.state.schema import digest_of
from energon_ext.weights import LiveWeights, WeightSpec
from energon_ext.weights.schedule import Weights

#: The way in which rows are planned; another number means other rows for the same settings.
_PLANNING = 2


class Blend:
    """Several sources, and the shares that a tree of weights gives them.

    Args:
        sources: one or more, with distinct keys, in any order; stored sorted by key.
        tree: mixing rules and weights, with the keys as leaves.
        clock: converts steps and rows to positions on the schedule axis.

    Attributes:
        is_planned: whether the rows are known before they are read.
        fingerprint: JSON values saved with a state, which is refused if they differ.
    """

    is_planned: bool
    sources: Mapping[str, Source]
    fingerprint: dict[str, Any]

    def __init__(self, sources: Sequence[Source], tree: Tree, clock: Clock):
        ordered = sorted(sources, key=lambda source: source.key)
        self.sources = {source.key: source for source in ordered}
        if not ordered or len(self.sources) != len(ordered):
            keys = [source.key for source in ordered]
            raise ConfigError(f"A blend needs sources with distinct keys; found {keys}.")
        self.keys = tuple(self.sources)
        self.tree, self.clock = tree, clock

    @property
    def topology(self) -> Topology:
        return self.clock.topology

    @functools.cached_property
    def live_weights(self) -> list[LiveWeights]:
        """The files through which a controller sets weights."""
        return [node.live for node in self.tree.nodes() if node.live is not None]

    @property
    def epoch_limits(self) -> dict[str, int]:
        """``max_epochs`` by source if all have one, so that the run ends; else empty."""
        limits = {key: source.max_epochs for key, source in self.sources.items()}
        return {k: n for k, n in limits.items() if n is not None and None not in limits.values()}

    @property
    def documents(self) -> dict[str, float]:
        """Documents in one epoch of each source, or of each of its parts."""
        return {
            part: documents
            for source in self.sources.values()
            for part, (documents, _) in source.parts.items()
        }

    @property
    def epoch_tokens(self) -> dict[str, int]:
        """Tokens in one epoch of each source whose documents are read whole."""
        return {}

    @property
    def epoch_counts(self) -> dict[str, EpochCount]:
        """Epochs read of each source whose epochs may differ in size, at the current step."""
        return {}

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Display names of the sources that have one, and of their parts."""
        return {
            part: source.shown_as + part.removeprefix(key)
            for key, source in self.sources.items()
            if source.shown_as
            for part in (key, *source.parts)
        }

    @property
    def next_position(self) -> int | None:
        """The position of the next step that is read; None if it is not planned."""
        return None

    @functools.cached_property
    def loss_weights(self) -> dict[str, WeightSpec]:
        """The factors of the sources in the loss, without sources that have none."""
        found = {key: source.loss_weight for key, source in self.sources.items()}
        return {key: weight for key, weight in found.items() if weight is not None}

    def loss_weights_at(self, position: int) -> dict[str, float]:
        """Return the factors of :attr:`loss_weights` at a position of the axis."""
        if not self.loss_weights:
            return {}
        return dict(zip(self.loss_weights, self._loss_weights.at(position).tolist()))

    @functools.cached_property
    def _loss_weights(self) -> Weights:
        return Weights([*self.loss_weights.values()])

    @functools.cached_property
    def source_names(self) -> dict[str, SourceNames]:
        """The names that find the state of each source, by key."""
        return {key: source.state_names for key, source in self.sources.items()}

    @functools.cached_property
    def data_digest(self) -> str:
        """Digest of everything that decides which rows a run reads.

        It contains no path: runs that read the same rows in other folders have the same one. Ranks
        and workers, the steps that are skipped and the class of the TaskEncoder do not matter.
        """
        sources = {key: source.identity() for key, source in self.sources.items()}
        tree = self.tree.map(lambda key: sources[key][0])
        assert tree is not None, "a blend has sources"
        topology, settings = self.topology, dict(self.fingerprint)
        settings.pop(ENCODER, None)
        streams = [] if self.is_planned else [topology.ranks, topology.workers, topology.batch_rows]
        clock = self.clock
        schedule = [] if clock.rows is None else [clock.rows.to_json()]
        rows = [topology.rows_per_step, clock.row_tokens, clock.axis.counted, *streams, *schedule]
        return digest_of([_PLANNING, settings, rows, tree.to_json(), list(sources.values())])[:16]

    @property
    def interleaves(self) -> dict[str, int]:
        """Number of interleaves above each source, without sources that a blend draws."""
        return self.tree.interleaves()

    @property
    def row_lengths(self) -> RowLengths:
        """Lengths of earlier rows, if they differ from the current one."""
        return ()

    def position(self, step: int, row: int | None = None) -> int:
        """Return the position of an optimizer step, whose first row is ``row`` if known."""
        return self.clock.at_step(step, row, self.row_lengths)

    def shares_at_step(self, step: int, row: int | None = None) -> dict[str, float]:
        """Return the share of each source, or of each of its parts, in an optimizer step.

        Args:
            step: optimizer step from 0 on, whatever unit the breakpoints count.
            row: its first row, if steps had other sizes before.

        See :meth:`shares_at`.
        """
        return self.shares_at(self.position(step, row))

    def shares_at(self, position: int) -> dict[str, float]:
        """Return the share of each source, or of each of its parts, at a position of the axis.

        Sources that have ended still count. If live weights do not cover the position yet, their
        last line is used.
        """
        parts, sources, of_source = self._parts
        shares = np.array([*self.shares_of_sources(position).values()])
        return dict(zip(parts, (shares[sources] * of_source).tolist()))

    def shares_of_sources(self, position: int) -> dict[str, float]:
        """Return the share of each source at a position of the axis; see :meth:`shares_at`."""
        for live in self.live_weights:
            live.read()
        return dict(zip(self.keys, self._mixture_of_shares.shares(position).tolist()))

    @functools.cached_property
    def _mixture_of_shares(self) -> Mixture:
        """Evaluates weights for :meth:`shares_at`, apart from the plan, which has its own."""
        return Mixture(self.tree, self.keys)

    @functools.cached_property
    def _parts(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The parts of all sources: key, number of the source, share in the source."""
        parts = [
            (part, number, share)
            for number, source in enumerate(self.sources.values())
            for part, (_, share) in source.parts.items()
        ]
        keys, numbers, shares = zip(*parts)
        return list(keys), np.array(numbers), np.array(shares)
