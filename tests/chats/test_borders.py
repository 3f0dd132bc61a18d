# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The borders of answers in tokens: the linear rule equals the one by whole prefixes."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.chats.tokenization import AddedTokens, AnsweredText, Span, tokenize_answers
from energon_ext.tokenizers.tokenizers import HFTokenizer
from tests.chats.conversations import CONVERSATIONS
from tests.chats.reference import in_other_form, weigh
from tests.chats.refusals import TEMPLATES
from tests.chats.tokenizers import CHAT_TOKENS, FAST, MODELS, PLAIN_TOKENS, SLOW

KINDS = [*FAST, "bytes", *(pytest.param(k, marks=pytest.mark.nightly) for k in [*SLOW, *MODELS])]
PIECES = [
    *(
        "The boats",
        " stayed",
        " in the harbour",
        ".\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        "four",
        " four ",
        "tide",
    ),
    *(
        " tide",
        "é",
        "e",
        "\u0301",
        "🙂",
        "日本",
        "ﬁ",
        "Ⅷ",
        "1",
        "23",
        "'s",
        "",
        "x",
        "<",
        "|",
        "</s>",
        "<s>",
    ),
    *("<|im_end|>", "<|im_", "THE", "▁", "▁the", "[INST", "]"),
]


def tokenize(tokenizer, *texts):
    return tokenize_answers(tokenizer, AddedTokens(tokenizer), texts)


def random_text(draw):
    """Return pieces of text, every second of which may be an answer."""
    choices = [*PIECES, *CHAT_TOKENS[:6], *PLAIN_TOKENS]
    text, spans = "", []
    for _ in range(draw.randrange(1, 6)):
        text += "".join(draw.choices(choices, k=draw.randrange(4)))
        begin = len(text)
        text += "".join(draw.choices(choices, k=draw.randrange(4)))
        spans.append((begin, len(text), draw.choice([0.5, 1.0])))
    return text + "".join(draw.choices(choices, k=draw.randrange(3))), spans


@pytest.mark.parametrize("kind", KINDS)
def test_random_borders_hold_where_whole_prefixes_hold(kind, tokenized):
    tokenizer, draw, held = tokenized(kind), random.Random(7), 0
    texts = [random_text(draw) for _ in range(400)]
    answered = [AnsweredText(text, [Span(*place) for place in spans]) for text, spans in texts]
    for (text, spans), found in zip(texts, tokenize(tokenizer.ours, *answered)):
        model = weigh(tokenizer.tokenize, text, spans)
        assert (model is None) == (found.cuts > 0), text
        if model is not None:
            held += 1
            assert (found.tokens.tolist(), found.weights.tolist()) == model, text
        elif tokenizer.is_faithful:
            tokenizer.check_read(found.tokens, text)
    assert held > 40


@pytest.mark.parametrize("kind", KINDS)
def test_texts_tokenized_together_or_alone_are_equal(kind, tokenized):
    tokenizer, draw = tokenized(kind).ours, random.Random(8)
    texts = [random_text(draw) for _ in range(30)]
    answered = [AnsweredText(text, [Span(*place) for place in spans]) for text, spans in texts]
    for text, together in zip(answered, tokenize(tokenizer, *answered)):
        (alone,) = tokenize(tokenizer, text)
        assert alone.tokens.tolist() == together.tokens.tolist()
        assert alone.weights.tolist() == together.weights.tolist()


@pytest.mark.parametrize("kind", ["Metaspace, always", "Metaspace, first", "Prepend"])
def test_a_cut_word_continues_without_a_space(kind, tokenized):
    tokenizer = tokenized(kind)
    text = "the harbour"
    (found,) = tokenize(tokenizer.ours, AnsweredText(text, [Span(7, 11, 1.0)]))
    assert found.cuts == 1
    assert tokenizer.theirs.convert_ids_to_tokens(tokenizer.tokenize(text)) == ["▁the", "▁harbour"]
    shown = tokenizer.theirs.convert_ids_to_tokens(found.tokens.tolist())
    assert "".join(shown) == "▁the▁harbour"
    trained = [token for token, weight in zip(shown, found.weights) if weight]
    assert "".join(trained) == "bour"


def test_only_the_piece_around_a_cut_border_changes(tokenized):
    tokenizer = tokenized("byte BPE")
    start, text, stop = "the tide<|im_start|>", "harbour", "<|im_end|>the tide"
    begin = len(start) + 2
    whole = AnsweredText(start + text + stop, [Span(begin, begin + 5, 1.0)])
    (found,) = tokenize(tokenizer.ours, whole)
    parts = [tokenizer.tokenize(part) for part in (start, "ha", "rbour", stop)]
    assert found.tokens.tolist() == sum(parts, [])
    assert found.weights.tolist() == [
        float(number == 2) for number, part in enumerate(parts) for _ in part
    ]
    assert found.cuts == 1


def test_spaces_that_are_an_added_token_and_a_merge_leave_the_work_linear(tmp_path):
    """As in Gemma: ▁▁ is an added token, but two spaces become it by merges."""
    letters = ["</s>", "▁▁", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.BPE({each: n for n, each in enumerate(letters)}, [("▁", "▁")]))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("▁▁", normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFTokenizer(tmp_path / "tokenizer.json", eos_token="</s>")
    text = "<|im_start|>the  tide<|im_end|>the<|im_start|>"
    (tokens,) = tokenizer.encode_bare([text])
    assert made.token_to_id("▁▁") in tokens
    places = AddedTokens(tokenizer).places(text, tokens)
    assert [place for place, _ in places] == [0, 21, 34]
    assert [tokens[number] for _, number in places] == [
        made.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>")
    ]


@pytest.mark.parametrize("kind", ["byte BPE", "Metaspace, first", "lower case"])
@pytest.mark.parametrize("name", ["tags at the prompt's end", "tags around rewritten answers"])
def test_weights_equal_the_mask_of_transformers_where_tags_begin_at_the_prompt(
    name, kind, tokenized
):
    tokenizer, compared = tokenized(kind), 0
    encoder = ConversationEncoder(tokenizer.ours, tokenizer.template(TEMPLATES[name]))
    for conversation, record in CONVERSATIONS.items():
        if any("weight" in message for message in record["messages"]):
            continue
        (found,) = encoder.encode([read_conversation(record)])
        if isinstance(found, Exception) or any("cut there" in note for note in found.notes):
            continue
        messages = in_other_form(record, found.notes)["messages"]
        theirs = tokenizer.theirs.apply_chat_template(
            [{**m, "content": _text(m["content"])} for m in messages],
            chat_template=TEMPLATES[name],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ((tokens, weights),) = found.samples
        assert tokens.tolist() == theirs["input_ids"], conversation
        assert np.asarray(weights > 0).tolist() == [m > 0 for m in theirs["assistant_masks"]]
        compared += 1
    assert compared >= 9


def _text(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
