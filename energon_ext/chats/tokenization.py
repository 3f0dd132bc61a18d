# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text with answers to tokens with weights.

A text is tokenized as one text, so it decodes to what was rendered. The tokens before each answer
must be those of the text before it, because that is what an inference server tokenizes. With T(x)
for the tokens of x, a border b therefore holds if T(text[:b]) begins T(text).

Special tokens (such as ``<|im_start|>``) are found before anything else, and what is between them
is tokenized independently. So it is enough to compare T(text[s:b]) with the tokens from s on, where
s is the start of the last special token before b: the work is linear in the text. Where a token
would cross the border, the piece around it alone is cut there, and what follows the border is
tokenized as a continuation, without the space that some tokenizers put before a text. Later prompts
then differ from the server's at that border only; cuts are counted.

Where only the text is given, and its border is just a guess (:attr:`AnsweredText.keeps_tokens`),
nothing is cut: the answer begins with the first token of T(text) that T(text[:b]) does not have.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from energon_ext.tokenizers.protocol import Tokenizer


@dataclass(frozen=True)
class Span:
    """Characters ``[start, stop)`` of a text that are trained with a weight."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True)
class AnsweredText:
    """A text with the answers in it, in order and without overlaps.

    Attributes:
        keeps_tokens: no token is cut; an answer may begin earlier instead.
    """

    text: str
    answers: Sequence[Span]
    keeps_tokens: bool = False


@dataclass(frozen=True)
class AnsweredTokens:
    """The tokens of a text.

    Attributes:
        tokens: int64 [n].
        weights: float32 [n], of the loss on each token; 0 outside answers.
        cuts: borders at which the text had to be cut.
    """

    tokens: np.ndarray
    weights: np.ndarray
    cuts: int


@dataclass(frozen=True)
class _Piece:
    """The text from one added token to the next: its characters, tokens, and borders within."""

    start: int
    stop: int
    first_token: int
    stop_token: int
    borders: list[int]  # characters in (start, stop]


def tokenize_answers(
    tokenizer: Tokenizer, added: "AddedTokens", texts: Sequence[AnsweredText]
) -> list[AnsweredTokens]:
    """Tokenize texts together, and weight the tokens of their answers.

    Args:
        added: those of the tokenizer.
    """
    whole = tokenizer.encode_bare([text.text for text in texts])
    pieces = [_pieces_at_borders(added, text, ids) for text, ids in zip(texts, whole)]
    beginnings = [
        text.text[piece.start : border]
        for text, found in zip(texts, pieces)
        for piece in found
        for border in piece.borders
    ]
    encoded = iter(tokenizer.encode_bare(beginnings) if beginnings else ())
    return [
        _weigh(tokenizer, text, ids, [(p, [next(encoded) for _ in p.borders]) for p in found])
        for text, ids, found in zip(texts, whole, pieces)
    ]


class AddedTokens:
    """Finds the added tokens of a tokenizer in texts."""

    def __init__(self, tokenizer: Tokenizer):
        self._ids = dict(tokenizer.added_tokens())
        self._is_added = np.zeros(tokenizer.vocab_size, bool)
        self._is_added[list(self._ids.values())] = True
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def places(self, text: str, ids: np.ndarray) -> list[tuple[int, int]]:
        """Return the (character, token) at which each added token begins, after (0, 0).

        If the tokenizer has found others than the pattern does (added tokens may depend on what is
        around them), only the beginning of the text is returned, which is always right.
        """
        start = [(0, 0)]
        if not self._ids:
            return start
        found = [(match.start(), self._ids[match[0]]) for match in self._pattern.finditer(text)]
        tokens = np.flatnonzero(self._is_added[ids])
        if ids[tokens].tolist() != [number for _, number in found]:
            return start
        places = [(place, int(token)) for (place, _), token in zip(found, tokens)]
        return places if places[:1] == start else start + places


def _pieces_at_borders(added: AddedTokens, text: AnsweredText, ids: np.ndarray) -> list[_Piece]:
    """Return the pieces that contain the begin or the end of an answer."""
    borders = sorted({place for span in text.answers for place in (span.start, span.stop)} - {0})
    if not borders:
        return []
    # The text up to a border that may be anywhere, even in an added token, is compared as a whole.
    places = [(0, 0)] if text.keeps_tokens else added.places(text.text, ids)
    ends = [*places[1:], (len(text.text), len(ids))]
    pieces, number = [], 0
    for (start, first), (stop, last) in zip(places, ends):
        inside = []
        while number < len(borders) and borders[number] <= stop:
            inside.append(borders[number])
            number += 1
        if inside:
            pieces.append(_Piece(start, stop, first, last, inside))
    return pieces


def _weigh(
    tokenizer: Tokenizer,
    text: AnsweredText,
    ids: np.ndarray,
    pieces: Sequence[tuple[_Piece, Sequence[np.ndarray]]],
) -> AnsweredTokens:
    """Find the token of each border, and give the tokens of answers their weights."""
    token_at, parts, done, shift, cuts = {0: 0}, [], 0, 0, 0
    for piece, beginnings in pieces:
        whole = ids[piece.first_token : piece.stop_token]
        if text.keeps_tokens:
            new, marks = whole, [_count_common(whole, beginning) for beginning in beginnings]
        elif not all(_begins(whole, beginning) for beginning in beginnings):
            parts += [ids[done : piece.first_token]]
            new, marks, found = _cut(tokenizer, text.text, piece, whole)
            parts.append(new)
            done, cuts = piece.stop_token, cuts + found
        else:
            new, marks = whole, [len(beginning) for beginning in beginnings]
        first = piece.first_token + shift
        token_at.update({border: first + mark for border, mark in zip(piece.borders, marks)})
        shift += len(new) - len(whole)
    tokens = np.concatenate([*parts, ids[done:]]) if parts else ids
    weights = np.zeros(len(tokens), np.float32)
    for span in text.answers:
        weights[token_at[span.start] : token_at[span.stop]] = span.weight
    return AnsweredTokens(tokens, weights, cuts)


def _cut(
    tokenizer: Tokenizer, text: str, piece: _Piece, whole: np.ndarray
) -> tuple[np.ndarray, list[int], int]:
    """Cut a piece at each border that a token crosses.

    Returns:
        Its tokens, the number of tokens before each border, and the number of cuts.
    """
    finished: list[np.ndarray] = []
    base, rest, count, cuts = piece.start, whole, 0, 0
    marks = []
    for border in piece.borders:
        (before,) = tokenizer.encode_bare([text[base:border]], continued=cuts > 0)
        if not _begins(rest, before):
            finished.append(before)
            count, base, cuts = count + len(before), border, cuts + 1
            (rest,) = tokenizer.encode_bare([text[border : piece.stop]], continued=True)
            before = before[:0]
        marks.append(count + len(before))
    return np.concatenate([*finished, rest]), marks, cuts


def _begins(tokens: np.ndarray, beginning: np.ndarray) -> bool:
    return len(beginning) <= len(tokens) and bool((tokens[: len(beginning)] == beginning).all())


def _count_common(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return how many tokens two texts begin with in common."""
    count = min(len(tokens), len(others))
    differing = np.flatnonzero(tokens[:count] != others[:count])
    return int(differing[0]) if len(differing) else count
