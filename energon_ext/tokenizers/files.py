# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tokenizers of other libraries, loaded from untrusted files."""

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_ext.arguments import optional_module
from energon_ext.data_files import open_data, read_data
from energon_ext.errors import ConfigError, first_line
from energon_ext.keyed import sha256

#: Files of which one is in the Hub's cache if a tokenizer was loaded before, and how long to wait
#: for the Hub otherwise.
_HUB_FILES, _HUB_SECONDS = ("tokenizer_config.json", "tokenizer.json", "config.json"), 10.0

#: Size limit of each tokenizer file; the largest known ones have about 40 MB.
MAX_FILE_BYTES = 2**28
_FILE_SUFFIXES = (".json", ".jinja", ".model", ".txt")

#: A line of a tiktoken file (a token in base 64 and its rank), and the encodings it downloads.
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")
_TIKTOKEN_NAMES = re.compile("(r50k|p50k|cl100k|o200k)_(base|edit|harmony)")

#: Token ids are below this number; the library makes room for all ids up to the largest.
MAX_IDS = 2**24
_MAYBE_LARGER = re.compile(rb":\s*\d{8}")  # as most files have none, they are not parsed here

#: Maximum number of characters into which the steps around a tokenizer's model may expand one.
MAX_GROWTH = 16


def load_with_transformers(name: str, what: str) -> Any:
    """Load the ``transformers`` tokenizer of a folder or name; errors begin with ``what``."""
    transformers = optional_module("transformers", what, "transformers", "energon_ext[hf]")
    for path in Path(name).glob("*"):  # a folder may also contain large model files
        if path.suffix in _FILE_SUFFIXES and path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{what}: {path} has more than {MAX_FILE_BYTES:,} bytes.")
        if path.name == "tokenizer.json":
            _check_ids(read_data(path, MAX_FILE_BYTES), what)
    with errors_of_library(f"{what}: transformers cannot load it", "Check the path or the name."):
        _check_on_hub(name)
        loaded = transformers.AutoTokenizer.from_pretrained(
            name, use_fast=True, trust_remote_code=False
        )
    if hasattr(loaded, "backend_tokenizer"):
        _check_growth(loaded.backend_tokenizer, what)
    return loaded


def _check_on_hub(name: str) -> None:
    """Raise an error of the Hub's client for a name that is nowhere; one request, not tried again.

    ``transformers`` would ask for one file after another, each six times, for about a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if Path(name).exists():
        return
    if not any(isinstance(try_to_load_from_cache(name, file), str) for file in _HUB_FILES):
        HfApi().model_info(name, timeout=_HUB_SECONDS)


def load_backend(name: str, what: str) -> tuple[Any, Any]:
    """Load the ``transformers`` tokenizer of a folder or name, and its ``tokenizers.Tokenizer``."""
    loaded = load_with_transformers(name, what)
    if not hasattr(loaded, "backend_tokenizer"):
        raise ConfigError(
            f"{what}: {type(loaded).__name__} has no fast version, which is needed; convert it to "
            f"a tokenizer.json, or give a different tokenizer."
        )
    return loaded, loaded.backend_tokenizer


def without_prefix(tokenizer: Any) -> Any:
    """Return a copy of a ``tokenizers.Tokenizer`` that puts no space before a text."""
    content = json.loads(tokenizer.to_str())
    for step in ("normalizer", "pre_tokenizer"):
        content[step] = _without_prefix(content[step])
    return type(tokenizer).from_str(json.dumps(content))


#: Settings of a step of a tokenizer that neither add to nor strip the start of a text.
_CONTINUED: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
    "Strip": {"strip_left": False},
}


def _without_prefix(part: Any) -> Any:
    """Change the settings of a step of a tokenizer that add to or strip the start of a text."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Prepend":
        return None
    if kind == "Sequence":
        name = next(key for key, value in part.items() if isinstance(value, list))
        kept = [_without_prefix(each) for each in part[name]]
        return {**part, name: [each for each in kept if each is not None]}
    return {**part, **_CONTINUED.get(str(kind), {})}


def load_tokenizer_file(path: str) -> Any:
    """Load the ``tokenizers.Tokenizer`` of a ``tokenizer.json``."""
    what = f"Tokenizer file {path!r}"
    tokenizers = optional_module("tokenizers", what, "tokenizers", "energon_ext[hf]")
    content = read_data(path, MAX_FILE_BYTES)
    _check_ids(content, what)
    advice = "Give the file that `tokenizer.save()` wrote."
    with errors_of_library(f"{what} is not a tokenizer.json", advice):
        loaded = tokenizers.Tokenizer.from_buffer(content)
    _check_growth(loaded, what)
    return loaded


#: Appended to a sentencepiece model (a protocol buffer, whose last values win): its normalizer_spec
#: (field 3) with add_dummy_prefix (3) and remove_extra_whitespaces (4) false.
_NO_PREFIX = bytes([3 << 3 | 2, 4, 3 << 3, 0, 4 << 3, 0])


