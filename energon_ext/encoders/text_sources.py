# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The text of Energon datasets: which samples there are, and their tokens."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import SkipSample
from megatron.energon.epathlib import EPath
from megatron.energon.metadataset.loader import load_dataset

from energon_ext.config.mix import Entry, mix_of
from energon_ext.config.references import TokenFileFactory
from energon_ext.config.yaml_check import YamlChecker
from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.documents.file_set import TokenFiles, open_token_files
from energon_ext.documents.stored_files import (
    fingerprint_files,
    num_samples,
    parts_of,
    times_of_files,
)
from energon_ext.encoders.chat import named_template
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.encoders.sources import open_alone
from energon_ext.encoders.text import is_text
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import LEFT_OUT, ConfigError, SampleError
from energon_ext.prepare.cache import BYTES_PER_SECOND, SPLIT, Cached, cache_folder, ensure_made
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded, Job
from energon_ext.prepare.samples import SampleSource, sample_units
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.samples.numbered import ALONE, as_worker

#: What the command can make.
_COMMANDS_ENCODERS = ("PackedTaskEncoder", "SFTTaskEncoder")

#: Whose samples may be tokenized many at a time.
_OF_TEXT = "energon_ext.encoders.pretrain.PackedTaskEncoder.encode_document"


def load_split(
    path: Path, split: str, encoder: Any, trusted_modules: Iterable[str] = ()
) -> tuple[Entry, ...]:
    """The sources of one split of a metadataset or of a prepared folder, checked first."""
    YamlChecker(frozenset(trusted_modules)).check(EPath(str(path)), split)
    with quiet_energon():
        found = load_dataset(EPath(str(path))).get_datasets(
            training=False, split_part=split, worker_config=ALONE, decoder=encoder.decoder
        )
    return mix_of(found.datasets).entries


def of_samples(entries: Sequence[Entry]) -> list[Entry]:
    """The sources that are no token files."""
    return [each for each in entries if not isinstance(each.dataset, TokenFileFactory)]


def sample_source(
    encoder: Any, entry: Entry, document: Callable[[Any, str], InputDocument], **own: Any
) -> SampleSource:
    """The samples of a source as an encoder has them: cooked by its cookers, not yet encoded."""
    factory = entry.dataset
    files, count = fingerprint_files(factory), num_samples(factory)
    return SampleSource(
        path=str(factory.paths[0]),
        version={**files, "times": times_of_files(factory)},
        count=count,
        open=functools.partial(open_alone, encoder, entry),
        document=document,
        sample_bytes=files.get("bytes", 0) // max(1, count),
        **own,
    )


def encode_all(encoder: Any, documents: Sequence[InputDocument]) -> list[Encoded]:
    """The texts or samples of some documents as tokens and weights, or why one is refused."""
    if encoder.saved_encoding is not None:
        raise ConfigError(
            "The text of this run is not tokenized here, and its state does not hold the encoder; "
            "run `energon-ext tokenize` on the metadataset first."
        )
    samples = [document.sample for document in documents]
    texts = [each.text or getattr(each.sample, "text", None) for each in documents]
    if _code_of(encoder)[0] == _OF_TEXT and all(map(is_text, texts)):
        return [(tokens, None) for tokens in encoder.tokenizer.encode_batch(texts)]
    with as_worker():
        return [_encoded(encoder, sample) for sample in samples]


def _encoded(encoder: Any, sample: Any) -> Encoded:
    if sample is None:
        return np.zeros(0, np.int64), None
    if isinstance(sample, SampleError):
        return sample
    try:
        encoded = encoder.encode_document(sample)
    except (SkipSample, *LEFT_OUT) as error:
        return error if isinstance(error, SampleError) else SampleError(str(error))
    return np.asarray(encoded.tokens), encoded.label_weights


# The cache of text ------------------------------------------------------------------------------


def ensure_tokenized(encoder: Any, entries: Sequence[Entry]) -> dict[str, TokenFiles]:
    """The token files of all sources that are text, by their keys."""
    cached = {each.key: cached_text(encoder, each) for each in of_samples(entries)}
    ensure_made(list(cached.values()))
    files = {key: each.open() for key, each in cached.items()}
    for key, found in files.items():
        if len(found) and not found.num_tokens:
            raise ConfigError(
                f"{key}: none of its {len(found):,} samples gives a token. Samples that are no "
                f"text need a TaskEncoder of your own; commands take it by --encoder."
            )
    return files


