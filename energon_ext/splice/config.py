# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The fields of a splice: which documents, at which positions, how often."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Mapping, Sequence

from energon_ext.arguments import check_integer, check_kind, check_number, choices
from energon_ext.errors import ConfigError

#: Allowed values of enumerated fields.
CHOICES = {
    "mode": ("splice", "slide"),
    "content_start_mode": ("anchor_start", "slide_within", "cyclic_roll", "coverage_balanced"),
    "doc_select_mode": ("longest", "shortest", "first", "random"),
    "jitter_mode": ("uniform", "low_discrepancy"),
    "balance_mode": ("by_coverage", "by_document", "by_temperature", "every_pair"),
}

#: Minimum of each integer field; 1 if not listed.
_LEAST = {"content_length": 2, "min_copy_len": 2, "offset_jitter": 0, "doc_index": 0}
_LEAST |= dict.fromkeys(("pad_token_id", "eos_token_id", "content_seed", "offset_seed", "seed"), 0)
_KINDS = {"bool": bool, "str": str}


@dataclass(frozen=True, kw_only=True)
class SpliceFields:
    """The fields that a splice of one document and one of many have in common.

    Attributes:
        dataset_name: key or folder name of the only source to take documents from; None for every
            source that the encoder splices.
        min_doc_length, max_doc_length: limits on the length of a chosen document, in tokens.
        doc_select_mode: choice among these: ``longest``, ``shortest``, ``first`` or ``random``.
        restrict_to_training_subset: choose only among the documents in the first
            ``max_train_batches * initial_batch_size`` rows of the source, as if read in order.
        initial_batch_size, max_train_batches: size of that subset.
        mode: ``splice`` places contents at offsets; ``slide`` cuts windows of a full frame out of
            documents that are at least as long.
        content_start_mode: starts t in the document and offsets s in the frame.
            ``anchor_start``: t = 0. ``slide_within``: every t. ``cyclic_roll``: every t, and the
            document wraps around. ``coverage_balanced``: every t at which a full content fits into
            the document, at the end of the frame.
        content_length: K, tokens per content; None for as many as fit.
        cut_at_frame_end: also use offsets at which at least ``min_copy_len`` tokens fit, and cut
            the content at the end of the frame to ``min(K, L - t, S - s)`` tokens. If false,
            contents always lie fully within the frame.
        content_stride, offset_stride: strides of t and of s.
        min_copy_len: minimum tokens per content, at least 2; shorter contents are dropped.
        adaptive_k: in ``coverage_balanced``, make a document shorter than K a single content; if
            false, drop it. The other modes always shorten the content.
        alpha: in ``coverage_balanced``, preference for starts near an edge; 0 for none. The first
            token of a long document is seen ``K^(alpha - 1)`` times as often as one in the middle:
            equally often at 1, where tokens around K are seen far more often.
        offset_jitter: in ``coverage_balanced``, number of offsets to the left of the last one to
            use as well. Contents have at most ``S - offset_jitter`` tokens to leave room for it.
        jitter_mode: ``uniform`` (random) or ``low_discrepancy``: evenly spread over the examples
            of an epoch, and moved by one offset in each epoch.
        pad_token_id: filler of a frame; None for the tokenizer's.
        eos_token_id: token right before the content; requires ``attend_prefix``.
        attend_prefix: let the content attend to the filler before it.
        pack_contents: pack several contents into a frame if they fit, each with the position ids
            of its offset.
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
                raise ConfigError(f"{name}: {value!r} found, one of {allowed} is needed.")
            if kind == "int":
                check_integer(name, value, _LEAST.get(name, 1))
            if kind in _KINDS:
                check_kind(name, value, _KINDS[kind])
        check_number("alpha", self.alpha)
        self._check_together()

    @property
    def placement(self) -> str:
        """The ``content_start_mode``, or ``slide`` in that mode."""
        return self.content_start_mode if self.mode == "splice" else self.mode

    def _check_together(self) -> None:
        """Raise ConfigError for values that contradict each other."""
        least, most = self.min_doc_length or 0, self.max_doc_length
        content, least_copied = self.content_length, self.min_copy_len
        if most and least > most:
            found = f"min_doc_length: {least} found, above max_doc_length: {most}"
            raise ConfigError(f"{found}; no document can meet both.")
        if content is not None and content < least_copied:
            found = f"content_length: {content} found, below min_copy_len: {least_copied}"
            raise ConfigError(f"{found}; every content would be dropped.")
        has_subset = self.initial_batch_size and self.max_train_batches
        if self.restrict_to_training_subset and not has_subset:
            found = "restrict_to_training_subset: true found, but the subset is unknown"
            raise ConfigError(f"{found}; also set initial_batch_size and max_train_batches.")
        if self.mode == "slide":
            unused = ("content_length", "cut_at_frame_end", "attend_prefix", "pack_contents")
            self._reject("mode: slide, whose windows fill the frame", *unused)
        if self.placement == "coverage_balanced":
            where = "content_start_mode: coverage_balanced, whose contents end with the frame"
            self._reject(where, "cut_at_frame_end")
        else:
            where = f"{self.placement}; it belongs to content_start_mode: coverage_balanced"
            self._reject(where, "alpha", "offset_jitter")
        if self.pack_contents:
            self._reject("pack_contents: true; packed contents have no prefix", "attend_prefix")
        if not self.attend_prefix:
            self._reject("attend_prefix: false, so no content sees it", "eos_token_id")

    def _reject(self, where: str, *names: str) -> None:
        """Raise ConfigError for fields that are set but have no effect with another one."""
        for name in names:
            value = getattr(self, name)
            if value != getattr(type(self), name):  # the default
                raise ConfigError(f"{name}: {value!r} found with {where}; remove it.")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for the fingerprint of a state."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SpliceConfig(SpliceFields):
    """One document at many positions.

    Attributes:
        doc_index: number of the document in the source. If it is None or the document is outside
            the length limits, ``doc_select_mode`` chooses.
        doc_key: pattern (``*``, ``?``, ``[...]``) that the sample keys of documents must match.
        shuffle_content, shuffle_offsets: number of epochs until the starts, or the offsets, are
            shuffled again; True for 1, False to enumerate. With both, all pairs have one random
            order. With one, only that axis does; starts are the outer loop.
        content_seed, offset_seed: seeds of these orders.

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
        num_docs: number of documents to choose; fewer are chosen if fewer meet the limits.
        balance_mode: examples per document in an epoch. ``by_coverage``: proportional to its
            length. ``by_document``: the same for all. ``by_temperature``: proportional to its
            length to the power of ``balance_tau``. ``every_pair``: each pair (t, s) once.
        balance_tau: from 0 to 1.
        doc_weights: factors on these numbers, one per chosen document in the order of choice.
        epoch_length: examples per epoch. None for one per ``content_stride`` tokens of the chosen
            documents that have a pair; in ``by_document``, for as many per document as the one
            with the most pairs has.
        shuffle_per_epoch: use a new random order in every epoch; False to enumerate.
        seed: seed of the orders, the jitter and the random choice of documents.

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
            where = "balance_mode: every_pair, which shows each pair once per epoch"
            self._reject(where, "alpha", "doc_weights", "epoch_length")
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
    """Read a splice from a mapping of its fields; with ``num_docs``, a splice of many documents.

    Example:
        >>> splice_from_config({"doc_index": 3, "content_length": 1}, "blend[0].splice")
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: blend[0].splice: content_length: 1 found, an integer >= 2 \
is needed.
    """
    if not isinstance(value, Mapping):
        needed = "a mapping such as {num_docs: 3} is needed"
        raise ConfigError(f"{where}: {value!r:.80} found, {needed}.")
    is_many = "num_docs" in value
    kinds = (MultiSpliceConfig, SpliceConfig) if is_many else (SpliceConfig, MultiSpliceConfig)
    allowed, others = ([field.name for field in fields(kind)] for kind in kinds)
    for name in value:
        if name in allowed:
            continue
        hint = f"it has {choices(name, allowed, most=40)}"
        if name in others:
            hint = f"one {'without' if is_many else 'with'} num_docs has it."
        documents = "many documents" if is_many else "one document"
        raise ConfigError(f"{where}: no field {name!r} in a splice of {documents}; {hint}")
    try:
        return kinds[0](**value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
