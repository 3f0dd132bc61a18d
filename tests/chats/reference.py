# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the texts, tokens and weights of a conversation must be, computed slowly.

Texts are those of ``transformers``; a border is compared with the tokens of the whole text before
it, and an answer is what its message adds to the text of the messages before it.
"""

import copy
import functools
import json
import re

from transformers.utils.chat_template_utils import render_jinja_template


class Reference:
    """The texts that ``transformers`` makes of one record with one template.

    Attributes:
        messages: in the first of a few forms that the template accepts.
        weights: of the messages.
    """

    #: Whether missing contents are filled, and whether arguments are text.
    FORMS = ((False, False), (True, False), (False, True), (True, True))

    def __init__(self, special_tokens, template, record, forms=FORMS):
        self.template, self.special_tokens = template, special_tokens
        self.tags = functools.lru_cache(None)(self._tags)
        self.context = dict(record.get("chat_template_kwargs", {}))
        if record.get("tools"):
            self.context["tools"] = record["tools"]
        roles = [message["role"] for message in record["messages"]]
        self.last = max(i for i, role in enumerate(roles) if role == "assistant")
        self.weights = [
            message.get("weight", 1) if message["role"] == "assistant" else 0
            for message in record["messages"]
        ]
        for form in forms:
            self.messages = [_message(message, *form) for message in record["messages"]]
            try:
                self.text = self.render(self.last + 1)
                break
            except Exception as error:  # a template may raise anything
                self.text, self.error = None, error
        self._try_parts()

    def _try_parts(self):
        """Give contents as lists of parts, if the template writes nothing else."""
        contents = [m["content"] for m in self.messages if m["role"] == "user" and m["content"]]
        if self.text is None or not contents or any(c.strip() in self.text for c in contents):
            return
        given = self.messages
        self.messages = [
            {**m, "content": [{"type": "text", "text": m.get("content", "")}]} for m in given
        ]
        self.tags.cache_clear()
        text = self.render(self.last + 1)
        if any(content.strip() in text for content in contents):
            self.text = text
            return
        self.messages = given
        self.tags.cache_clear()

    @property
    def has_tags(self):
        return re.search(r"\{%-?\s*generation", self.template) is not None

    @property
    def answers(self):
        return [index for index, weight in enumerate(self.weights) if weight > 0]

    def render(self, stop, **how):
        return self.tags(stop, **how)[0]

    def _tags(self, stop, **how):
        """Return the text of the first messages, and the places of its generation tags."""
        texts, tags = render_jinja_template(
            [self.messages[:stop]],
            chat_template=self.template,
            **{**self.special_tokens, **self.context, **how},
        )
        return texts[0], (tags or [[]])[0]

    def prompt(self, index):
        """Return what an inference server makes of the messages before an answer."""
        return self.render(index, add_generation_prompt=True)

    @property
    def is_unclear(self):
        """Whether a prompt is not what the template writes before an answer.

        It opens a block that is opened again, or not closed after reasoning; or there is none after
        another answer, whose header is then not trained.
        """
        if any(
            index and self.weights[index - 1] > 0 and self.prompt(index) == self.render(index)
            for index in self.answers
        ):
            return True
        begun = [(self.prompt(index), self.render(index + 1)) for index in self.answers]
        return any(
            prompt.rstrip().endswith("<think>")
            and text.startswith(prompt)
            and not re.match("(?!</?think>).*?</think>", text[len(prompt) :].lstrip(), re.DOTALL)
            for prompt, text in begun
        )

    def spans(self, are_apart=False):
        """Return [(text, [(start, stop, weight)])]; None if a prompt is not continued.

        Args:
            are_apart: each answer in a text of its own, even if one text has them all.
        """
        places = [(len(self.prompt(i)), self.render(i + 1), self.weights[i]) for i in self.answers]
        begins = all(self.text.startswith(self.prompt(index)) for index in self.answers)
        if not are_apart and begins and all(self.text.startswith(until) for _, until, _ in places):
            return [(self.text, [(begin, len(until), w) for begin, until, w in places])]
        if all(self.render(i + 1).startswith(self.prompt(i)) for i in self.answers):
            return [(until, [(begin, len(until), w)]) for begin, until, w in places]
        return None


def in_other_form(record, notes):
    """Return a record in the form that a summary says it was written in."""
    messages = copy.deepcopy(record["messages"])
    for message in messages:
        if "messages of role developer, written as those of role system" in notes:
            message["role"] = message["role"].replace("developer", "system")
        fields = ("reasoning_content", "reasoning", "thinking")
        for name in (each for each in fields if each in message):
            for other in fields:
                if f"`{name}` of answers, written as `{other}`" in notes:
                    message[other] = message.pop(name)
            if f"`{name}` of answers, written as <think> in their content" in notes:
                thought = message.pop(name)
                message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    return {**record, "messages": messages}


def _message(message, filled, text_arguments):
    message = {k: copy.deepcopy(v) for k, v in message.items() if v is not None and k != "weight"}
    if isinstance(message.get("content"), list):
        message["content"] = "".join(part["text"] for part in message["content"])
    if filled:
        message.setdefault("content", "")
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and not text_arguments:
            call["function"]["arguments"] = json.loads(arguments)
        if not isinstance(arguments, str) and text_arguments:
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return message


def weigh(tokenize, text, spans):
    """Return tokens and weights by whole prefixes; None if a token crosses a border."""
    tokens = tokenize(text)

    def place(border):
        before = tokenize(text[:border])
        return len(before) if tokens[: len(before)] == before else None

    weights = [0.0] * len(tokens)
    for start, stop, weight in spans:
        begin, end = place(start), place(stop)
        if begin is None or end is None:
            return None
        weights[begin:end] = [weight] * (end - begin)
    return tokens, weights
