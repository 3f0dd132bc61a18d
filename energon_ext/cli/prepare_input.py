# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turn the options of ``energon-ext prepare`` into a job and the units of its input."""

import functools
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

from megatron.energon import TextSample
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_type

from energon_ext.arguments import choices
from energon_ext.batch.columns import Column, check_names, columns_to_json
from energon_ext.cli import one_of
from energon_ext.cli.mix import make_encoder
from energon_ext.config.yaml_file import splits_of
from energon_ext.encoders.cached_samples import sample_source
from energon_ext.encoders.load import load_split
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.sft import Dialogue, cook_dialogue
from energon_ext.encoders.text_sources import encode_all
from energon_ext.encoders.written_tokenizer import FIELD, tokenizer_arguments
from energon_ext.errors import ConfigError, SampleError
from energon_ext.keyed import sha256
from energon_ext.prepare import inputs, tables
from energon_ext.prepare.documents import (
    InputDocument,
    Unit,
    check_object,
    text_under,
    with_columns,
)
from energon_ext.prepare.job import Job
from energon_ext.prepare.samples import sample_units
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.tokenizers.tokenizers import load_tokenizer
from energon_ext.tokens.formats import find_format
from energon_ext.tokens.splits import SPLITS

#: The kinds of input, and the options that are specific to each.
KINDS = {
    "--text": ("separator",),
    "--folder": ("glob", "separator"),
    "--jsonl": ("key",),
    "--parquet": ("key",),
    "--hf-dataset": ("key", "hf_config", "hf_split", "hf_streaming"),
    "--dataset": ("split",),
}
CHAT_OPTIONS = ("chat_template", "chat_template_kwargs", "answers", "answer_end")
MAX_NAMED = 8  # most input paths listed in the record of a preparation


def job_and_units(options: Mapping[str, Any]) -> tuple[Job, list[Unit], Sequence[str]]:
    """Return the job, the units of the input, and the splits that must contain documents."""
    special = {name: options[name] for name in ("eos_token", "bos_token")}
    tokenizer = options["tokenizer"]
    if tokenizer is None:
        raise ConfigError(
            "--tokenizer is missing: 'bytes', a tokenizer.json, a folder or a Hugging Face name. "
            "To keep text as text, use JSON Lines and `energon prepare`."
        )
    kind = _kind(options["files"], options)
    loaded = load_tokenizer(tokenizer, **special)
    chat = {name: options[name] for name in CHAT_OPTIONS}
    encoder = make_encoder(loaded, task="chat" if options["chat"] else "text", **chat)
    columns = _columns(options["column"])
    if columns and kind not in ("--jsonl", "--parquet", "--hf-dataset"):
        raise ConfigError(f"--column: {kind} has no records; use --jsonl, --parquet, --hf-dataset.")
    keeps_splits = kind == "--dataset" and len(options["split"]) > 1
    path = options[_name(kind)]
    paths = [*(path if isinstance(path, tuple) else [path]), *options["files"]]
    arguments = tokenizer_arguments(tokenizer, **special)
    job = _job(encoder, columns, arguments, kind, paths, options)
    splits = SPLITS if options["val"] > 0 or keeps_splits else SPLITS[:1]
    return job, _units(encoder, columns, kind, paths, options), splits


def _columns(named: Sequence[str]) -> dict[str, Column]:
    """Return the columns per document that are named as NAME or NAME:TYPE."""
    columns: dict[str, Column] = {}
    for each in named:
        name, _, dtype = each.partition(":")
        if name in columns:
            raise ConfigError(f"--column: {name!r} found twice, different names are needed.")
        described = {"dtype": dtype or "float32", "per": "document"}
        columns[name] = Column.from_json(described, f"--column {each}")
    check_names(columns, "--column")
    return columns


def _name(kind: str) -> str:
    """Return the parameter name of an option."""
    return kind.removeprefix("--").replace("-", "_")


def _kind(files: Sequence[Path], options: Mapping[str, Any]) -> str:
    """Return the kind of input that is given; raise ConfigError if options do not fit it."""
    kind = one_of({kind: options[_name(kind)] for kind in KINDS})
    if files and kind not in ("--text", "--jsonl", "--parquet"):
        allowed = "--text, --jsonl or --parquet"
        raise ConfigError(f"{files[0]}: more files can follow {allowed}, not {kind}.")
    if options["chat"] and kind in ("--text", "--folder"):
        advice = "use JSON Lines, Parquet or a dataset"
        raise ConfigError(f"--chat: {kind} contains no conversations; {advice}.")
    if kind == "--dataset" and options["on_error"] == "skip":
        raise ConfigError("--on-error skip: not for --dataset, which Energon has checked.")
    splits = options["split"]
    if len(splits) > 1 and set(splits) != set(SPLITS):
        raise ConfigError(f"--split {' '.join(splits)}: give one, or {' and '.join(SPLITS)}.")
    return kind


