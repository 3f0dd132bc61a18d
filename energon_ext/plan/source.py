# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One source of a blend, and what a blend of several is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import Tree
from energon_ext.plan.clock import Clock, RowLengths
from energon_ext.plan.deal import Topology
from energon_ext.state.match import SourceNames
from energon_ext.weights import ConstantWeight, LiveWeights, WeightSpec, weight_from_config


@dataclass
class Source:
    """One source of a blend.

    Attributes:
        key: its identity, see :func:`energon_ext.config.source_key.source_key`.
        rows: its rows: a :class:`~energon_ext.plan.row_source.RowSource` where they are planned,
            an Energon dataset where its samples are streamed.
        weight: a number or a schedule, where the blend is given no tree.
        documents: number of documents in one epoch.
        max_epochs: epochs after which ``rows`` end, None where they do not.
        names: by which its state is found where the key has changed.
        shown_as: its name for people, where that is not the key.
        fingerprint: JSON values by which a change of the data is noticed; planned rows bring their
            own.
    """

    key: str
    rows: Any
    weight: WeightSpec = field(default_factory=lambda: ConstantWeight(1.0))
    documents: int = 0
    max_epochs: int | None = None
    names: SourceNames = SourceNames()
    shown_as: str | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.weight, WeightSpec):
            self.weight = weight_from_config(self.weight, f"Source {self.key}: weight")

    @property
    def part_documents(self) -> dict[str, int]:
        """Documents in one epoch, by their names in batches."""
        return getattr(self.rows, "part_documents", {self.key: self.documents})

    @property
    def part_shares(self) -> dict[str, float]:
        """Shares of the tokens of this source, by the names of its parts in batches."""
        return getattr(self.rows, "part_shares", {self.key: 1.0})


class Blend:
    """Several sources, and the shares that a tree of weights gives them.

    Args:
        sources: at least one, with distinct keys, in any order; kept by key, sorted.
        tree: over their keys.
        clock: positions of the run on its schedule axis.
    """

    is_planned: bool

    def __init__(self, sources: Sequence[Source], tree: Tree, clock: Clock):
        ordered = sorted(sources, key=lambda source: source.key)
        self.sources = {source.key: source for source in ordered}
        if not ordered or len(self.sources) != len(ordered):
            keys = [source.key for source in ordered]
            raise ConfigError(f"A blend needs sources of distinct keys, got {keys}.")
        self.keys = tuple(self.sources)
        self.tree, self.clock = tree, clock

    @property
    def topology(self) -> Topology:
        return self.clock.topology

    @property
    def live_weights(self) -> list[LiveWeights]:
        """The files from which a controller decides weights."""
        return [node.live for node in self.tree.nodes() if node.live is not None]

    @property
    def epoch_limits(self) -> dict[str, int]:
        """``max_epochs`` of all sources, where they end the whole run; else empty."""
        limits = {key: source.max_epochs for key, source in self.sources.items()}
        return {k: n for k, n in limits.items() if n is not None and None not in limits.values()}

    @property
    def documents(self) -> dict[str, int]:
        """Documents in one epoch of each source, or part of it."""
        return {k: n for s in self.sources.values() for k, n in s.part_documents.items()}

    @property
    def epoch_tokens(self) -> dict[str, int]:
        """Tokens in one epoch of each source whose documents are read whole."""
        found = {
            key: getattr(each.rows, "epoch_tokens", None) for key, each in self.sources.items()
        }
        return {key: tokens for key, tokens in found.items() if tokens is not None}

    @property
    def names(self) -> dict[str, str]:
        """Display names of the sources that have one, and of their spliced documents."""
        return {
            part: each.shown_as + part.removeprefix(key)
            for key, each in self.sources.items()
            if each.shown_as
            for part in (key, *each.part_documents)
        }

    @property
    def source_names(self) -> dict[str, SourceNames]:
        return {key: source.names for key, source in self.sources.items()}

    @property
    def interleaves(self) -> dict[str, int]:
        """How many interleaves keep the share of a source in the whole run, where no blend does."""
        return self.tree.interleaves()

    @property
    def row_lengths(self) -> RowLengths:
        """Of earlier rows, where they had other lengths than now."""
        return ()

    def position(self, step: int, row: int | None = None) -> int:
        """Position of an optimizer step on the schedule axis; ``row`` is its first, if known."""
        return self.clock.at_step(step, row, self.row_lengths)

    def planned_shares(self, position: int) -> dict[str, float]:
        """The share of each source, or part of it, at a position, as if none had ended.

        Where no line of live weights covers it, by the last line.
        """
        for live in self.live_weights:
            live.read()
        shares = Mixture(self.tree, self.keys, seed="").shares(position).tolist()
        return {
            part: share * of_source
            for source, share in zip(self.sources.values(), shares)
            for part, of_source in source.part_shares.items()
        }
