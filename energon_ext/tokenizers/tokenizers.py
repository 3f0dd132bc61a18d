# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tokenizers by name: bytes, those of the Hugging Face libraries, and sentencepiece."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError, log_of
from energon_ext.keyed import sha256
from energon_ext.tokenizers.byte_tokenizer import ByteTokenizer
from energon_ext.tokenizers.files import (
    load_backend,
    load_sentencepiece,
    load_tokenizer_file,
    reject_tiktoken,
    special_tokens_next_to,
    without_prefix,
)
from energon_ext.tokenizers.library_tokenizer import LibraryTokenizer
from energon_ext.tokenizers.protocol import Tokenizer

logger = log_of(__name__)

#: Names of the bos token in well-known tokenizers.
BEGIN_OF_TEXT = (
    *("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>"),
    "<｜begin▁of▁sentence｜>",
)

#: Names of the end-of-text token in well-known tokenizers.
END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)


class HFTokenizer(LibraryTokenizer):
    """A tokenizer of the Hugging Face libraries.

    Args:
        name_or_path: a ``tokenizer.json`` file (library ``tokenizers``), or a folder or model name
            (library ``transformers``).
        add_bos, add_eos: add the special tokens to every text. None for bos: if ``bos_token`` names
            one, else as the tokenizer does itself (Llama, Gemma and Mistral begin a text with it).
        bos_token, eos_token, pad_token: names of the special tokens; they override those in the
            file. ``none`` for no bos token.

    Raises:
        ConfigError: the library is missing, the file is not a tokenizer, or a requested special
            token is not in the vocabulary.
    """

    _kind = "hf"

    def _load(self, guess_eos: bool) -> None:
        self._tokenizer, self._defaults = _load_hf(self.name, guess_eos)
        # A file may contain settings of the last call before it was saved.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._sha256 = sha256(self._tokenizer.to_str())
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # not the count: ids may have gaps

    def _own_bos(self) -> str | None:
        encode, declared = self._tokenizer.encode, self._defaults.get("bos")
        whole, bare = (encode("a", add_special_tokens=each).tokens[:1] for each in (True, False))
        names = BEGIN_OF_TEXT if declared is None else (declared,)
        return whole[0] if whole != bare and whole[0] in names else None

    def _id_of(self, role: str, token: str | None) -> int | None:
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None

    def _encode(self, texts: list[str], continued: bool) -> list[list[int]]:
        tokenizer = self._continuing if continued else self._tokenizer
        # The fast method omits the tokens' offsets in the text, which take a fifth of the time.
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @functools.cached_property
    def _continuing(self) -> Any:
        """The tokenizer without the space that it puts before a text."""
        return without_prefix(self._tokenizer)

    def added_tokens(self) -> Mapping[str, int]:
        # Others are searched in the normalized text, only between spaces, or they are found by the
        # model as well.
        return {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content and token.special and not token.normalized and not token.single_word
        }

    def decode(self, tokens: Any) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def show(self, tokens: Any) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


