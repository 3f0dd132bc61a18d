# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A prompt for sampling is the beginning of the sample that trains its answer."""

import pytest

from energon_ext import PromptTaskEncoder
from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.encoders.prompts import cook_prompt
from tests.chats.conversations import CONVERSATIONS
from tests.chats.reference import Reference, in_other_form
from tests.chats.refusals import TEMPLATES, reasons_to_refuse
from tests.chats.tokenized import SPECIAL_TOKENS, forms_of, reference

IDENTITY = {"__key__": "chats/7", "__restore_key__": (), "__subflavors__": None}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_of_each_answer_is_what_transformers_and_a_server_make(name, tokenized):
    """Compare three ways to the same tokens; ``transformers`` gets the record."""
    tokenizer = tokenized("Metaspace, first")
    template = tokenizer.template(TEMPLATES[name])
    samples = ConversationEncoder(tokenizer.ours, template)
    prompts = PromptTaskEncoder(tokenizer.ours, chat_template=template)
    for conversation, record in CONVERSATIONS.items():
        expected = reference(name, conversation)
        if expected.text is None or reasons_to_refuse(name, conversation):
            continue
        (found,) = samples.encode([read_conversation(record)])
        is_exact = not any("cut there" in n or ", prompted with" in n for n in found.notes)
        other = in_other_form(record, found.notes)
        if other != record:
            expected = Reference(SPECIAL_TOKENS, TEMPLATES[name], other, forms_of(name))
        for number, index in enumerate(expected.answers):
            if expected.messages[index - 1]["role"] == "assistant":
                continue  # a prompt does not end with an answer
            asked = {**record, "messages": record["messages"][:index]}
            text = cook_prompt({**IDENTITY, "json": asked})
            tokens = prompts.encode_sample(text).tokens.tolist()
            theirs = tokenizer.theirs.apply_chat_template(
                expected.messages[:index],
                chat_template=expected.template,
                add_generation_prompt=True,
                return_dict=False,
                **expected.context,
            )
            assert tokens == theirs, conversation
            sample, _ = found.samples[number if len(found.samples) > 1 else 0]
            assert not is_exact or sample[: len(tokens)].tolist() == tokens, conversation
