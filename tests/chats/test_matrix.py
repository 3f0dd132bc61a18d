# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Templates, conversations and tokenizers: tokens equal those of ``transformers``, and weights
follow the documented rule.
"""

from collections import Counter

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.errors import SampleError
from tests.chats.conversations import CONVERSATIONS
from tests.chats.reference import Reference, in_other_form, weigh
from tests.chats.refusals import TEMPLATES, reasons_to_refuse
from tests.chats.tokenized import SPECIAL_TOKENS, forms_of, reference
from tests.chats.tokenizers import FAST, MODELS, SLOW

#: What was found, over all tests of this module.
FOUND: Counter = Counter()

#: Kinds of tokenizers that differ little from others of the fast suite.
RARE = ("lower case", "Metaspace, always")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(k, marks=[pytest.mark.nightly] * (k in RARE)) for k in FAST),
        "bytes",
        *(pytest.param(k, marks=pytest.mark.nightly) for k in [*SLOW, *MODELS]),
    ],
)
def test_tokens_are_those_of_transformers_and_weights_follow_the_rule(kind, name, tokenized):
    tokenizer = tokenized(kind)
    encoder = ConversationEncoder(tokenizer.ours, tokenizer.template(TEMPLATES[name]))
    for conversation, record in CONVERSATIONS.items():
        expected = reference(name, conversation)
        (found,) = encoder.encode([read_conversation(record)])
        if expected.text is None and isinstance(found, SampleError):
            continue
        reasons = reasons_to_refuse(name, conversation)
        if reasons:
            assert isinstance(found, SampleError), f"{conversation} is accepted"
            assert any(reason in str(found) for reason in reasons), (conversation, str(found))
            FOUND["refused"] += 1
            continue
        assert not isinstance(found, SampleError), (conversation, str(found))
        FOUND["accepted"] += 1
        other = in_other_form(record, found.notes)
        assert expected.text is not None or other != record, conversation
        if other != record:
            assert expected.text is None or is_unwritten(expected, record, other), conversation
            expected = Reference(SPECIAL_TOKENS, TEMPLATES[name], other, forms_of(name))
        check(tokenizer, expected, found, conversation)


def is_unwritten(expected, record, other):
    """Return whether a text lacks a field of a record that has another form."""
    values = [
        message["reasoning_content" if "reasoning_content" in message else "content"]
        for message, changed in zip(record["messages"], other["messages"])
        if message != changed
    ]
    return bool(values) and not any(value in expected.text for value in values)


def check(tokenizer, expected, found, what):
    """Compare samples with the reference."""
    cuts = sum(count for note, count in found.notes.items() if "cut there" in note)
    FOUND.update(borders_cut=cuts, answers=len(expected.answers))
    several = len(found.samples) > 1
    assert len(found.samples) in (1, len(expected.answers)), what
    is_disabled = any(", prompted with" in note for note in found.notes)
    for number, index in enumerate(expected.answers):
        tokens, weights = found.samples[number if several else 0]
        prompt = tokenizer.tokenize(expected.prompt(index))
        if tokens[: len(prompt)].tolist() != prompt:
            assert cuts or is_disabled, what
            FOUND["answers behind a cut border"] += bool(cuts)
        elif (
            len(prompt) < len(tokens)
            and not cuts
            and not is_disabled
            and expected.messages[index].get("content")
            and expected.messages[index - 1]["role"] != "assistant"  # its header is not trained
        ):
            assert weights[len(prompt)] == expected.weights[index], what
    if expected.is_unclear:
        return
    if expected.has_tags:
        check_tags(tokenizer, expected, found, cuts, what)
        return
    if is_disabled:
        return
    is_ended = any("end-of-text token" in note for note in found.notes)
    are_apart = any("since earlier answers have no end" in note for note in found.notes)
    spans = expected.spans(are_apart)
    if spans is None:
        return
    assert len(spans) == len(found.samples), what
    ended = [tokenizer.ours.eos_id] * is_ended
    for (text, places), (tokens, weights) in zip(spans, found.samples):
        model = weigh(tokenizer.tokenize, text, places)
        assert model is not None or cuts, what
        if model is not None and not cuts:
            assert tokens.tolist() == [*model[0], *ended], what
            assert weights.tolist() == [*model[1], *[places[-1][2]] * len(ended)], what
        if tokenizer.is_faithful:
            tokenizer.check_read(tokens.tolist(), text, tokenizer.ours.show(ended))


def check_tags(tokenizer, expected, found, cuts, what):
    """Compare a sample with the generation tags, if all begin where a prompt ends."""
    text, tags = expected.tags(expected.last + 1, return_assistant_tokens_mask=True)
    are_elsewhere = any("does not begin where" in note for note in found.notes)
    answers = [i for i, message in enumerate(expected.messages) if message["role"] == "assistant"]
    if are_elsewhere or cuts or len(found.samples) > 1 or expected.answers != answers:
        return
    if all(text.startswith(expected.prompt(index)) for index in answers):
        places = [(start, stop, 1.0) for start, stop in tags if start < stop]
        tokens, weights = weigh(tokenizer.tokenize, text, places)
        ((found_tokens, found_weights),) = found.samples
        assert found_tokens.tolist() == tokens, what
        assert (found_weights > 0).tolist() == [weight > 0 for weight in weights], what
        FOUND["compared with tags"] += 1