def _job(
    encoder: PackedTaskEncoder,
    columns: Mapping[str, Column],
    arguments: dict[str, str],
    kind: str,
    paths: Sequence[Any],
    options: Mapping[str, Any],
) -> Job:
    """Return how to process documents, with the options that a continued command must repeat."""
    named = [str(path) for path in paths]
    if len(named) > MAX_NAMED:
        digest = sha256("\n".join(named).encode("utf-8", "replace"))
        named = [named[0], f"and {len(named) - 1} more, SHA-256 {digest[:16]}"]
    meta, shuffle = {**encoder.token_file_meta(), **columns_to_json(columns)}, options["shuffle"]
    order = () if shuffle is None else ("shuffle",)
    compared = ("chat", "val", "seed", "min_chars", "on_error", *order, *KINDS[kind])
    return Job(
        encode=functools.partial(encode_all, encoder, BadSamples(kind, encoder.decoder)),
        writer=functools.partial(
            TokenWriter, vocab_size=encoder.tokenizer.vocab_size, columns=columns
        ),
        meta={**meta, FIELD: arguments},
        options={"input": [kind, *named], **{name: options[name] for name in compared}, **meta},
        val_fraction=options["val"],
        seed=options["seed"],
        min_chars=options["min_chars"],
        skips_unreadable=options["on_error"] == "skip",
        shuffle=shuffle,
    )


def _units(
    encoder: PackedTaskEncoder,
    columns: Mapping[str, Column],
    kind: str,
    paths: Sequence[Any],
    options: Mapping[str, Any],
) -> list[Unit]:
    """Divide the input into units."""
    # A conversation is refused for fields that are not used, so all of them are read.
    fields = None if options["chat"] else [options["key"], *columns]
    read_row = read_chat if fields is None else text_under(options["key"])
    if columns:
        read_row = with_columns(read_row, columns)
    if kind == "--text":
        return inputs.text_units(paths, options["separator"])
    if kind == "--folder":
        files = inputs.folder_files(paths[0], options["glob"])
        return inputs.text_units(files, options["separator"])
    if kind == "--jsonl":
        return inputs.jsonl_units(paths, read_row)
    if kind == "--parquet":
        return tables.parquet_units(paths, read_row, fields)
    if kind == "--dataset":
        return _energon_units(paths[0], encoder, options)
    return tables.hugging_face_units(
        paths[0],
        config=options["hf_config"],
        split=options["hf_split"],
        streaming=options["hf_streaming"],
        read_row=read_row,
        fields=fields,
    )


def _energon_units(
    path: Path, encoder: PackedTaskEncoder, options: Mapping[str, Any]
) -> list[Unit]:
    """Return the units of a prepared folder or metadataset; several splits are kept apart.

    Each source of a metadataset is read once: weights and repetitions describe how often a run
    reads it, not what it contains.
    """
    if find_format(path) is not None:
        raise ConfigError(f"{path}: is already tokenized; use it in a metadataset directly.")
    if get_dataset_type(EPath(str(path))) is EnergonDatasetType.JSONL:
        raise ConfigError(f"{path}: a JSON Lines file has no splits; read it with --jsonl.")
    splits, known = options["split"], splits_of(path)
    for split in splits:
        if split not in known:
            has = f"{choices(split, known)} Give each with its own --split."
            raise ConfigError(f"{path}: no split {split!r}; it has {has}")
    units: list[Unit] = []
    for split in splits:
        for entry in load_split(path, split, encoder.decoder, options["trusted_modules"]):
            name = str(entry.dataset.paths[0])
            if find_format(name) is not None:
                raise ConfigError(f"{name}: is already tokenized; remove it from {path}.")
            kept_split = split if len(splits) > 1 else None
            document = functools.partial(_document, name, kept_split, options["chat"])
            units += sample_units(sample_source(encoder, entry, document))
    return units


def _document(path: str, split: str | None, chat: bool, sample: Any, key: str) -> InputDocument:
    origin = f"{path}: {key}"
    if chat and isinstance(sample, Dialogue):
        return conversation(sample, origin, split=split)
    if not chat and isinstance(sample, TextSample):
        return InputDocument(sample.text, origin, split=split)
    wanted = "a conversation (Dialogue)" if chat else "text (TextSample)"
    raise ConfigError(f"{origin}: {type(sample).__name__} found, {wanted} is needed.")


def read_chat(row: Any, origin: str, num_bytes: int) -> InputDocument:
    """Convert a JSON object to a document, which has the error of a record that is refused.

    Example:
        >>> record = {"prompt": "2 + 2", "response": "4", "id": 17}
        >>> read_chat(record, "chat.jsonl:1", 50).text
        '["2 + 2", "4"]'
    """
    check_object(row, origin)
    crude = {"__key__": origin, "__restore_key__": (), "json": row}
    try:
        return conversation(cook_dialogue(crude), origin, num_bytes)
    except SampleError as error:
        return InputDocument(_json(row), origin, num_bytes, error)


def conversation(
    sample: Dialogue, origin: str, num_bytes: int = 0, split: str | None = None
) -> InputDocument:
    """Convert a conversation to a document; equal conversations have equal texts."""
    found = sample.conversation
    content: Any = found.messages
    if found.is_pair:
        content = [message["content"] for message in found.messages]
    elif further := [each for each in (found.tools, found.template_kwargs) if each]:
        content = [found.messages, *further]
    return InputDocument(_json(content), origin, num_bytes, sample, split)


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
