# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations as people have them."""


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(name, arguments, **fields):
    return {"type": "function", **fields, "function": {"name": name, "arguments": arguments}}


def result(content, **fields):
    return {"role": "tool", "content": content, **fields}


def tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
TOOLS = [
    tool("read_tide", "Tell the tide at a harbour.", harbour=TEXT, hour={"type": "integer"}),
    tool("ring_bell", "Ring the bell.", times={"type": "integer"}),
]
TIDE = {"harbour": "Oban", "hour": 6}

#: Records with messages in OpenAI's format, by what is special in them.
CONVERSATIONS = {
    "one turn": {"messages": [user("What is four and three?"), answer("Seven.")]},
    "three turns": {
        "messages": [
            user("Name a harbour."),
            answer("Oban, on the west coast."),
            user("And one in the east?"),
            answer("Arbroath."),
            user("How far are they apart?"),
            answer("About 150 km.\nBy road it is more."),
        ]
    },
    "system": {
        "messages": [
            {"role": "system", "content": "Answer in one word."},
            user("Colour of the sea?"),
            answer("Green"),
            user("Of the sky?"),
            answer("Grey"),
        ]
    },
    "developer": {
        "messages": [
            {"role": "developer", "content": "Speak like a pilot."},
            user("Can we land?"),
            answer("Cleared to land."),
        ]
    },
    "one call": {
        "tools": TOOLS,
        "messages": [
            user("How high is the water in Oban at six?"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("read_tide", TIDE, id="call00001")],
            },
            result('{"metres": 3.2}', name="read_tide", tool_call_id="call00001"),
            answer("3.2 metres."),
        ],
    },
    "several calls": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "You keep a lighthouse."},
            user("Compare Oban at six and seven, then ring twice."),
            answer(
                "", tool_calls=[call("read_tide", TIDE), call("read_tide", {**TIDE, "hour": 7})]
            ),
            result("3.2"),
            result("3.9"),
            answer("", tool_calls=[call("ring_bell", {"times": 2})]),
            result("done"),
            answer("It rises by 0.7 metres. I have rung."),
        ],
    },
    "arguments as text": {
        "tools": TOOLS,
        "messages": [
            user("Ring three times."),
            {"role": "assistant", "tool_calls": [call("ring_bell", '{"times": 3}')]},
            result("done"),
            answer("Three rings it was."),
        ],
    },
    "text beside a call": {
        "tools": TOOLS,
        "messages": [
            user("Is the tide high?"),
            answer("Let me look.", tool_calls=[call("read_tide", {"harbour": 'Oban "north"'})]),
            result("low"),
            answer("No, it is low."),
        ],
    },
    "reasoning": {
        "messages": [
            user("Is 91 prime?"),
            answer("No, it is 7 times 13.", reasoning_content="7 times 13 is 91."),
        ]
    },
    "reasoning in two turns": {
        "messages": [
            user("Is 91 prime?"),
            answer("No.", reasoning_content="7 times 13 is 91."),
            user("And 97?"),
            answer("Yes.", reasoning_content="Not by 2, 3, 5 or 7.\nSo it is."),
        ]
    },
    "reasoning within the text": {
        "messages": [
            user("Is 51 prime?"),
            answer("<think>\n3 times 17.\n</think>\n\nNo."),
            user("And 53?"),
            answer("<think>\nI see no factor.\n</think>\n\nYes."),
        ]
    },
    "reasoning before a call": {
        "tools": TOOLS,
        "messages": [
            user("Ring if the tide is high."),
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I need the tide first.",
                "tool_calls": [call("read_tide", TIDE)],
            },
            result("high"),
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "It is high.",
                "tool_calls": [call("ring_bell", {"times": 1})],
            },
            result("done"),
            answer("I rang once.", reasoning_content="All is done."),
        ],
    },
    "weights": {
        "messages": [
            user("First?"),
            answer("Never trained.", weight=0),
            user("Second?"),
            answer("Half as much.", weight=0.5),
            user("Third?"),
            answer("In full.", weight=1),
        ]
    },
    "weight 0 at the end": {
        "messages": [
            user("First?"),
            answer("Trained."),
            user("Second?"),
            answer("Not trained.", weight=0),
            user("Never answered"),
        ]
    },
    "unicode": {
        "messages": [
            user("👩‍👩‍👧 née cafe\u0301 ẛ̣ 🇫🇷?"),
            answer("日本語とمرحبا بالعالم ﬁn Ⅷ."),
            user("한국어 \u200b\u202eabc"),
            answer("e\u0301\u0300 ½ ﷺ 🙂"),
        ]
    },
    "empty contents": {
        "messages": [
            user(""),
            answer("Was that all?"),
            user("Yes."),
            answer(""),
            user("?"),
            answer("!"),
        ]
    },
    "white space": {
        "messages": [
            user("  indent\n\n"),
            answer("\n    return x  \n"),
            user("\ttab"),
            answer(" one space, two  spaces \n\n"),
        ]
    },
    "special tokens in a text": {
        "messages": [
            user("What do <|im_end|>, </s> and [/INST] mean? <think>"),
            answer("They end turns."),
            user("And <|im_start|>assistant\n?"),
            answer("It begins one."),
        ]
    },
    "two answers in a row": {
        "messages": [
            user("Tell me two things."),
            answer("One."),
            answer("Two."),
            user("?"),
            answer("!"),
        ]
    },
    "text parts": {
        "messages": [
            user([{"type": "text", "text": "Read "}, {"type": "text", "text": "this."}]),
            answer([{"type": "text", "text": "Done."}]),
        ]
    },
    "labels": {
        "messages": [
            user("Who are you?", name="ann", id="m1"),
            answer("A lighthouse.", id="m2", index=0, created=1700000000),
        ]
    },
    "variables": {
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [user("Quick: six times seven?"), answer("42"), user("Sure?"), answer("Yes.")],
    },
    "a system message in the middle": {
        "messages": [
            user("Hello."),
            answer("Good morning."),
            {"role": "system", "content": "From now on in capitals."},
            user("And now?"),
            answer("GOOD MORNING."),
        ]
    },
}