def load_sentencepiece(path: str, continued: bool = False) -> tuple[Any, str]:
    """Load the ``SentencePieceProcessor`` of a ``.model`` file; return it and its SHA-256.

    Args:
        continued: neither put a space before a text nor remove spaces.
    """
    what = f"Tokenizer file {path!r}"
    library = optional_module("sentencepiece", what, "sentencepiece", "sentencepiece")
    try:
        content = read_data(path, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"{what} does not exist; check the path.") from error
    with errors_of_library(f"{what} is not a sentencepiece model"):
        model = content + _NO_PREFIX if continued else content
        loaded = library.SentencePieceProcessor(model_proto=model)
    if not content:  # the library accepts this as an absent model
        raise ConfigError(f"{what} is empty; use a different one.")
    return loaded, sha256(content)


def reject_tiktoken(name: str) -> None:
    """Raise ConfigError for a tiktoken tokenizer, with the command that converts it."""
    path = Path(name)
    if path.is_file() and path.suffix in (".tiktoken", ".model") and _is_tiktoken(path):
        raise ConfigError(
            f"Tokenizer file {name!r}: is a tiktoken file. Convert it once, with the special "
            "tokens of its model in order and pattern=... if that is not GPT-4's: pip install "
            'tiktoken transformers; python -c "from transformers.convert_slow_tokenizer import '
            f"TikTokenConverter as C; C({name!r}, extra_special_tokens=['<|endoftext|>'])"
            ".converted().save('tokenizer.json')\"; then give tokenizer.json."
        )
    if _TIKTOKEN_NAMES.fullmatch(name) and not path.exists():
        raise ConfigError(
            f"Tokenizer {name}: is a tiktoken encoding. Convert it once: pip install tiktoken "
            'blobfile transformers; python -c "from transformers.integrations.tiktoken import '
            f"convert_tiktoken_to_fast as c; c('{name}', '{name}')\"; "
            f"then give {name}/tokenizer.json."
        )


def _is_tiktoken(path: Path) -> bool:
    with open_data(path) as file:
        return _TIKTOKEN_LINE.fullmatch(file.readline(2**10)) is not None


def special_tokens_next_to(path: Path) -> dict[str, str | None]:
    """Return the special tokens in the ``tokenizer_config.json`` next to a tokenizer file."""
    try:
        # As transformers writes it, with a model_max_length of 10^30.
        config = json.loads(read_data(path.with_name("tokenizer_config.json"), MAX_FILE_BYTES))
        tokens = {role: config.get(f"{role}_token") for role in ("bos", "eos", "pad")}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    texts = {r: t.get("content") if isinstance(t, dict) else t for r, t in tokens.items()}
    return texts if texts["eos"] is not None else {}


@contextlib.contextmanager
def errors_of_library(what: str, advice: str = "Use a different one.") -> Iterator[None]:
    """Turn all errors of a library into ConfigErrors."""
    try:
        yield
    except BaseException as error:  # a panic in Rust code is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what} ({first_line(error):.500}). {advice}") from error


def _check_ids(content: bytes, what: str) -> None:
    """Raise ConfigError if a ``tokenizer.json`` has ids that no model has embeddings for."""
    if not _MAYBE_LARGER.search(content):
        return
    try:
        vocabulary = json.loads(content)["model"]["vocab"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # the library reports the error
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    largest = max((each for each in ids if isinstance(each, int)), default=0)
    if largest >= MAX_IDS:
        raise ConfigError(
            f"{what}: has the token id {largest!s:.20}; ids are below {MAX_IDS:,}. Use a different "
            f"one."
        )


def _check_growth(tokenizer: Any, what: str) -> None:
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if part is not None and _growth(json.loads(part.__getstate__())) > MAX_GROWTH:
            raise ConfigError(
                f"{what}: expands one character to more than {MAX_GROWTH}, so a text could fill "
                f"the memory. Use a different one."
            )


def _growth(part: dict[str, Any]) -> int:
    """Return the maximum number of characters into which a step of a tokenizer expands one."""
    kind, content = part.get("type"), str(part.get("content", part.get("prepend", "")))
    if kind == "Sequence":
        inner = next(value for value in part.values() if isinstance(value, list))
        return math.prod(map(_growth, inner))
    if kind == "Replace":
        (dialect, pattern), may_be_empty = next(iter(part["pattern"].items())), True
        if dialect == "String":
            return -(-len(content) // len(pattern)) or 1 if pattern else len(content) + 1
        with contextlib.suppress(re.error):  # the pattern may not be valid in Python
            may_be_empty = re.match(pattern, "") is not None
        return (len(content) or 1) + may_be_empty
    return {"Prepend": len(content) + 1, "ByteLevel": 2, "Precompiled": 2}.get(str(kind), 1)
