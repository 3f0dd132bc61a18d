# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The text of Energon datasets: which samples there are, and their tokens."""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import SkipSample, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader import load_dataset
from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.config.yaml_check import YamlChecker
from energon_ext.documents.stored_files import fingerprint_files, times_of_files
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.errors import LEFT_OUT, SampleError
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.prepare.samples import SampleSource


def load_split(
    path: Path, split: str, encoder: Any, trusted_modules: Iterable[str] = ()
) -> list[LoadedDataset]:
    """The sources of one split of a metadataset or of a prepared folder, checked first."""
    YamlChecker(frozenset(trusted_modules)).check(EPath(str(path)), split)
    with quiet_energon():
        found = load_dataset(EPath(str(path))).get_datasets(
            training=False, split_part=split, worker_config=_alone(), decoder=encoder.decoder
        )
    return list(found.datasets)


def sample_source(
    encoder: Any, loaded: LoadedDataset, document: Callable[[Any, str], InputDocument], **own: Any
) -> SampleSource:
    """The samples of a source as an encoder has them: cooked by its cookers, not yet encoded."""
    factory = loaded.dataset
    files = fingerprint_files(factory)

    def open_samples() -> SavableDataset:
        alone = copy.copy(loaded)
        alone.dataset = copy.copy(factory)
        alone.dataset.worker_config = _alone()
        with quiet_energon():
            return encoder._load_dataset(alone, 0, worker_config=_alone())

    count = len(factory)
    return SampleSource(
        path=str(factory.paths[0]),
        version={**files, "times": times_of_files(factory)},
        count=count,
        open=open_samples,
        document=document,
        sample_bytes=files.get("bytes", 0) // max(1, count),
        **own,
    )


def encode_texts(encoder: Any, documents: Sequence[InputDocument]) -> list[Encoded]:
    """The texts of some documents as tokens."""
    texts = [document.text for document in documents]
    return [(tokens, None) for tokens in encoder.tokenizer.encode_batch(texts)]


def encode_samples(encoder: Any, documents: Sequence[InputDocument]) -> list[Encoded]:
    """The samples of some documents as tokens and weights; of each that is refused, the reason."""
    return [_encoded(encoder, document.sample) for document in documents]


def _encoded(encoder: Any, sample: Any) -> Encoded:
    if sample is None:
        return np.zeros(0, np.int64), None
    if isinstance(sample, Exception):
        return sample if isinstance(sample, SampleError) else SampleError(str(sample))
    if not _is_whole(getattr(sample, "text", None)):
        return SampleError(f"Sample {sample.__key__}: its text holds half a character.")
    try:
        encoded = encoder.encode_document(sample)
    except (SkipSample, *LEFT_OUT) as error:
        return error if isinstance(error, SampleError) else SampleError(str(error))
    return np.asarray(encoded.tokens), encoded.label_weights


def _is_whole(text: Any) -> bool:
    """Whether a text has no half of a character, which no tokenizer takes."""
    try:
        return not isinstance(text, str) or bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def _alone() -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=0)
