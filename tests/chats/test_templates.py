# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chat templates by name, date and tokenizer, and conversations that no template writes."""

import json
import shutil

import pytest

from energon_ext import ConfigError, PromptTaskEncoder, SFTTaskEncoder
from energon_ext.chats.records import Conversation
from energon_ext.chats.template_names import named_template
from energon_ext.chats.templates import ChatTemplate, HFChatTemplate, PlainChatTemplate
from energon_ext.encoders.prompts import PromptText
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer, HFTokenizer, load_tokenizer
from tests.test_sft import IDENTITY, TURNS, dialogue, messages_from


def test_the_chat_template_of_a_hugging_face_tokenizer_is_used(hf_folder):
    tokenizer = HFTokenizer(hf_folder)
    encoder = SFTTaskEncoder(tokenizer, 256)
    document = encoder.encode_document(dialogue(TURNS))
    assert isinstance(encoder.chat_template, HFChatTemplate)
    # The template writes its own special tokens: they become ids, and no others are added.
    starts, ends = (document.tokens == 1).sum(), (document.tokens == 2).sum()
    assert (starts, ends) == (5, 5)
    assert document.tokens[-1] != tokenizer.eos_id
    trained = document.tokens[document.label_weights > 0].tolist()
    one, two, newline = (tokenizer.encode(text)[0] for text in ("1", "2", "\n"))
    assert trained == [one, 2, newline, two, two, 2, newline]


def test_a_state_depends_on_the_chat_template(hf_folder):
    tokenizer = HFTokenizer(hf_folder)
    options = {}, {"chat_template": PlainChatTemplate()}, {"over_long": "error"}
    specs = [SFTTaskEncoder(tokenizer, 64, **each).task().spec([], 0) for each in options]
    assert len({json.dumps(spec.compared(), sort_keys=True) for spec in specs}) == 3


def test_sft_and_prompts_share_the_default_template(hf_folder):
    """A policy is prompted in the format it was trained on."""
    for tokenizer in (HFTokenizer(hf_folder), ByteTokenizer()):
        sft = SFTTaskEncoder(tokenizer, 64)
        prompts = PromptTaskEncoder(tokenizer)
        template = sft.state_fingerprint()["chat_template"]
        assert prompts.state_fingerprint()["chat_template"] == template
        prompt = prompts.encode_sample(
            PromptText(**IDENTITY, conversation=Conversation(TURNS[:2]), metadata={})
        )
        document = sft.encode_document(dialogue(TURNS[:3]))
        assert document.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
        assert not document.label_weights[: len(prompt.tokens)].any()
        assert document.label_weights[len(prompt.tokens)] == 1


def test_a_tokenizer_file_belongs_to_the_chat_template_in_its_folder(hf_folder, tmp_path):
    folder = template_of(HFTokenizer(hf_folder))
    file = template_of(load_tokenizer(f"{hf_folder}/tokenizer.json"))
    assert file.fingerprint() == folder.fingerprint() != PlainChatTemplate().fingerprint()
    alone = shutil.copy(f"{hf_folder}/tokenizer.json", tmp_path)
    assert isinstance(template_of(HFTokenizer(alone, add_eos=False)), PlainChatTemplate)


def template_of(tokenizer):
    return SFTTaskEncoder(tokenizer, 64).chat_template


def test_the_error_for_a_missing_template_says_what_to_pass(hf_folder, tmp_path):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(hf_folder)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="has no chat template; use one that has"):
        HFChatTemplate(tmp_path / "bare")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        HFChatTemplate(tmp_path)
    encoder = SFTTaskEncoder(HFTokenizer(tmp_path / "bare"), 64)
    assert isinstance(encoder.chat_template, PlainChatTemplate)


