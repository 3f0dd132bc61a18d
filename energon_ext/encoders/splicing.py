# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources with spliced documents, for any encoder of packed batches.

The splice comes from the YAML entry (``splice:``) or from the encoder. A spliced source yields rows
like any other, so it can be weighted, scheduled and interleaved.
"""

from __future__ import annotations

import json
from typing import Iterable, Sequence

import numpy as np

from energon_ext.arguments import choices
from energon_ext.config.mix import Entry
from energon_ext.encoders.planning import document_range, name_source
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256
from energon_ext.plan.source import PlannedSource
from energon_ext.plan.spec import DOCUMENTS, Spec, SpliceSpec
from energon_ext.splice import SpliceIndex, select_documents
from energon_ext.splice.config import SpliceFields, splice_from_config
from energon_ext.splice.frames import Frames, log_plan
from energon_ext.splice.index import ORDER
from energon_ext.splice.reader import FrameReader
from energon_ext.splice.validation import GridIndex
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.origins import origins_of
from energon_ext.tokens.reader import open_others

#: Maximum number of documents of a source that are counted under their own names by default.
NAMED_DOCUMENTS = 64


def choose_splice(entry: Entry, spec: SpliceSpec | None) -> SpliceFields | None:
    """Return the splice of a source: its entry's, or the encoder's if that is for it.

    Raises:
        ConfigError: the entry has one, but the documents of the encoder cannot be spliced.
    """
    if spec is None:
        if entry.splice is not None:
            raise ConfigError(
                f"{entry.splice_where}: this task does not support splices; use an "
                f"energon_ext.PackedTaskEncoder, or remove it."
            )
        return None
    own = None if spec.config is None else splice_from_config(spec.config, "splice of the encoder")
    is_for_it = all(entry.subflavors.get(name) == value for name, value in spec.subflavors.items())
    for splice in (entry.splice, own if is_for_it else None):
        if splice is not None and splice.dataset_name in (None, *names_of(entry.key)):
            return splice
    return None


def find_pad_id(entries: Sequence[Entry], spec: Spec) -> int | None:
    """Check the splices of all sources and return the pad id of the batches; None for no splices.

    Raises:
        ConfigError: rows of the spec do not support a splice, or sources have different pad ids.
    """
    kind = spec.kinds.get(DOCUMENTS)
    if kind is None or kind.splice is None:
        return None
    pads: dict[int, str] = {}
    for entry in entries:
        splice = choose_splice(entry, kind.splice)
        if splice is None:
            continue
        if (entry.block_docs or 1) > 1:
            raise ConfigError(
                f"{entry.where}: block_docs: {entry.block_docs} found, but {entry.key} is spliced, "
                f"which reads no blocks; remove it."
            )
        check_splice(spec, splice, f"{entry.splice_where}: " if entry.splice else "")
        if splice.pad_token_id is not None:
            pads[splice.pad_token_id] = entry.key
    if len(pads) > 1:
        (pad, key), (other_pad, other_key), *_ = pads.items()
        raise ConfigError(
            f"pad_token_id: {pad} for {key} and {other_pad} for {other_key}; all rows of a batch "
            f"share one pad id. Use the same for all sources."
        )
    return next(iter(pads), kind.splice.pad_id)


def check_splice(spec: Spec, splice: SpliceFields, where: str = "") -> None:
    """Raise ConfigError for a splice that the rows of a spec do not support."""
    alignment, vocab_size = spec.loss["alignment"], 0
    if (kind := spec.kinds[DOCUMENTS].splice) is not None:
        vocab_size = kind.vocab_size
    if alignment > 1:
        raise ConfigError(
            f"{where}alignment: {alignment} found; frames begin at any offset, so they cannot be "
            f"aligned for context parallelism. Leave it at 1."
        )
    for field in ("pad_token_id", "eos_token_id"):
        token = getattr(splice, field)
        if token is not None and token >= vocab_size:
            raise ConfigError(
                f"{where}{field}: {token} found, the tokenizer has ids below {vocab_size}."
            )
    if splice.pack_contents and not spec.loss["mask_boundary_loss"]:
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


def plan_splice(
    splice: SpliceFields,
    files: Documents,
    entry: Entry,
    spec: Spec,
    how: SpliceSpec,
    *,
    epochs: float | None,
    validating: bool,
    fill_id: int,
) -> PlannedSource:
    """Plan the frames of one source, which form a grid in validation.

    Args:
        fill_id: token that fills rows.
    """
    key, shuffle_key = entry.key, entry.names.shuffle_key
    first, stop = document_range(entry, len(files))
    lengths = files.lengths(np.arange(first, stop))
    keys = _keys(files)[first:stop] if entry.documents is None else None
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
        fingerprint={**splice.to_json(), "documents": digest, "order": ORDER},
        metadata=[
            {"document": number, "tokens": length} | ({} if keys is None else {"key": keys[number]})
            for number, length in zip(numbers.tolist(), lengths.tolist())
        ],
    )
    others = open_others(entry.columns, files, f"{entry.where}.columns")
    reader = FrameReader(files, first, numbers.tolist(), names, splice, fill_id, others)
    return name_source(entry, frames, reader, stop - first)


def _keys(files: Documents) -> list[str]:
    """Return the keys of the samples that token files were written from."""
    origins = map(origins_of, files.prefixes)
    return [keys[number] for keys in origins if keys is not None for number in range(len(keys))]
