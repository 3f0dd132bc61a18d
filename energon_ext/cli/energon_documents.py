# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of prepared webdatasets and metadatasets, as Energon reads them, in file order."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.energon import TextSample, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory
from megatron.energon.flavors.crude import CrudeSample
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_type
from megatron.energon.metadataset.loader import load_dataset

from energon_ext.cli.documents import Corpus, Document, check_object, conversation_document
from energon_ext.config.yaml_check import YamlChecker
from energon_ext.documents.token_paths import SPLITS, is_token_file
from energon_ext.encoders.pretrain import cook_text
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.encoders.sft import Dialogue, PromptResponse, cook_dialogue
from energon_ext.encoders.text_decoder import TextDecoder
from energon_ext.errors import ConfigError, SampleError


def energon_dataset(
    path: Path, splits: Sequence[str], *, chat: bool, trusted_modules: Iterable[str] = ()
) -> Corpus:
    """The documents of a prepared folder or a metadataset; those of several splits keep theirs.

    Every source of a metadataset is read once, one after another: weights and repetitions say how
    often a run reads it, not what it holds.
    """
    if is_token_file(path):
        raise ConfigError(f"{path}: tokenized already; name it in a metadataset as it is.")
    if get_dataset_type(EPath(path)) is EnergonDatasetType.JSONL:
        raise ConfigError(f"{path}: a JSON Lines file has no splits; read it with --jsonl.")
    if len(splits) > 1 and set(splits) != set(SPLITS):
        raise ConfigError(f"--split {' '.join(splits)}: give one, or {' and '.join(SPLITS)}.")
    checker = YamlChecker(frozenset(trusted_modules))
    for split in splits:
        checker.check(EPath(path), split)
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=_stop)
    sources = [
        (split, loaded.dataset)
        for split in splits
        for loaded in load_dataset(EPath(path))
        .get_datasets(training=False, split_part=split, worker_config=alone, decoder=TextDecoder())
        .datasets
    ]
    for split, source in sources:
        if is_token_file(source.paths[0]):
            raise ConfigError(f"{source.paths[0]}: tokenized already; take it out of {path}.")
        if not len(source):
            raise ConfigError(f"{source.paths[0]}: no document in {split}; choose with --split.")
    documents = (
        _document(sample, source, chat, split if len(splits) > 1 else None)
        for split, source in sources
        for sample in _samples(source, alone)
    )
    return Corpus(documents, total_documents=sum(len(source) for _, source in sources))


def _samples(source: BaseCoreDatasetFactory, worker_config: WorkerConfig) -> Iterator[Any]:
    with quiet_energon():
        dataset = source.build()
    worker_config.worker_activate(0)
    try:
        yield from dataset
    except FatalSampleError as error:
        raise ConfigError(f"{source.paths[0]}: cannot be read ({error}).") from error
    finally:
        worker_config.worker_deactivate()


def _stop(error: Exception, sample: Any, sources: Any = None) -> None:
    """Energon goes on after a damaged sample; a preparation does not lose documents in silence."""
    raise ConfigError(f"{type(error).__name__} in a sample: {error}.") from error


def _document(
    sample: Any, source: BaseCoreDatasetFactory, chat: bool, split: str | None
) -> Document:
    key = sample["__key__"] if isinstance(sample, dict) else sample.__key__
    origin = f"{source.paths[0]}: {key}"
    if source.__sample_type__ is CrudeSample:
        check_object(sample.get("json", sample), origin)
        try:
            sample = cook_dialogue(sample) if chat else cook_text(sample)
        except SampleError as error:
            raise ConfigError(f"{source.paths[0]}: {error}") from error
    if chat and isinstance(sample, (Dialogue, PromptResponse)):
        document = conversation_document(sample, origin)
    elif not chat and isinstance(sample, TextSample):
        document = Document(sample.text, origin)
    else:
        wanted = "a conversation (Dialogue, PromptResponse)" if chat else "text (TextSample)"
        raise ConfigError(f"{origin}: a {type(sample).__name__}, {wanted} is needed.")
    return document if split is None else dataclasses.replace(document, split=split)