@pytest.mark.parametrize(
    "clock",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}",
    ],
)
def test_a_template_that_reads_the_clock_needs_a_fixed_date(clock, hf_folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    tokenizer.chat_template = clock + ": {{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "dated")
    name, bytes_ = str(tmp_path / "dated"), ByteTokenizer()
    with pytest.raises(ConfigError, match="writes today's date .strftime_now."):
        named_template(name, bytes_)
    first, second = (named_template(f"{name}@2026-0{month}-28", bytes_) for month in (1, 2))
    assert first.render([{"role": "user", "content": "hi"}]) == "28 Jan 2026: hi"
    assert first.fingerprint() != second.fingerprint()
    with pytest.raises(ConfigError, match="date: '2026-02-30' found"):
        named_template(f"{name}@2026-02-30", bytes_)


@pytest.mark.parametrize(
    "clock", ["{% set now = strftime_now %}{{ now('%d') }}", "strftime_now(f)"]
)
def test_a_clock_that_a_fixed_date_cannot_replace_is_refused(clock, hf_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    tokenizer.chat_template = clock
    with pytest.raises(ConfigError, match="writes today's date .* NAME@2026-01-31"):
        HFChatTemplate(tokenizer)
    with pytest.raises(ConfigError, match="cannot replace it here: write one into a copy"):
        HFChatTemplate(tokenizer, date="2026-01-31")


def test_a_template_that_rejects_or_rewrites_a_conversation_is_an_error(hf_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    encoder = SFTTaskEncoder(ByteTokenizer(), 64, chat_template=HFChatTemplate(tokenizer))
    with pytest.raises(
        SampleError, match="chats/7: the chat template rejects it .TemplateError: roles"
    ):
        encoder.encode_document(dialogue(TURNS))

    class CountsFirst(ChatTemplate):
        def render(self, messages, add_generation_prompt=False, **context):
            return f"{len(messages)} " + "".join(message["content"] for message in messages)

        def fingerprint(self):
            return {}

    encoder = SFTTaskEncoder(ByteTokenizer(), 64, chat_template=CountsFirst(), answers="all")
    with pytest.raises(SampleError, match="rewrites earlier text, so the answers are not in one"):
        encoder.encode_document(dialogue(TURNS))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "`messages` must be a list of messages"),
        ([], "`messages` must be a list of messages"),
        ([{"role": "user"}], "message 0 has no `content`; text is needed"),
        ([{"role": "user", "content": None}], "message 0 has no `content`"),
        ([{"role": "user", "content": 4}], "message 0 has a int as `content`"),
        (["hi"], "message 0 must be an object with `role` and `content`"),
        ([None], "message 0 must be an object with `role` and `content`"),
        (
            messages_from("user", "gpt"),
            "message 1 has role 'gpt'; system, developer, user, assistant, tool, function are",
        ),
        (messages_from("assistant", "user"), "message 0 answers no question"),
        (messages_from("system", "assistant"), "message 1 answers no question"),
        (messages_from("system", "user"), "no assistant message, so there is nothing to train on"),
    ],
)
def test_an_invalid_conversation_is_refused_with_the_reason(messages, message):
    encoder = SFTTaskEncoder(ByteTokenizer(), 64)
    with pytest.raises(SampleError, match=f"^Sample chats/7: {message}"):
        encoder.encode_document(dialogue(messages))


def test_a_template_that_cannot_be_parsed_is_one_line(hf_folder):
    with pytest.raises(ConfigError, match="Chat template of .*: Expected an expression"):
        HFChatTemplate(hf_folder, template="{% if %}")


def test_a_variable_that_the_template_does_not_read_is_refused(hf_folder):
    with pytest.raises(ConfigError, match="does not read 'enable_thinkin'; it reads enable_think"):
        HFChatTemplate(
            hf_folder,
            template="{{ messages[0].content }}{{ enable_thinking }}",
            template_kwargs={"enable_thinkin": False},
        )


def test_several_templates_without_a_default_need_a_choice(hf_folder):
    from transformers import AutoTokenizer

    several = AutoTokenizer.from_pretrained(hf_folder)
    several.chat_template = {"rag": "{{ messages }}", "tool_use": "{{ tools }}"}
    with pytest.raises(ConfigError, match="rag, tool_use, none of which is the default; choose"):
        HFChatTemplate(several)
