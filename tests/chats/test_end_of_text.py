# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A text that has the end-of-text token at its end gets no second one, as in TRL."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from energon_ext import PackedTaskEncoder, PreferenceTaskEncoder
from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.chats.templates import HFChatTemplate, PlainChatTemplate
from energon_ext.encoders.preferences import cook_preference
from energon_ext.tokenizers.tokenizers import HFTokenizer
from tests.chats.conversations import answer, user
from tests.chats.tokenizers import byte_bpe

ENDED = "answers ended with the end-of-text token, since nothing else ends them"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(params=[True, False], ids=["tokenizer adds an end", "tokenizer adds none"])
def tokenizer(request, folder):
    return HFTokenizer(folder, add_eos=request.param)


def ends(tokens, eos):
    """Return how many end-of-text tokens are at the end."""
    others = np.flatnonzero(tokens != eos)
    return len(tokens) - 1 - others[-1] if len(others) else len(tokens)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The boats</s>", 1), ("The boats", 1), ("</s>", 1), ("", 1), ("The boats</s></s>", 2)]
    + [("The boats</s>\n", 1), ("</s>The boats", 1)],
)
@pytest.mark.parametrize("bos", [None, "<s>", "</s>"])
def test_a_document_is_ended_once(text, expected, bos, folder):
    tokenizer = HFTokenizer(folder, bos_token=bos, add_bos=bos is not None)
    tokens = tokenizer.encode(text)
    head = [tokenizer.bos_id] if bos else []
    assert tokens[: len(head)] == head
    assert ends(np.array(tokens[len(head) :]), tokenizer.eos_id) == expected
    assert tokenizer.encode_bare([text])[0].tolist() == tokenizer._tokenizer.encode(text).ids
    assert PackedTaskEncoder(tokenizer, 16).tokenizer.encode_batch([text])[0].tolist() == tokens


def encode(tokenizer, record, template=None, **options):
    encoder = ConversationEncoder(tokenizer, template or PlainChatTemplate(), **options)
    (found,) = encoder.encode([read_conversation(record)])
    return found


@pytest.mark.parametrize("response", [" in the harbour</s>", " in the harbour"])
def test_a_response_is_ended_once_and_its_end_is_trained(response, tokenizer):
    found = encode(tokenizer, {"prompt": "The boats", "response": response})
    ((tokens, weights),) = found.samples
    assert ends(tokens, tokenizer.eos_id) == 1
    assert weights[-1] == 1
    is_added = not response.endswith("</s>") and not tokenizer.add_eos
    assert found.notes[ENDED] == int(is_added)


def test_an_end_of_the_prompt_is_not_that_of_an_empty_response(tokenizer):
    found = encode(tokenizer, {"prompt": "The</s>", "response": ""})
    assert found.notes["answers without content, of which only the end is trained"] == 1
    ((tokens, weights),) = found.samples
    assert (ends(tokens, tokenizer.eos_id), weights[-2:].tolist()) == (2, [0, 1])


@pytest.mark.parametrize(("response", "count"), [("The boats left.", 1), ("They left.", 0)])
def test_a_response_that_repeats_its_prompt_is_counted(response, count, tokenizer):
    found = encode(tokenizer, {"prompt": "The boats", "response": response})
    note = "responses that begin with their prompt, which the text has twice"
    assert found.notes[note] == count


def test_an_answer_that_its_template_does_not_end_is_ended_once(folder, tokenizer):
    template = HFChatTemplate(folder, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    for content in ("Seven.", "Seven.</s>"):
        found = encode(tokenizer, {"messages": [user("Sum?"), answer(content)]}, template)
        ((tokens, weights),) = found.samples
        assert (ends(tokens, tokenizer.eos_id), weights[-1]) == (1, 1)
        assert found.notes[ENDED] == int(content == "Seven.")


@pytest.mark.parametrize("record", [{"prompt": "The boats"}, {}])
def test_both_answers_of_a_pair_are_ended_once(record, tokenizer):
    encoder = PreferenceTaskEncoder(tokenizer, 256)
    begin = "" if record else "The boats"
    answers = {"chosen": f"{begin} stayed</s>", "rejected": f"{begin} in the harbour"}
    identity = {"__key__": "7", "__restore_key__": ("Webdataset", 7), "__subflavors__": None}
    pair = encoder.encode_sample(cook_preference({**identity, **record, **answers}))
    assert [ends(tokens, tokenizer.eos_id) for tokens in pair.tokens] == [1, 1]
    assert [weights[-1] for weights in pair.weights] == [1, -1]


def test_without_ends_nothing_is_added(folder):
    tokenizer = HFTokenizer(folder, add_eos=False)
    record = {"prompt": "The boats", "response": " stayed"}
    ((tokens, _),) = encode(tokenizer, record, answer_end="allow").samples
    assert ends(tokens, tokenizer.eos_id) == 0
