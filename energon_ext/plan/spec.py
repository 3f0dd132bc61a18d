# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The spec of a run: together with its metadataset, one JSON document decides its rows.

Every state contains it, so the steps of a run can be planned again by processes that have neither
its encoder nor its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from energon_ext.errors import StateFormatError
from energon_ext.state.schema import COUNT, check_positions, check_shape
from energon_ext.tokens.cut import OVER_LONG

#: Names of the kinds of sources.
DOCUMENTS, SAMPLES = "documents", "samples"

#: Fields of :meth:`Spec.compared` that say how rows are packed.
PACKING = ("seq_len", "packing", "alignment", "mask_boundary_loss")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Documents have at most as many tokens as a row, and a trained label in them.

    Attributes:
        over_long, untrained: see :class:`~energon_ext.tokens.cut.CutLengths`.
    """

    over_long: str
    untrained: int | None = None


@dataclass(frozen=True, kw_only=True)
class SpliceSpec:
    """How documents are spliced, where an entry or the encoder asks for it.

    Attributes:
        config: the encoder's own splice as JSON; None if only entries have one.
        subflavors: of the sources that it is for.
        named_documents: whether documents are counted under their own names; None to decide by
            their number.
        starts, offsets: of the grid of validation.
        pad_id: token that fills rows.
        vocab_size: ids of the tokenizer.
    """

    config: Mapping[str, Any] | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    named_documents: bool | None = None
    starts: int
    offsets: int
    pad_id: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """How one kind of source is planned.

    Attributes:
        packer: a packer's own JSON; None if each sample is a row.
        encoding: JSON values that name what is cached of its text or samples; None if nothing is.
        cut: how documents are cut; None if all of each is read.
        block: samples that a plan keeps close together.
        splice: how documents are spliced; None if they cannot be.
    """

    packer: Mapping[str, Any] | None
    encoding: Any = None
    cut: Cut | None = None
    block: int = 1
    splice: SpliceSpec | None = None


def _at_least_one(value: Any, where: str) -> None:
    check_shape(value, COUNT, where)
    check_shape(value - 1, COUNT, where)


def _name_of_cut(value: Any, where: str) -> None:
    if value not in OVER_LONG:
        raise StateFormatError(f"{where}: {value!r:.80} found; the state is damaged.")


def _named(value: Any, where: str) -> None:
    check_shape(value, {str: object}, where)
    check_shape(value.get("name"), str, f"{where}.name")


_CUT = {"over_long": _name_of_cut, "untrained": (None, COUNT)}
_SPLICE = {
    "config": (None, {str: object}),
    "subflavors": {str: object},
    "named_documents": (None, bool),
    "starts": COUNT,
    "offsets": COUNT,
    "pad_id": COUNT,
    "vocab_size": COUNT,
}
_KIND = {
    "packer": (None, _named),
    "encoding": object,
    "cut": (None, _CUT),
    "block": _at_least_one,
    "splice": (None, _SPLICE),
}
_LOSS = {"alignment": _at_least_one, "mask_boundary_loss": bool, "train_on_eos": bool}
_SHAPE = {
    "row_tokens": COUNT,
    "kinds": {str: _KIND},
    "seed": int,
    "repeat": bool,
    "buffer_docs": _at_least_one,
    "pads": bool,
    "cost": (None, _named),
    "loss": {str: object},
    "own": {str: object},
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A JSON document that decides the rows of a run, together with its metadataset.

    Attributes:
        row_tokens: positions of a row; 0 if rows differ in length.
        kinds: how each kind of source is planned, by name.
        seed: selects the random numbers of the draw, of orders and of samples.
        repeat: whether the sources are read again and again.
        buffer_docs: documents that a source packs together, unless few sources pack more.
        pads: whether padding completes the last step; if not, its rows are dropped.
        cost: cost of rows, by which those of a step are distributed so that all ranks take equally
            long: name and options of a registered one, the name alone of another; None for none.
        contexts: how the documents of a step are put into micro-batches of several
            context-parallel sizes, see :class:`~energon_ext.plan.layout.ContextOptions`; None if
            rows are read as they are.
        loss: what batches say of the loss. A plan does not depend on it.
        own: what else a state is refused for: the encoder's ``state_fingerprint()``.
    """

    row_tokens: int = 0
    kinds: Mapping[str, KindSpec] = field(default_factory=dict)
    seed: int = 0
    repeat: bool = True
    buffer_docs: int = 1
    pads: bool = True
    cost: Mapping[str, Any] | None = None
    contexts: Mapping[str, Any] | None = None
    loss: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    def kind_of(self, is_tokenized: bool) -> str:
        """Return the kind of a source, which is stored as tokens or not."""
        return DOCUMENTS if is_tokenized or SAMPLES not in self.kinds else SAMPLES

    def packing(self, kind: str) -> dict[str, Any]:
        """Return what packs the rows of a kind, as the state of a source contains it."""
        packer = self.kinds[kind].packer if kind in self.kinds else None
        return {"row_tokens": self.row_tokens, "packer": packer}

    def compared(self) -> dict[str, Any]:
        """Return what a state is refused for if it differs, under names that people know."""
        main = self.kinds.get(SAMPLES) or self.kinds.get(DOCUMENTS)
        fields = {**self.own, "seed": self.seed, **self.loss}
        if main is None:
            return fields
        if main.packer is not None:
            fields |= {"seq_len": self.row_tokens, "packing": dict(main.packer)}
        if main.block != 1:
            fields["sample_block"] = main.block
        if main.cut is not None:
            fields["over_long"] = main.cut.over_long
        return fields

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.contexts is None:
            del fields["contexts"]
        return fields

    @classmethod
    def from_json(cls, value: Any, where: str = "spec") -> Spec:
        """Return a spec from :meth:`to_json`; raise StateFormatError for anything else."""
        has_layouts = isinstance(value, Mapping) and "contexts" in value
        check_shape(value, {**_SHAPE, "contexts": {str: object}} if has_layouts else _SHAPE, where)
        kinds = value["kinds"]
        if not kinds or not {DOCUMENTS, SAMPLES}.issuperset(kinds):
            raise StateFormatError(f"{where}.kinds: {[*kinds]!r:.80} found; the state is damaged.")
        if DOCUMENTS in kinds:
            check_shape(kinds[DOCUMENTS]["packer"], {str: object}, f"{where}.kinds.packer")
        if value["loss"] or SAMPLES not in kinds:
            check_shape(value["loss"], _LOSS, f"{where}.loss")
        for each in (value, value["loss"], *value["kinds"].values()):
            check_positions(each, where)
            check_positions(each.get("packer") or {}, f"{where}.packer")
        kinds = {name: _kind(kind) for name, kind in value["kinds"].items()}
        return cls(**{**value, "kinds": kinds})


def describe_repacking(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a log line if a resume changes how rows are packed, else an empty string.

    Args:
        saved, now: of :meth:`Spec.compared`.
    """
    changed = [
        f"{name} {saved.get(name)!r}, now {now.get(name)!r}"
        for name in PACKING
        if saved.get(name) != now.get(name)
    ]
    return f"Rows are packed differently from here on: {'; '.join(changed)}." if changed else ""


def _kind(value: Mapping[str, Any]) -> KindSpec:
    cut, splice = value["cut"], value["splice"]
    return KindSpec(
        **{
            **value,
            "cut": None if cut is None else Cut(**cut),
            "splice": None if splice is None else SpliceSpec(**splice),
        }
    )
