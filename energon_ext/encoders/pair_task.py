# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pairs of answers in packed rows, with what a reference model says of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from megatron.energon import Sample
from megatron.energon.edataclass import edataclass

from energon_ext.batch.columns import Column, columns_to_json
from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry
from energon_ext.encoders.cached_samples import cached_samples, cached_source
from energon_ext.encoders.sample_task import SampleTask
from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses.pairs import REF_LOG_PROBS
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import Spec
from energon_ext.prepare.cache import Cached
from energon_ext.prepare.columns import ColumnsWriter
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.prepare.samples import sample_units
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.methods import refuse_to_encode
from energon_ext.tokens.column_folder import ColumnFolder, digest_of_tokens
from energon_ext.tokens.documents import Lengths

#: What the reference says of the trained tokens of a pair.
_COLUMNS = {REF_LOG_PROBS: Column(np.dtype(np.float32))}

#: Pairs that are scored together: what an interrupted pass repeats, and a part of its work.
UNIT_PAIRS = 512

#: Scores pairs of a source, given its key.
Score = Callable[[str, BadSamples, Sequence[InputDocument]], list[Encoded | SampleError]]


@edataclass
class PreferencePair(Sample):
    """An encoded preference.

    Attributes:
        tokens: of the prompt with the chosen answer, and with the rejected one: int64 [n] each.
        weights: of each token: 1 in the chosen answer, -1 in the rejected one, 0 in the prompt, or
            the ``weight`` of a message in place of the 1: float32 [n] each.
        notes: what a summary should say, with counts.
    """

    tokens: Sequence[np.ndarray]
    weights: Sequence[np.ndarray]
    notes: Counter[str]

    @property
    def number(self) -> int:
        """Number of the sample in its source."""
        return int(self.__restore_key__[-1])

    def masks(self) -> list[np.ndarray]:
        """Return which tokens are trained, bool [n] each; nothing predicts the first one."""
        return [(weights != 0) & (np.arange(len(weights)) > 0) for weights in self.weights]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairTask(SampleTask):
    """Preferences, whose rows have the column ``ref_log_probs`` if there is a reference.

    Attributes:
        reference: name of the reference model; None for none.
    """

    reference: str | None

    def reader(self, entry: Entry, opened: Lengths, spec: Spec) -> Reader:
        if self.reference is None:
            return super().reader(entry, opened, spec)
        scored = self.cached_scores(entry)
        if not scored.is_complete:
            raise ConfigError(
                f"{entry.key}: has no log-probabilities of the reference {self.reference!r}; call "
                f"write_reference with the model before the run."
            )
        pack = functools.partial(self._pack, scored, scored.open())
        methods = dataclasses.replace(self.methods, pack=pack)
        return self.read_samples(methods, entry, opened, spec)

    def cached_scores(self, entry: Entry, score: Score = refuse_to_encode) -> Cached:
        """Return the cache entry for the log-probabilities of a source.

        They are found by what they depend on: the files of a source, what turns its records into
        tokens, the length of a row, and the name of the reference.
        """
        source = cached_source(self.encoder, entry)
        bad = BadSamples(source.path, self.encoder.decoder)
        return cached_samples(
            entry,
            source,
            {"documents": dict(source.version), **columns_to_json(_COLUMNS)},
            encoding={
                "version": 2,
                "reference": self.reference,
                "lengths": self.methods.identity,
                "seq_len": self.methods.packer.seq_len,  # longer pairs have none
            },
            encode=functools.partial(score, entry.key, bad),
            writer=functools.partial(ColumnsWriter, columns=_COLUMNS),
            units=sample_units(source, UNIT_PAIRS),
            open_folder=ColumnFolder.open,
            verb="scored by the reference",
            command=lambda: "write_reference",
            judges=(source.bad, bad),
        )

    def length_of(self, pair: PreferencePair) -> int:
        """Return the positions of both answers."""
        assert self.methods.length_of is not None, "pairs have lengths"
        return int(self.methods.length_of(pair))

    def _pack(self, scored: Cached, scores: ColumnFolder, pairs: list[PreferencePair]) -> Row:
        assert self.methods.pack is not None, "pairs have lengths"
        row: Row = self.methods.pack(pairs)
        found = [values for pair in pairs for values in self._read(scored, scores, pair)]
        return dataclasses.replace(row, columns={REF_LOG_PROBS: found})

    def _read(self, scored: Cached, scores: ColumnFolder, pair: PreferencePair) -> list[np.ndarray]:
        """Return the reference's log-probability of each token, 0 where nothing is trained."""
        masks = pair.masks()
        (values,) = scores.read(REF_LOG_PROBS, [pair.number], [0], [sum(map(np.sum, masks))])
        if scores.digests([pair.number]) != [digest_of_tokens(_bits_of(values))]:
            raise ConfigError(
                f"{scored.name}: the log-probabilities of sample {pair.number} under "
                f"{self.reference!r} are damaged, or of other tokens. {scored.discard_damaged()}"
            )
        columns = [np.zeros(len(each), np.float32) for each in masks]
        chosen, rejected = np.split(values, [masks[0].sum()])
        columns[0][masks[0]], columns[1][masks[1]] = chosen, rejected
        return columns


def encode_log_probs(log_probs: np.ndarray) -> Encoded:
    """Return the log-probabilities of the trained tokens of a pair as they are written."""
    return Encoded([(_bits_of(log_probs), None, {REF_LOG_PROBS: log_probs})])


def _bits_of(log_probs: np.ndarray) -> np.ndarray:
    """Return log-probabilities as integers, which stand for the tokens: their checksum is kept."""
    return np.asarray(log_probs, np.float32).view(np.int32)
