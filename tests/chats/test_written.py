# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""No field of a message disappears silently, whatever was asked before."""

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.chats.conversations import TOOLS, answer, call, result, user
from tests.chats.jinja import TAGGED_CALLS, template
from tests.chats.refusals import TEMPLATES
from tests.chats.test_answers import BYTES, template_of

ONE, OTHER = call("ring_bell", {"times": 1}), call("read_tide", {"harbour": "Oban"})
_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


def encode_all(name, *records):
    """Encode records one after the other with one encoder; return texts and reasons."""
    encoder = ConversationEncoder(BYTES, template_of(TEMPLATES.get(name, name)))
    found = [encoder.encode([read_conversation(record)])[0] for record in records]
    return [
        str(each) if isinstance(each, SampleError) else BYTES.decode(each.samples[-1][0])
        for each in found
    ]


def calling(*calls, **fields):
    return answer(fields.pop("content", ""), tool_calls=list(calls), **fields)


def record(*messages, **fields):
    return {"messages": [user("Go."), *messages], **fields}


NOT_WRITTEN = "the chat template does not write `{}` of role {}; use a template that does"


def test_a_second_call_is_asked_about_even_after_records_with_one():
    first, second, third = encode_all(
        "writes the first call only",
        record(calling(ONE)),
        record(calling(ONE, OTHER)),
        record(calling(ONE), result("rung"), calling(ONE, OTHER)),
    )
    assert '"times": 1' in first
    assert "message 1: " + NOT_WRITTEN.format("tool_calls", "assistant") in second
    assert "message 3: " + NOT_WRITTEN.format("tool_calls", "assistant") in third


def test_a_call_beside_a_text_is_asked_about_apart():
    """This template writes calls only in answers without a text."""
    answers = "{% if m.content %}" + _IM + "{% else %}" + TAGGED_CALLS + "<|im_end|>{% endif %}"
    text = template(_IM, answers, "", tool=_IM)
    alone, beside = encode_all(text, record(calling(ONE)), record(calling(ONE, content="Yes.")))
    assert "ring_bell" in alone
    assert NOT_WRITTEN.format("tool_calls", "assistant") in beside


def test_a_text_beside_a_call_is_asked_about_apart():
    alone, beside = encode_all(
        "Llama 3.1", record(answer("Yes.")), record(calling(ONE, content="I ring."))
    )
    assert "Yes." in alone
    assert NOT_WRITTEN.format("content", "assistant") in beside


def test_what_a_variable_switches_off_is_asked_about_again():
    text = template(
        _IM,
        "{% if show %}{{ m.reasoning_content }}{% endif %}{{ m.content }}<|im_end|>\n",
        "",
    )
    thinking = record(answer("Yes.", reasoning_content="Because."))
    shown, hidden = encode_all(
        text,
        {**thinking, "chat_template_kwargs": {"show": True}},
        {**thinking, "chat_template_kwargs": {"show": False}},
    )
    assert "Because.Yes." in shown
    assert NOT_WRITTEN.format("reasoning_content", "assistant") in hidden


def test_tools_that_are_written_only_beside_a_system_message_are_asked_about_again():
    rules = "{{ m.content }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}\n"
    text = template(_IM, _IM, "", system=rules)
    turns = [user("Go."), answer("Gone.")]
    system = {"role": "system", "content": "Rules."}
    written, lost = encode_all(
        text,
        {"messages": [system, *turns], "tools": TOOLS},
        {"messages": turns, "tools": TOOLS},
    )
    assert "read_tide" in written
    assert "does not write `tools`" in lost


def test_only_the_first_of_several_tools_is_not_enough():
    text = template(_IM, _IM, "", begin="{% if tools %}{{ tools[0] | tojson }}{% endif %}")
    one, two = encode_all(
        text, record(answer("Gone."), tools=TOOLS[:1]), record(answer("Gone."), tools=TOOLS)
    )
    assert "read_tide" in one
    assert "does not write `tools`" in two


def test_a_system_message_that_a_template_writes_into_a_question_is_written():
    turns = [{"role": "system", "content": "Be brief."}, user("Go."), answer("Gone.")]
    for name in ("Llama 2", "Mistral v0.3"):
        (text,) = encode_all(name, {"messages": turns})
        assert "Be brief." in text


def test_a_system_message_in_the_middle_may_disappear_where_the_first_does_not():
    late = [user("Go."), answer("Gone."), {"role": "system", "content": "Now stop."}]
    first = [{"role": "system", "content": "Go on."}, user("Go."), answer("Gone.")]
    name = "drops a system message that is not first"
    kept, lost = encode_all(
        name, {"messages": first}, {"messages": [*late, user("?"), answer("!")]}
    )
    assert "Go on." in kept
    assert "message 2: " + NOT_WRITTEN.format("content", "system") in lost


@pytest.mark.parametrize("arguments", [{"times": 2}, '{"times": 2}'])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Hermes", '{"name": "ring_bell", "arguments": {"times": 2}}'),
        ("writes Python's dict", '<tool_call>ring_bell {"times": 2}</tool_call>'),
        ("DeepSeek V3", 'ring_bell\n```json\n{"times": 2}\n```'),
        ("Qwen 3 Coder", "<parameter=times>\n2\n</parameter>"),
    ],
)
def test_arguments_are_written_as_the_template_needs_them(name, expected, arguments):
    several = record(
        calling(call("ring_bell", arguments)), result("2"), calling(call("ring_bell", arguments))
    )
    (text,) = encode_all(name, several)
    assert text.count(expected) == 2


