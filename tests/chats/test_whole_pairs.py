# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pairs of whole texts have TRL's tokens and borders, whatever is where their answers begin."""

import itertools
import random

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from energon_ext import PreferenceTaskEncoder
from energon_ext.encoders.preferences import cook_preference
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import HFTokenizer
from tests.chats.tokenizers import byte_bpe, metaspace

IDENTITY = {"__key__": "pairs/7", "__restore_key__": ("Webdataset", 7), "__subflavors__": None}

#: Added tokens: with punctuation, spaces, flags, and one that begins another.
SPECIAL = [
    *("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|im", "[INST]", "[/INST]", "<end of turn>"),
    *(AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True)),
    *(AddedToken("<both>", lstrip=True, rstrip=True), AddedToken("<|one|>", single_word=True)),
]
PLAIN = ["<think>", AddedToken("<plain|>", normalized=False), AddedToken(" tide", normalized=True)]


def with_added(tokenizer):
    tokenizer.add_special_tokens(
        [AddedToken(each) if isinstance(each, str) else each for each in SPECIAL]
    )
    tokenizer.add_tokens(PLAIN)
    return tokenizer


KINDS = {
    "byte BPE": lambda: with_added(byte_bpe()),
    "byte BPE with a space before a text": lambda: with_added(byte_bpe(prefix=True)),
    "Metaspace": lambda: with_added(metaspace("first")),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=KINDS[request.param](), unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def common(first, second):
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def expect(theirs, chosen, rejected):
    """Return the tokens of both texts, and the number of those in the prompt, as TRL does."""
    place = common(chosen, rejected)
    place -= chosen[place - 1] == " "

    def ids(text):
        return theirs(text, add_special_tokens=False)["input_ids"]

    texts = [text if text.endswith("</s>") else f"{text}</s>" for text in (chosen, rejected)]
    tokens = [ids(text) for text in texts]
    return tokens, min(common(ids(chosen[:place]), each) for each in tokens)


def encode(encoder, chosen, rejected):
    sample = cook_preference({**IDENTITY, "chosen": chosen, "rejected": rejected})
    pair = encoder.encode_sample(sample)
    firsts = {int(np.flatnonzero(weights)[0]) for weights in pair.weights}
    assert [set(w[w != 0].tolist()) for w in pair.weights] == [{1.0}, {-1.0}]
    return [tokens.tolist() for tokens in pair.tokens], firsts, pair.notes


HEADS = ["<|im_start|>user<|im_sep|>Sum?<|im_end|>", "[INST] Is 91 prime? ", "Name a harbour"]
BEGINNINGS = [
    '"Seven" it is.',
    "Nine.",
    " Seven",
    "(7)",
    "|>7",
    "\n7",
    "  7",
    "is",
    "it",
    "",
    "</s>",
]
TOKENS = [each if isinstance(each, str) else each.content for each in [*SPECIAL, *PLAIN]]


def test_an_answer_after_any_token_begins_where_it_does_for_trl(tokenizer):
    theirs, encoder = AutoTokenizer.from_pretrained(tokenizer), make_encoder(tokenizer)
    heads, compared = itertools.cycle(HEADS), 0
    for token in [*TOKENS, "</s>", "", " ", "\n\n", "un"]:
        head = next(heads)
        for pair in itertools.combinations(BEGINNINGS, 2):
            texts = [f"{head}{token}{each}" for each in pair]
            if texts[1].startswith(texts[0]) or texts[0].startswith(texts[1]):
                continue
            tokens, place = expect(theirs, *texts)
            if tokens[0] == tokens[1]:
                continue  # a token that takes the space after it
            found, firsts, _ = encode(encoder, *texts)
            assert (found, firsts) == (tokens, {place}), texts
            compared += 1
    assert compared > 300


def make_encoder(folder):
    return PreferenceTaskEncoder(HFTokenizer(folder), 4096)


def test_random_texts_keep_their_tokens(tokenizer):
    rng = random.Random(0)
    theirs, encoder = AutoTokenizer.from_pretrained(tokenizer), make_encoder(tokenizer)
    pieces = [
        *TOKENS,
        *BEGINNINGS,
        " ",
        "  ",
        "The boats",
        " stayed",
        "<",
        "|",
        "<|",
        "im_",
        "é",
        "日",
    ]
    compared = 0
    for _ in range(150):
        head, *texts = ("".join(rng.choices(pieces, k=rng.randint(1, 6))) for _ in range(3))
        chosen, rejected = (f"Q: {head}{text}" for text in texts)
        if chosen.startswith(rejected) or rejected.startswith(chosen):
            continue
        tokens, place = expect(theirs, chosen, rejected)
        try:
            found, firsts, notes = encode(encoder, chosen, rejected)
        except SampleError as error:
            assert tokens[0] == tokens[1] or "has an empty answer" in str(error)
            continue
        compared += 1
        assert (found, firsts) == (tokens, {place}), (chosen, rejected)
        assert not any("cut there" in note for note in notes)
    assert compared > 100


def test_the_special_token_before_an_answer_is_not_torn(tokenizer):
    head = "<|im_start|>user<|im_sep|>Sum?<|im_end|><|im_start|>assistant<|im_sep|>"
    encoder = make_encoder(tokenizer)
    found, (first,), _ = encode(encoder, f'{head}"Seven" it is.', f"{head}Nine.")
    separator = encoder.tokenizer.added_tokens()["<|im_sep|>"]
    assert [tokens.count(separator) for tokens in found] == [2, 2]
    assert found[0][first - 1] == separator
    assert encoder.tokenizer.decode(found[0][first:]).strip() == '"Seven" it is.'
