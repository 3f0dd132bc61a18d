# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources with spliced documents, for any encoder of packed batches.

The splice comes from the YAML entry (``splice:``) or from the encoder. A spliced source yields rows
like any other, so it can be weighted, scheduled and interleaved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.arguments import choices
from energon_ext.config.mix import Entry
from energon_ext.encoders.sources import subset_size
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256
from energon_ext.plan.budget import nested_subset
from energon_ext.plan.spec import DOCUMENTS, Spec, SpliceSpec
from energon_ext.splice import SpliceIndex, select_documents
from energon_ext.splice.config import SpliceFields, splice_from_config
from energon_ext.splice.frames import Frames, log_plan
from energon_ext.splice.index import ORDER
from energon_ext.splice.reader import FrameReader
from energon_ext.splice.validation import GridIndex
from energon_ext.state.match import ENCODER
from energon_ext.tokens.documents import Documents, Lengths
from energon_ext.tokens.origins import origins_of

#: Maximum number of documents of a source that are counted under their own names by default.
NAMED_DOCUMENTS = 64


@dataclass(frozen=True)
class Splices:
    """The splices of a run.

    Attributes:
        by_key: of each spliced source.
        pad_id: token that fills all rows; None for the tokenizer's, as nothing can be spliced.
    """

    by_key: Mapping[str, SpliceFields] = field(default_factory=dict)
    pad_id: int | None = None


def choose_splices(entries: Sequence[Entry], spec: Spec, *, are_all: bool = True) -> Splices:
    """Choose the splice of each source.

    Args:
        are_all: whether these are all sources of a run, so that every name must be one of theirs.

    Raises:
        ConfigError: rows of the spec do not support a splice, sources have different pad ids, or a
            splice is for none of them.
    """
    documents = spec.kinds.get(DOCUMENTS)
    if documents is None or documents.splice is None:
        refuse_splices(entries, str(spec.own.get(ENCODER, "the task")))
        return Splices()
    how, keys = documents.splice, [entry.key for entry in entries]
    own = None if how.config is None else splice_from_config(how.config, "splice of the encoder")
    if are_all:
        check_names(entries)
        if own is not None:
            check_name(own, keys)
    chosen, pads = {}, {}
    for entry in entries:
        if (splice := _choose(entry, own, how.subflavors)) is None:
            continue
        if entry.order is not None and not entry.order.is_random:
            raise ConfigError(
                f"{entry.where}.order: {entry.key} is spliced, which has an order of its own; "
                f"remove one of the two."
            )
        if entry.transform is not None:
            raise ConfigError(
                f"{entry.where}.transform: {entry.key} is spliced, which shows its documents as "
                f"they are; remove one of the two."
            )
        if (entry.block_docs or 1) > 1:
            raise ConfigError(
                f"{entry.where}: block_docs: {entry.block_docs} found, but {entry.key} is spliced, "
                f"which reads no blocks; remove it."
            )
        check_splice(how, spec.loss, splice, f"{entry.splice_where}: " if entry.splice else "")
        chosen[entry.key] = splice
        if splice.pad_token_id is not None:
            pads[splice.pad_token_id] = entry.key
    if len(pads) > 1:
        (pad, key), (other_pad, other_key), *_ = pads.items()
        raise ConfigError(
            f"pad_token_id: {pad} for {key} and {other_pad} for {other_key}; all rows of a batch "
            f"share one pad id. Use the same for all sources."
        )
    if are_all and own is not None and not chosen:
        raise ConfigError(
            f"No source to splice among {', '.join(keys)}: spliced_subflavors is "
            f"{dict(how.subflavors)}. Give these subflavors to a source, or leave it None."
        )
    return Splices(chosen, next(iter(pads), how.pad_id))


def refuse_splices(entries: Sequence[Entry], encoder: str) -> None:
    """Raise ConfigError for a splice of an entry."""
    for entry in entries:
        if entry.splice is not None:
            raise ConfigError(
                f"{entry.splice_where}: {encoder} does not support splices; use an "
                f"energon_ext.PackedTaskEncoder, or remove it."
            )


def _choose(
    entry: Entry, own: SpliceFields | None, subflavors: Mapping[str, Any]
) -> SpliceFields | None:
    """Return the splice of a source: its entry's, or the encoder's if that is for it."""
    is_for_it = all(entry.subflavors.get(name) == value for name, value in subflavors.items())
    for splice in (entry.splice, own if is_for_it else None):
        if splice is not None and splice.dataset_name in (None, *names_of(entry.key)):
            return splice
    return None


def check_splice(
    how: SpliceSpec, loss: Mapping[str, Any], splice: SpliceFields, where: str = ""
) -> None:
    """Raise ConfigError for a splice that rows do not support.

    Args:
        loss: see :class:`~energon_ext.plan.spec.Spec`.
    """
    alignment = loss["alignment"]
    if alignment > 1:
        raise ConfigError(
            f"{where}alignment: {alignment} found; frames begin at any offset, so they cannot be "
            f"aligned for context parallelism. Leave it at 1."
        )
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(splice, name)
        if token is not None and token >= how.vocab_size:
            raise ConfigError(
                f"{where}{name}: {token} found, the tokenizer has ids below {how.vocab_size}."
            )
    if splice.pack_contents and not loss["mask_boundary_loss"]:
        raise ConfigError(
            f"{where}pack_contents: True found with mask_boundary_loss=False; the contents of a "
            f"frame do not continue each other. Set mask_boundary_loss=True."
        )


