# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The questions that a run asks an encoder.

A spec and the lengths of sources plan the rows, a reader reads them, and the encoder makes batches
of them. All sources are opened together, so that one pool of processes makes what is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.energon import TaskEncoder

from energon_ext.config.mix import Entry
from energon_ext.errors import ConfigError
from energon_ext.packing import Packer
from energon_ext.plan.cost import Cost
from energon_ext.plan.layout import ContextOptions
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import Spec
from energon_ext.samples.context import EncoderContext, encoder_context
from energon_ext.tokens.documents import Lengths


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often sources are read.

    Attributes:
        repeat: whether the dataset is read again and again.
        as_whole: whether the blend then repeats as a whole, and not each source by itself.
        validating: whether each document is read once, in order.
        batches: batches per rank in one pass; 0 for all.
    """

    repeat: bool = True
    as_whole: bool = False
    validating: bool = False
    batches: int = 0

    @property
    def repeats_sources(self) -> bool:
        """True if each source is read again by itself."""
        return self.repeat and not self.as_whole

    @property
    def repeats_blend(self) -> bool:
        """True if the blend is read again as a whole."""
        return self.repeat and self.as_whole


@dataclass(frozen=True, kw_only=True, eq=False)
class Task(ABC):
    """Plans, opens, reads and batches the rows of a run.

    Attributes:
        packers, cost: the live objects behind the JSON of the spec, as far as there are some, since
            they may be a user's code; packers by kind of source.
        contexts: those of the spec; None if rows are read as they are.
    """

    packers: Mapping[str, Packer] = field(default_factory=dict)
    cost: Cost | None = None
    contexts: ContextOptions | None = None

    @abstractmethod
    def spec(self, entries: Sequence[Entry], seed: int) -> Spec:
        """Return the spec of a run over some sources."""

    @abstractmethod
    def open_sources(self, entries: Sequence[Entry]) -> Mapping[str, Lengths]:
        """Open the documents or the lengths of each source, by key; make those that are missing."""

    @abstractmethod
    def reader(self, entry: Entry, opened: Lengths, spec: Spec) -> Reader:
        """Return what reads the rows of a source that is not spliced.

        Args:
            opened: what :meth:`open_sources` returned for it.
        """

    @abstractmethod
    def assemble(self, rows: list[Any], context: EncoderContext) -> Any:
        """Make a batch of the rows that readers returned."""

    @abstractmethod
    def padding(self, read: Callable[[], Any]) -> Any:
        """Return a row that counts as nothing, to complete the last step if the spec ``pads``.

        Args:
            read: reads a row of the same source.
        """

    def is_streamed(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], passes: Passes
    ) -> bool:
        """Return True if Energon must stream the samples, and log the reason.

        Args:
            stages: Energon's further options.
        """
        return False


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderTask(Task):
    """A task whose batches an encoder makes with its own methods.

    Attributes:
        fingerprint: returns the ``own`` of the spec.
    """

    encoder: TaskEncoder
    fingerprint: Callable[[], Mapping[str, Any]]

    def assemble(self, rows: list[Any], context: EncoderContext) -> Any:
        with encoder_context(**vars(context)):
            batch = self.encoder.encode_batch(self.encoder.batch(rows))
        if batch is None:  # would look like the end of the data
            raise ConfigError(
                f"{type(self.encoder).__qualname__}.encode_batch: returned None; return every "
                f"batch, since all ranks read equally many."
            )
        return batch
