# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One odd record does not stop a run."""

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.chats.templates import RESERVED, PlainChatTemplate
from energon_ext.errors import ConfigError, SampleError
from tests.chats.conversations import answer, call, user
from tests.chats.refusals import TEMPLATES
from tests.chats.test_answers import BYTES, template_of

GOOD = {"messages": [user("2 + 2"), answer("4")]}


def deep(levels):
    return '{"a": ' + "[" * levels + "]" * levels + "}"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [user("\ud800"), answer("4")]}, r"a lone surrogate \('\\ud800'\)"),
        (
            {"messages": [user("2"), answer("4", tool_calls=[call("f", deep(900))])]},
            "the chat template rejects it .RecursionError|has more than 100 lists and objects",
        ),
        ({**GOOD, "chat_template_kwargs": {"documents": "x"}}, "the chat template rejects it"),
        *(
            (
                {**GOOD, "chat_template_kwargs": {name: True}},
                f"chat_template_kwargs: {name} is not a variable of a template",
            )
            for name in sorted(RESERVED)
        ),
    ],
)
def test_a_record_that_cannot_be_written_is_refused_and_the_others_are_not(
    record, message, tokenized
):
    for tokenizer in (BYTES, tokenized("byte BPE").ours):
        encoder = ConversationEncoder(tokenizer, template_of(TEMPLATES["Hermes"]))
        first, second, third = encoder.encode(
            [read_conversation(each) for each in (GOOD, record, GOOD)]
        )
        assert isinstance(second, SampleError)
        with pytest.raises(SampleError, match=message):
            raise second
        assert first.samples[0][0].tolist() == third.samples[0][0].tolist()


def test_arguments_of_rendering_are_no_variables_of_a_template():
    with pytest.raises(ConfigError, match="chat_template_kwargs: continue_final_message is not a"):
        template_of(TEMPLATES["ChatML"], template_kwargs={"continue_final_message": True})


@pytest.mark.parametrize("name", ["answers", "answer_end"])
def test_unknown_options_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: 'none' found, one of"):
        ConversationEncoder(BYTES, PlainChatTemplate(), **{name: "none"})