def cached_text(encoder: Any, entry: Entry) -> Cached:
    """The token files of a source that is text, as an encoder makes them; they may not be there."""
    source = cached_source(encoder, entry)
    split = [getattr(part, "split_part_files", None) for part in parts_of(entry.dataset)]
    num_bytes = source.version.get("bytes")
    return cached_samples(
        entry,
        source,
        {"files": dict(source.version), "split": split},
        encoding=encoder.saved_encoding or encoding_of(encoder),
        encode=functools.partial(encode_all, encoder),
        writer=functools.partial(
            TokenWriter,
            vocab_size=encoder.tokenizer.vocab_size,
            weights_dtype="float32" if _own_code(encoder) else "uint8",
        ),
        meta=encoder.token_file_meta(),
        units=sample_units(source),
        seconds=None if num_bytes is None else num_bytes / BYTES_PER_SECOND,
        open_folder=lambda folder: open_token_files(folder / SPLIT),
        verb="tokenized",
        command=functools.partial(_command, encoder, entry),
    )


def cached_source(encoder: Any, entry: Entry) -> SampleSource:
    """The samples of a source with those that cannot be used, so that each keeps its number."""

    def document(sample: Any, key: str) -> InputDocument:
        return InputDocument("", key, source.sample_bytes, sample, SPLIT)

    source = sample_source(encoder, entry, document, keeps_damaged=True)
    return source


def cached_samples(
    entry: Entry,
    source: SampleSource,
    files: Mapping[str, Any],
    *,
    encoding: Any,
    encode: Callable[[Sequence[InputDocument]], Sequence[Encoded]],
    writer: Callable[[Path], Any],
    meta: Mapping[str, Any],
    **own: Any,
) -> Cached:
    """The entry of the cache for a source; its folder is named by all that it depends on."""
    excluded = [sorted(getattr(part, "sample_excludes", ())) for part in parts_of(entry.dataset)]
    depends_on = {
        **files,
        "encoding": encoding,
        "excluded": excluded,
        "subflavors": getattr(entry.dataset, "subflavors", None),
        "aux": sorted(str(store.get_path()) for store in (entry.loaded.aux or {}).values()),
    }
    text = json.dumps(depends_on, sort_keys=True, default=str)
    root = entry.root or entry.dataset.paths[0].parent
    if not root.is_local() and CACHE_VARIABLE not in os.environ:
        raise ConfigError(f"{root}: is not local; set {CACHE_VARIABLE} to a folder for its cache.")
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = cache_folder(Path(str(root)), Path(source.path).name, digest)
    job = Job(encode, writer, meta, json.loads(text), keeps_all=True)
    return Cached(name=source.path, folder=folder, job=job, count=source.count, **own)


def encoding_of(encoder: Any) -> dict[str, Any]:
    """JSON values that change whenever the tokens of some sample change."""
    own, foreign = encoder.encoding_fingerprint, _own_code(encoder)
    if foreign and own is None:
        raise ConfigError(
            f"{type(encoder).__name__}: {foreign[0]} is code of your own; give the class an "
            f"encoding_fingerprint, JSON values such as {{'version': 1}}, and change it whenever "
            f"the tokens of a sample change. They are kept, and found by it."
        )
    return {
        **encoder.token_file_meta(),
        "encode_document": _code_of(encoder)[0],
        "cookers": _code_of(encoder)[1:],
        "decoder": type(encoder.decoder).__qualname__,
        "own": own,
    }


def _code_of(encoder: Any) -> list[str]:
    """Module and name of ``encode_document`` and of the cookers."""
    functions = [type(encoder).encode_document, *(cooker.cook for cooker in encoder.cookers)]
    functions = [getattr(function, "func", function) for function in functions]
    return [f"{f.__module__}.{getattr(f, '__qualname__', type(f).__name__)}" for f in functions]


def _own_code(encoder: Any) -> list[str]:
    """Parts of an encoder's encoding that are not from this package."""
    return [place for place in _code_of(encoder) if not place.startswith("energon_ext.")]


def _command(encoder: Any, entry: Entry) -> str:
    """How the text of a source is tokenized before a run."""
    words = ["energon-ext", "tokenize", str(entry.metadataset or entry.dataset.paths[0])]
    name = getattr(encoder.tokenizer, "name", None)
    template = encoder.chat_template.name if hasattr(encoder, "chat_template") else None
    if name is None or not _is_made_by_names(encoder, name, template):
        return " ".join([*words, "--encoder", "MODULE:FUNCTION"])
    words += ["--tokenizer", name]
    if hasattr(encoder, "chat_template"):
        words += ["--task", "chat"]
        words += ["--chat-template", template] if template else []
    return " ".join(words)


def _is_made_by_names(encoder: Any, tokenizer: str, template: str | None) -> bool:
    """True if the command's own options make an encoder with the same tokens."""
    if _own_code(encoder):
        return False
    try:
        loaded = load_tokenizer(tokenizer)
        options = {} if template is None else {"chat_template": named_template(template)}
        made_by = next(c for c in type(encoder).__mro__ if c.__name__ in _COMMANDS_ENCODERS)
        return encoding_of(made_by(loaded, encoder.seq_len, **options)) == encoding_of(encoder)
    except ConfigError:  # it is not found by this name from here
        return False
