# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The fields of a splice: which documents, at which positions, how often."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Mapping, Sequence

from energon_ext.arguments import check_integer, check_kind, check_number, choices
from energon_ext.errors import ConfigError

#: Allowed values of fields that have few.
CHOICES = {
    "mode": ("splice", "slide"),
    "content_start_mode": ("anchor_start", "slide_within", "cyclic_roll", "coverage_balanced"),
    "doc_select_mode": ("longest", "shortest", "first", "random"),
    "jitter_mode": ("uniform", "low_discrepancy"),
    "balance_mode": ("by_coverage", "by_document", "by_temperature", "every_pair"),
}

#: The least value of integer fields where it is not 1.
_LEAST = {"content_length": 2, "min_copy_len": 2, "offset_jitter": 0, "doc_index": 0}
_LEAST |= dict.fromkeys(("pad_token_id", "eos_token_id", "content_seed", "offset_seed", "seed"), 0)
_KINDS = {"bool": bool, "str": str}


@dataclass(frozen=True, kw_only=True)
class SpliceFields:
    """The fields that a splice of one document and one of many have in common.

    ConfigError names the field, what was found and what is allowed.

    Attributes:
        dataset_name: take documents from this source only, by its key or the name of its folder;
            None for every source that the encoder splices.
        min_doc_length, max_doc_length: limits on a chosen document, in tokens.
        doc_select_mode: ``longest``, ``shortest``, ``first`` or ``random`` among those.
        restrict_to_training_subset: choose only among documents that lie within the first
            ``max_train_batches * initial_batch_size`` rows of the source, if it were read in order.
        initial_batch_size, max_train_batches: see there.
        mode: ``splice`` places contents at offsets; ``slide`` cuts windows of a whole frame out of
            documents that are at least as long.
        content_start_mode: starts t in the document and offsets s in the frame.
            ``anchor_start``: t = 0. ``slide_within``: every t. ``cyclic_roll``: every t, and the
            document goes on at its beginning. ``coverage_balanced``: every t with a whole content
            after it, at the end of the frame.
        content_length: K, tokens of a content; None for as many as fit.
        cut_at_frame_end: offsets at which a content has room for ``min_copy_len`` tokens count as
            well, and the end of the frame cuts it: ``min(K, L - t, S - s)`` tokens. Without it
            contents lie wholly in the frame.
        content_stride, offset_stride: steps of t and of s.
        min_copy_len: contents shorter than this are left out, at least 2.
        adaptive_k: in ``coverage_balanced``, a document shorter than K is one content; without it
            such a document has none. The other modes always shorten.
        alpha: in ``coverage_balanced``, how much more often starts near an edge come; 0 for all
            alike. The first token of a long document is seen ``K^(alpha - 1)`` times as often as
            one in its middle: at 1 as often, and those around token K then far more often.
        offset_jitter: in ``coverage_balanced``, the number of places to the left of the last one
            that count as well. Contents have at most ``S - offset_jitter`` tokens, to leave room.
        jitter_mode: ``uniform`` (drawn) or ``low_discrepancy``: even over the examples of an
            epoch, and the next place in the next epoch.
        pad_token_id: fills a frame; None for the tokenizer's.
        eos_token_id: put before the content; with ``attend_prefix`` only, or nothing sees it.
        attend_prefix: the content attends to the filler before it.
        pack_contents: several contents in a frame where they fit, each with the position ids of
            its offset.
    """

    dataset_name: str | None = None
    min_doc_length: int | None = None
    max_doc_length: int | None = None
    doc_select_mode: str = "longest"
    restrict_to_training_subset: bool = False
    initial_batch_size: int | None = None
    max_train_batches: int | None = None
    mode: str = "splice"
    content_start_mode: str = "slide_within"
    content_length: int | None = None
    cut_at_frame_end: bool = False
    content_stride: int = 1
    offset_stride: int = 1
    min_copy_len: int = 2
    adaptive_k: bool = True
    alpha: float = 0.0
    offset_jitter: int = 0
    jitter_mode: str = "uniform"
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    attend_prefix: bool = False
    pack_contents: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            kind = str(field.type).removesuffix(" | None")
            if name in CHOICES and value not in CHOICES[name]:
                allowed = ", ".join(CHOICES[name])
                raise ConfigError(f"{name}: {value!r} found, one of {allowed} is allowed.")
            if kind == "int":
                check_integer(name, value, _LEAST.get(name, 1))
            if kind in _KINDS:
                check_kind(name, value, _KINDS[kind])
        check_number("alpha", self.alpha)
        self._check_together()

    @property
    def placement(self) -> str:
        """The ``content_start_mode``, or ``slide``, which has none."""
        return self.content_start_mode if self.mode == "splice" else self.mode

    def _check_together(self) -> None:
        """Values that are fine one by one and not together."""
        least, most = self.min_doc_length or 0, self.max_doc_length
        content, least_copied = self.content_length, self.min_copy_len
        if most and least > most:
            found = f"min_doc_length: {least} found, above max_doc_length: {most}"
            raise ConfigError(f"{found}; no document can be both.")
        if content is not None and content < least_copied:
            found = f"content_length: {content} found, below min_copy_len: {least_copied}"
            raise ConfigError(f"{found}; every content would be left out.")
        has_subset = self.initial_batch_size and self.max_train_batches
        if self.restrict_to_training_subset and not has_subset:
            found = "restrict_to_training_subset: true found, but the subset is unknown"
            raise ConfigError(f"{found}; give initial_batch_size and max_train_batches as well.")
        if self.mode == "slide":
            filled = ("content_length", "cut_at_frame_end", "attend_prefix", "pack_contents")
            self._refuse("mode: slide, whose windows fill whole frames", *filled)
        if self.placement == "coverage_balanced":
            where = "content_start_mode: coverage_balanced, whose contents end with the frame"
            self._refuse(where, "cut_at_frame_end")
        else:
            where = f"{self.placement}; it belongs to content_start_mode: coverage_balanced"
            self._refuse(where, "alpha", "offset_jitter")
        if self.pack_contents:
            where = "pack_contents: true; a packed content has no prefix of its own"
            self._refuse(where, "attend_prefix")
        if not self.attend_prefix:
            self._refuse("attend_prefix: false, where no content sees it", "eos_token_id")

    def _refuse(self, where: str, *names: str) -> None:
        """Refuse fields that are set and mean nothing beside another."""
        for name in names:
            value = getattr(self, name)
            if value != getattr(type(self), name):  # the default
                raise ConfigError(f"{name}: {value!r} found with {where}; leave it out.")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, for the fingerprint of a state."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SpliceConfig(SpliceFields):
    """One document at many positions.

    Attributes:
        doc_index: number of the document in the source; None, or one outside the length limits,
            leaves it to ``doc_select_mode``.
        doc_key: only documents whose sample key matches this pattern (``*``, ``?``, ``[...]``).
        shuffle_content, shuffle_offsets: how many epochs an order of the starts and of the offsets
            lasts; True for 1, False to enumerate. Both: all pairs in one random order. One: the
            order of that axis is random, starts outside, offsets inside.
        content_seed, offset_seed: of those orders.

    Raises:
        ConfigError: names the field, what was found and what is allowed.

    Example:
        >>> SpliceConfig(content_length=1)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: content_length: 1 found, an integer >= 2 is needed.
    """

    doc_index: int | None = None
    doc_key: str | None = None
    shuffle_content: bool | int = True
    shuffle_offsets: bool | int = True
    content_seed: int = 0
    offset_seed: int = 0

    def _check_together(self) -> None:
        super()._check_together()
        for field in ("shuffle_content", "shuffle_offsets"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                check_integer(field, value, 0)


@dataclass(frozen=True, kw_only=True)
class MultiSpliceConfig(SpliceFields):
    """Many documents, each at many positions.

    Attributes:
        num_docs: how many to choose; fewer where fewer meet the limits.
        balance_mode: examples of a document in an epoch. ``by_coverage``: in proportion to its
            length. ``by_document``: equally many. ``by_temperature``: in proportion to its length
            to the power of ``balance_tau``. ``every_pair``: each of its pairs (t, s) once.
        balance_tau: 0 .. 1.
        doc_weights: factors on that, one per chosen document in the order of choice.
        epoch_length: examples in an epoch. None for one for every ``content_stride`` tokens of the
            chosen documents that have a pair; in ``by_document`` for as many from each of them as
            the one with most pairs has.
        shuffle_per_epoch: a new random order in every epoch; False to enumerate.
        seed: of the orders, the jitter and the random choice of documents.

    Raises:
        ConfigError: names the field, what was found and what is allowed.

    Example:
        >>> MultiSpliceConfig(num_docs=3, balance_tau=0.7).content_start_mode
        'coverage_balanced'
    """

    content_start_mode: str = "coverage_balanced"
    num_docs: int = 10
    balance_mode: str = "by_temperature"
    balance_tau: float = 1.0
    doc_weights: Sequence[float] | None = None
    epoch_length: int | None = None
    shuffle_per_epoch: bool = True
    seed: int = 0

    def _check_together(self) -> None:
        super()._check_together()
        check_number("balance_tau", self.balance_tau, most=1.0)
        if self.balance_mode == "every_pair":
            where = "balance_mode: every_pair, whose epoch has each pair once"
            self._refuse(where, "alpha", "doc_weights", "epoch_length")
        weights = self.doc_weights
        if weights is None:
            return
        if not isinstance(weights, Sequence) or isinstance(weights, str):
            raise ConfigError(f"doc_weights: {weights!r} found, a list of numbers is needed.")
        object.__setattr__(self, "doc_weights", list(weights))
        for index, weight in enumerate(weights):
            check_number(f"doc_weights[{index}]", weight)
        if not any(weights):
            raise ConfigError(f"doc_weights: {[*weights]} found, at least one must be above 0.")


def splice_from_config(value: Any, where: str) -> SpliceFields:
    """A splice as a mapping of its fields: of many documents if ``num_docs`` is one of them.

    Example:
        >>> splice_from_config({"doc_index": 3, "content_length": 1}, "blend[0].splice")
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: blend[0].splice: content_length: 1 found, an integer >= 2 \
is needed.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {value!r:.80} found, a mapping as {{num_docs: 3}} is needed.")
    is_many = "num_docs" in value
    kinds = (MultiSpliceConfig, SpliceConfig) if is_many else (SpliceConfig, MultiSpliceConfig)
    allowed, of_other = ([field.name for field in fields(kind)] for kind in kinds)
    for name in value:
        if name in allowed:
            continue
        hint = f"it has {choices(name, allowed, most=40)}"
        if name in of_other:
            hint = f"one {'without' if is_many else 'with'} num_docs has it."
        documents = "many documents" if is_many else "one document"
        raise ConfigError(f"{where}: no field {name!r} in a splice of {documents}; {hint}")
    try:
        return kinds[0](**value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