@pytest.mark.parametrize("name", ["prints None", "Hermes", "Qwen 2.5", "DeepSeek V3"])
def test_a_missing_content_beside_a_call_is_empty(name):
    without = {"role": "assistant", "tool_calls": [ONE]}
    null = {"role": "assistant", "content": None, "tool_calls": [ONE]}
    texts = encode_all(name, *(record(m, result("ok"), answer("Rung.")) for m in (without, null)))
    assert texts[0] == texts[1]
    assert "None" not in texts[0] and "ring_bell" in texts[0]


def test_a_field_that_no_template_knows_is_named_unless_it_is_empty_or_a_label():
    odd = answer("Yes.", mood="glad")
    empty = answer("Yes.", mood="", notes=[], id="7", name="ann", score=3, done=True)
    refused, kept = encode_all("ChatML", record(odd), record(empty))
    assert "message 1: " + NOT_WRITTEN.format("mood", "assistant") in refused
    assert "Yes." in kept
    encoder = ConversationEncoder(ByteTokenizer(), template_of(TEMPLATES["ChatML"]))
    (found,) = encoder.encode([read_conversation(record(empty))])
    notes = [note for note in found.notes if note.startswith("ignored")]
    assert notes == ["ignored field: messages.score", "ignored field: messages.done"]


AFTER_CALLS = (
    "{% for m in messages %}"
    "{% if m.role != 'tool' or messages[loop.index0 - 1].tool_calls %}"
    "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_a_conversation_becomes_does_not_depend_on_others():
    """The template writes the results of tools only after calls, not after calls as text."""
    call = {"type": "function", "function": {"name": "ring_bell", "arguments": {"times": 2}}}
    rung = {"role": "tool", "content": "Rung."}
    whole = [user("Ring."), {**answer(""), "tool_calls": [call]}, rung, answer("Done.")]
    as_text = [user("Ring."), answer("ring_bell 2"), rung, answer("Done.")]
    records = {"messages": whole}, {"messages": as_text}
    alone = [encode_all(AFTER_CALLS, record)[0] for record in records]
    assert "Rung." in alone[0]
    assert "message 2: " + NOT_WRITTEN.format("content", "tool") in alone[1]
    assert encode_all(AFTER_CALLS, *records) == alone
    assert encode_all(AFTER_CALLS, *records[::-1]) == alone[::-1]


NEEDS_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_several_calls_without_content_are_written_by_a_template_that_needs_one():
    call = {"type": "function", "function": {"name": "ring_bell", "arguments": {"times": 2}}}
    without = {"role": "assistant", "content": None, "tool_calls": [call]}
    rung = {"role": "tool", "content": "Rung."}
    messages = [user("Ring."), without, rung, without, rung, answer("Done.")]
    (text,) = encode_all(NEEDS_CONTENT, {"messages": messages})
    assert text.count('[ring_bell {"times": 2}]') == 2


READS_DESCRIPTIONS = (
    "{% for t in tools or [] %}{{ t.function.name }}({% for name, each in "
    "t.function.parameters.properties.items() %}{{ name }}: {{ each.description | trim }}"
    "{% endfor %}) {{ t.function.description }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tool_with(parameter):
    schema = {"type": "object", "properties": {"times": parameter}}
    return {"function": {"name": "ring_bell", "description": "Rings.", "parameters": schema}}


@pytest.mark.parametrize(
    ("parameter", "lost"),
    [
        ({"description": "How often."}, None),
        ({"description": "How often.", "enum": ["once", "twice"]}, "a value of an enum"),
        (
            {"description": "How.", "properties": {"loud": {"type": "boolean"}}},
            "the name of a parameter",
        ),
        (
            {"description": "How.", "items": {"type": "string", "description": "A tone."}},
            "a description of a parameter",
        ),
    ],
)
def test_texts_of_tools_that_a_template_leaves_out_are_counted(parameter, lost):
    encoder = ConversationEncoder(BYTES, template_of(READS_DESCRIPTIONS))
    tools = [tool_with(parameter)]
    (found,) = encoder.encode([read_conversation(record(answer("Done."), tools=tools))])
    notes = [note for note in found.notes if "`tools`" in note]
    expected = f"conversations with {lost} in `tools` that the template does not write"
    assert notes == ([expected] if lost else [])


def test_parameters_outside_of_properties_are_counted():
    """As in xLAM's data; templates look for `properties`."""
    template = READS_DESCRIPTIONS.replace(".properties.items()", ".get('properties', {}).items()")
    encoder = ConversationEncoder(BYTES, template_of(template))
    tool = tool_with({})
    tool["function"]["parameters"] = {"times": {"type": "int", "description": "How often."}}
    (found,) = encoder.encode([read_conversation(record(answer("Done."), tools=[tool]))])
    assert any("the name of a parameter in `tools`" in note for note in found.notes)


def test_what_is_written_may_depend_on_a_label_of_the_message():
    """This template writes the results of tools only with their names."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role != 'tool' or m.name %}{{ m.content }}"
        "{% endif %}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rung = {"role": "tool", "content": "Rung."}
    named, unnamed = (
        record(calling(ONE), {**rung, **name}, answer("Done.")) for name in ({"name": "bell"}, {})
    )
    alone = [encode_all(template, each)[0] for each in (named, unnamed)]
    assert "Rung." in alone[0]
    assert "message 2: " + NOT_WRITTEN.format("content", "tool") in alone[1]
    assert encode_all(template, named, unnamed) == alone
    assert encode_all(template, unnamed, named) == alone[::-1]


@pytest.mark.parametrize("tool", ["ring_bell", ["ring_bell"], {"function": "ring_bell"}])
def test_a_tool_that_is_no_schema_is_refused(tool):
    (found,) = encode_all("Hermes", record(answer("Done."), tools=[tool]))
    assert "tools[0] must be a function as a JSON schema" in found