class SentencePieceTokenizer(LibraryTokenizer):
    """A ``.model`` file of the library ``sentencepiece``.

    Args, Raises: see :class:`HFTokenizer`; special tokens are those of the model unless named, and
    named ones must be pieces of it.
    """

    _kind = "sentencepiece"

    def _load(self, guess_eos: bool) -> None:
        self._model, self._sha256 = load_sentencepiece(self.name)
        self.vocab_size = self._model.get_piece_size()

    @functools.cached_property
    def _continuing(self) -> Any:
        """The model without the space that it puts before a text."""
        return load_sentencepiece(self.name, continued=True)[0]

    def _id_of(self, role: str, token: str | None) -> int | None:
        if token is None:
            token_id = getattr(self._model, f"{role}_id")()
            return token_id if token_id >= 0 else None
        token_id = self._model.piece_to_id(token)  # the id of the unknown piece if not found
        return token_id if self._model.id_to_piece(token_id) == token else None

    def _encode(self, texts: list[str], continued: bool) -> list[list[int]]:
        return (self._continuing if continued else self._model).encode(texts, out_type=int)

    def encode_bare(self, texts: Sequence[str], *, continued: bool = False) -> list[np.ndarray]:
        """Like the base class, with the control pieces that chat templates write (``</s>``).

        The library makes ordinary text of their names, which is right for documents only.
        """
        parts = [self._controls.split(text) for text in texts]  # every second one is a name
        begins = [part[0] for part in parts]
        firsts = self._encode_plain(begins, True) if continued else self._encode_parts(begins)
        others = iter(self._encode_parts([text for part in parts for text in part[2::2]]))
        ids = self.added_tokens()
        return [
            np.concatenate(
                [first, *(a for name in part[1::2] for a in ([ids[name]], next(others)))]
            )
            for first, part in zip(firsts, parts)
        ]

    def _encode_parts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode parts of a text; one that begins with a space gets no further one in front."""
        if not self._adds_space:
            return self._encode_plain(texts)
        (space,) = self._encode_plain([" "], continued=True)
        encoded = self._encode_plain(
            [text[1:] if text[:1] in (" ", "▁") else text for text in texts]
        )
        return [space if text in (" ", "▁") else ids for text, ids in zip(texts, encoded)]

    @functools.cached_property
    def _adds_space(self) -> bool:
        """True if the model puts a space in front of a text, even if it begins with one."""
        ids, spaced = self._encode(["a", " a"], False)
        return ids != spaced and self._model.id_to_piece(ids[0]).startswith("▁")

    def added_tokens(self) -> Mapping[str, int]:
        return self._control_ids

    @functools.cached_property
    def _control_ids(self) -> dict[str, int]:
        numbers = filter(self._model.is_control, range(self.vocab_size))
        return {self._model.id_to_piece(number): number for number in numbers}

    @functools.cached_property
    def _controls(self) -> re.Pattern[str]:
        names = sorted(self._control_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(\Z\A.)")

    def decode(self, tokens: Any) -> str:
        ids = (int(token) for token in tokens)
        special = (self.bos_id, self.eos_id)
        return self._model.decode([i for i in ids if 0 <= i < self.vocab_size and i not in special])

    def show(self, tokens: Any) -> str:
        is_control = self._model.is_control
        runs = itertools.groupby(map(int, tokens), key=lambda i: is_control(i) and i)
        pieces = (
            [self._model.decode([*ids])] if name is False else map(self._model.id_to_piece, ids)
            for name, ids in runs
        )
        return "".join(itertools.chain.from_iterable(pieces))


def load_tokenizer(
    name_or_path: str | Path,
    *,
    eos_token: str | None = None,
    bos_token: str | None = None,
    **options: Any,
) -> Tokenizer:
    """Load a tokenizer by the name used on command lines.

    Args:
        name_or_path: ``bytes``, a ``tokenizer.json`` or a sentencepiece ``.model`` file, a folder,
            or a Hugging Face name.
        eos_token: ends every text; by default the tokenizer's own. For a bare ``tokenizer.json``
            that is the one in the ``tokenizer_config.json`` next to it, or the first of
            :data:`END_OF_TEXT` in its vocabulary.
        bos_token: begins every text; by default the tokenizer's own, if it begins texts with it.
            ``none`` for none.
        **options: passed on to the tokenizer's class.

    Example:
        >>> load_tokenizer("bytes").vocab_size
        260
    """
    if str(name_or_path) == "bytes":
        if eos_token is not None or bos_token is not None:
            raise ConfigError(
                f"Tokenizer bytes: has its own bos and eos tokens; remove "
                f"{bos_token or eos_token!r}."
            )
        return ByteTokenizer(**options)
    reject_tiktoken(str(name_or_path))
    is_sentencepiece = str(name_or_path).endswith(".model")
    tokenizer_class = SentencePieceTokenizer if is_sentencepiece else HFTokenizer
    return tokenizer_class(name_or_path, eos_token=eos_token, bos_token=bos_token, **options)


def _load_hf(name: str, guess_eos: bool) -> tuple[Any, dict[str, str | None]]:
    """Load a ``tokenizers.Tokenizer`` and the names of its special tokens."""
    if Path(name).is_file():
        tokenizer = load_tokenizer_file(name)
        special = special_tokens_next_to(Path(name))
        if guess_eos and not special:
            special = {"eos": _guess_eos(tokenizer, name)}
        return tokenizer, special
    if name.endswith(".json"):  # a missing file, not a model on the hub
        raise ConfigError(f"Tokenizer file {name!r} does not exist; check the path.")
    loaded, backend = load_backend(name, f"Tokenizer {name!r}, not `bytes` and not a file")
    return backend, {"bos": loaded.bos_token, "eos": loaded.eos_token, "pad": loaded.pad_token}


def _guess_eos(tokenizer: Any, name: str) -> str | None:
    """Find the end-of-text token by its usual names, since a bare file does not declare it."""
    token = next((t for t in END_OF_TEXT if tokenizer.token_to_id(t) is not None), None)
    if token is not None:
        logger.warning("%s: %s ends every text; --eos-token selects another.", name, token)
    return token