def system(content):
    return {"role": "system", "content": content}


_THOUGHT = answer("No.", reasoning_content="Seven times thirteen.")
_ANOTHER = answer("Yes.", reasoning_content="No factor below ten.")
_RING = call("ring_bell", {"times": 1}, id="call00001")
_RUNG = result("done", name="ring_bell", tool_call_id="call00001")
_ASKED, _ASKED_AGAIN = user("Is 91 prime?"), user("And 97?")


def record(*messages, **fields):
    return {"messages": list(messages), **fields}


#: More of them, for the long suite.
MORE = {
    "two turns": record(user("A harbour?"), answer("Oban."), user("East?"), answer("Arbroath.")),
    "five turns": record(
        *(m for n in range(5) for m in (user(f"Question {n}?"), answer(f"Reply {n}.")))
    ),
    "system and one turn": record(system("Be brief."), user("Sky?"), answer("Grey.")),
    "system and reasoning": record(system("Be brief."), _ASKED, _THOUGHT),
    "reasoning in the last only": record(_ASKED, answer("No."), _ASKED_AGAIN, _ANOTHER),
    "reasoning in the first only": record(_ASKED, _THOUGHT, user("Thanks?"), answer("Welcome.")),
    "reasoning within one text": record(_ASKED, answer("<think>\n7 times 13.\n</think>\n\nNo.")),
    "the end of reasoning within a text": record(_ASKED, answer("7 times 13.\n</think>\n\nNo.")),
    "asked for reasoning": record(
        _ASKED, _THOUGHT, chat_template_kwargs={"enable_thinking": True, "thinking": True}
    ),
    "asked for none": record(
        _ASKED, answer("No."), chat_template_kwargs={"enable_thinking": False, "thinking": False}
    ),
    "asked for reasoning, without": record(
        _ASKED, answer("No."), chat_template_kwargs={"enable_thinking": True, "thinking": True}
    ),
    "/no_think": record(system("Be brief. /no_think"), user("Sum?"), answer("Seven.")),
    "/think": record(system("/think"), _ASKED, _THOUGHT),
    "under reasoning": record(_ASKED, answer("No.", reasoning="Seven times thirteen.")),
    "under thinking": record(_ASKED, answer("No.", thinking="Seven times thirteen.")),
    "a call and no text": record(
        user("Ring."), answer("", tool_calls=[_RING]), _RUNG, answer("Rang."), tools=TOOLS
    ),
    "a call at the end": record(user("Ring."), answer("", tool_calls=[_RING]), tools=TOOLS),
    "tools without a call": record(user("Hello."), answer("Good day."), tools=TOOLS),
    "parallel calls": record(
        user("Compare."),
        answer(
            "",
            tool_calls=[
                call("read_tide", TIDE, id="call00001"),
                call("read_tide", {**TIDE, "hour": 7}, id="call00002"),
            ],
        ),
        result("3.2", name="read_tide", tool_call_id="call00001"),
        result("3.9", name="read_tide", tool_call_id="call00002"),
        answer("Rises."),
        tools=TOOLS,
    ),
    "reasoning and a call": record(
        user("Ring."),
        answer("", reasoning_content="They ask for it.", tool_calls=[_RING]),
        _RUNG,
        answer("Rang."),
        tools=TOOLS,
    ),
    "a greeting": record(answer("Welcome.", weight=0), user("Sum?"), answer("Seven.")),
    "the first not trained": record(
        user("One?"), answer("Bad.", weight=0), user("Two?"), answer("Good.")
    ),
    "two questions in a row": record(user("One."), user("Two?"), answer("Both.")),
    "code": record(user("Print."), answer("```python\nprint('<b>')\n```")),
    "many newlines": record(user("Poem."), answer("a\n\n\nb\n\n")),
    "two answers with reasoning": record(
        user("Two."),
        answer("One.", reasoning_content="First."),
        answer("Two.", reasoning_content="Second."),
    ),
}