def check_names(entries: Sequence[Entry]) -> None:
    """Raise ConfigError for a ``dataset_name`` on a YAML entry that none of its sources has."""
    splices = {entry.splice_where: entry.splice for entry in entries if entry.splice is not None}
    for where, splice in splices.items():
        keys = [entry.key for entry in entries if entry.splice_where == where]
        check_name(splice, keys, f"{where}: ")


def check_name(splice: SpliceFields, keys: Iterable[str], where: str = "") -> None:
    """Raise ConfigError for a ``dataset_name`` that no source has."""
    names = {name for key in keys for name in names_of(key)}
    if splice.dataset_name not in (None, *names):
        raise ConfigError(
            f"{where}dataset_name: {splice.dataset_name!r} found, the sources are "
            f"{choices(splice.dataset_name, names)}"
        )


def names_of(key: str) -> set[str]:
    """Return the names by which ``dataset_name`` may refer to a source: key, path or folder."""
    path = key.partition(":")[0]
    return {key, path, path.rsplit("/", 1)[-1]}


def plan_frames(
    splice: SpliceFields,
    files: Lengths,
    entry: Entry,
    spec: Spec,
    documents: range,
    *,
    epochs: float | None,
    validating: bool,
    fill_id: int | None,
) -> tuple[Frames, FrameReader]:
    """Plan the frames of one source, which form a grid in validation; return what reads them.

    Args:
        documents: those of the source in the files.
        fill_id: token that fills rows.
    """
    how = spec.kinds[DOCUMENTS].splice
    assert how is not None and fill_id is not None, "choose_splices refuses all others"
    assert isinstance(files, Documents), "samples are not spliced"
    key, shuffle_key = entry.key, entry.names.shuffle_key
    first, stop = documents.start, documents.stop
    subset = subset_size(entry, files)
    lengths = _lengths_to_choose_from(splice, files, entry, documents, subset)
    keys = _keys(files)[first:stop] if entry.has_samples else None
    numbers = select_documents(
        lengths, splice, seq_len=spec.row_tokens, keys=keys, source=shuffle_key
    )
    lengths = lengths[numbers]
    has_names = how.named_documents
    if has_names is None:
        has_names = len(numbers) <= NAMED_DOCUMENTS
    examples: SpliceIndex | GridIndex
    try:
        if validating:
            grid = {"starts": how.starts, "offsets": how.offsets}
            examples = GridIndex(lengths, spec.row_tokens, splice, **grid)
        else:
            examples = SpliceIndex(
                lengths, spec.row_tokens, splice, key=f"{shuffle_key}/{spec.seed}"
            )
            log_plan(examples, numbers, key)
    except ConfigError as error:
        raise ConfigError(f"Source {key}: {error}") from error
    digest = sha256(json.dumps(files.fingerprint()), np.stack([numbers + first, lengths]).tobytes())
    names = [f"{key}/doc{number}" if has_names else key for number in numbers]
    frames = Frames(
        examples,
        numbers.tolist(),
        names,
        key=key,
        config=splice,
        seq_len=spec.row_tokens,
        epochs=epochs,
        fingerprint={
            **splice.to_json(),
            **({} if subset is None else {"subset": subset}),
            "documents": digest,
            "order": ORDER,
        },
        subset=None if subset is None else (subset, len(documents)),
        metadata=[
            {"document": number, "tokens": length} | ({} if keys is None else {"key": keys[number]})
            for number, length in zip(numbers.tolist(), lengths.tolist())
        ],
    )
    reader = FrameReader(files, first, numbers.tolist(), names, splice, fill_id, entry.others)
    return frames, reader


def _lengths_to_choose_from(
    splice: SpliceFields, files: Documents, entry: Entry, documents: range, subset: int | None
) -> np.ndarray:
    """Return the lengths of the documents of a source, 0 for those outside its subset.

    Empty documents are never chosen, and all others keep their numbers.
    """
    if subset is None:
        return files.lengths(np.arange(documents.start, documents.stop))
    inside = nested_subset(len(documents), subset).astype(np.int64)
    index = getattr(splice, "doc_index", None)
    if index is not None and index < len(documents) and index not in inside:
        raise ConfigError(
            f"doc_index: document {index} of {entry.key} is not among the {subset:,} of "
            f"{entry.budget}; choose another one, or give a larger subset."
        )
    lengths = np.zeros(len(documents), np.int64)
    lengths[inside] = files.lengths(inside + documents.start)
    return lengths


def _keys(files: Documents) -> list[str]:
    """Return the keys of the samples that token files were written from."""
    origins = map(origins_of, files.prefixes)
    return [keys[number] for keys in origins if keys is not None for number in range(len(keys))]
