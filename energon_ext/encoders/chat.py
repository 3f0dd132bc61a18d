# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations as text, and which parts of that text are answers."""

import datetime
import hashlib
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Mapping, Sequence

from energon_ext.encoders.limited import Limited
from energon_ext.encoders.tokenizer_files import load_with_transformers
from energon_ext.encoders.tokenizer_protocol import Tokenizer
from energon_ext.encoders.tokenizers import HFTokenizer
from energon_ext.errors import ConfigError, SampleError

#: ``{"role": ..., "content": ...}``
Message = Mapping[str, str]
ROLES = ("system", "user", "assistant", "tool")

#: A template's reference to the clock, with its format if that is a literal.
_CLOCK = re.compile(r"""\bstrftime_now\b(?!\s+is\s)(?:\s*\(\s*(['"])(.*?)\1\s*\))?""")
#: A template name followed by a date.
_DATED = re.compile(r"(.+)@(\d{4}-\d\d-\d\d)")


class ChatTemplate(ABC):
    """The text format of a conversation.

    Attributes:
        writes_special_tokens: True if the text includes the special tokens that begin and end it;
            otherwise the tokenizer adds them according to its ``add_bos`` and ``add_eos``.
    """

    writes_special_tokens: bool = False

    #: Name by which :func:`named_template` loads it; None if it has none.
    name: str | None = None

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the messages as text, followed by the prefix of the next answer if asked for."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that change whenever the text of any conversation changes."""


class PlainChatTemplate(ChatTemplate):
    """One line per message, ``role: content``; the newline ends an answer.

    Example:
        >>> question = [{"role": "user", "content": "2 + 2"}]
        >>> PlainChatTemplate().render(question, add_generation_prompt=True)
        'user: 2 + 2\\nassistant: '
    """

    name = "plain"

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return lines + ("assistant: " if add_generation_prompt else "")

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "plain"}


class HFChatTemplate(ChatTemplate):
    """The chat template of a Hugging Face tokenizer.

    Args:
        name_or_path: a folder, a name, or a ``transformers`` tokenizer.
        date: a fixed date such as ``2026-01-31`` for a template that reads the clock
            (``strftime_now``), whose text would otherwise change every day.

    Raises:
        ConfigError: the tokenizer cannot be loaded or has no chat template, or the template reads
            the clock and no date can replace it.
    """

    writes_special_tokens = True

    def __init__(self, name_or_path: str | Path | Any, date: str | None = None):
        self._tokenizer: Any = name_or_path
        try:
            self._date = None if date is None else datetime.date.fromisoformat(date)
        except ValueError as error:
            needed = "a date such as 2026-01-31 is needed"
            raise ConfigError(f"date: {date!r:.40} found, {needed}.") from error
        if isinstance(name_or_path, (str, Path)):
            name = str(name_or_path)
            self._tokenizer = load_with_transformers(name, f"Chat template of {name!r}")
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"Tokenizer {name_or_path}: has no chat template; use one that has, or pass "
                f"chat_template=PlainChatTemplate()."
            )
        self._template = self._tokenizer.chat_template
        if self._date is not None:
            # Each call of the clock becomes the date, in the format of the call.
            template, day = self._tokenizer.get_chat_template(), self._date
            self._template = _CLOCK.sub(
                lambda call: repr(day.strftime(call[2])) if call[2] else call[0], template
            )
        if _CLOCK.search(str(self._template)):
            advice = "a fixed date cannot replace it here: write one into a copy of the template"
            if self._date is None:
                advice = "give HFChatTemplate(..., date='2026-01-31') or --chat-template "
                advice += "NAME@2026-01-31"
            raise ConfigError(
                f"Chat template of {name_or_path}: writes today's date (strftime_now), so the "
                f"tokens of a text would change every day; {advice}."
            )
        self._limited = Limited(self._apply, "the chat template")

    def _apply(self, messages: list[Message], add_generation_prompt: bool) -> str:
        dated = {} if self._date is None else {"chat_template": self._template}
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **dated
        )

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return self._limited([dict(message) for message in messages], add_generation_prompt)

    def fingerprint(self) -> dict[str, Any]:
        text = repr((self._template, self._tokenizer.special_tokens_map))
        return {"kind": "hf", "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_messages(messages: Any) -> None:
    """Raise SampleError unless messages are a conversation with at least one answer."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise SampleError("`messages` must be a list of messages")
    previous = None
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise SampleError(f"message {index} must have `role` and `content` as text")
        role = message["role"]
        if role not in ROLES:
            raise SampleError(f"message {index} has role {role!r}; {', '.join(ROLES)} are allowed")
        if role == "system" and previous is not None:
            raise SampleError(f"message {index} is a system message; only the first may be one")
        if role == "assistant" and previous in (None, "system", "assistant"):
            raise SampleError(f"message {index} is an answer without a question")
        previous = role
    if all(message["role"] != "assistant" for message in messages):
        raise SampleError("no assistant message, so there is nothing to train on")


def default_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of an HFTokenizer's folder or name, else the plain one.

    Fine-tuning and prompts share it, so that a policy is prompted in the format it was trained on.
    """
    if isinstance(tokenizer, HFTokenizer) and not Path(tokenizer.name).is_file():
        loaded = load_with_transformers(tokenizer.name, f"Chat template of {tokenizer.name!r}")
        if loaded.chat_template:
            return HFChatTemplate(loaded)
    return PlainChatTemplate()


def named_template(name: str | None) -> ChatTemplate | None:
    """Load a chat template by name; None for no name.

    A name is ``plain`` or a Hugging Face tokenizer, with ``@2026-01-31`` appended to fix its date.
    """
    if name is None:
        return None
    if name == PlainChatTemplate.name:
        return PlainChatTemplate()
    dated = _DATED.fullmatch(name)
    return HFChatTemplate(dated[1], dated[2]) if dated else HFChatTemplate(name)


def split_answers(template: ChatTemplate, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Split the text of a conversation where answers begin and end.

    An answer is what rendering one more message adds to the text with the generation prompt,
    which is where the model continues at inference. Text after the last answer is dropped.

    Returns:
        ``(text, is_answer)`` in order; the joined texts are the conversation up to that point.
    """
    pieces = []
    written = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        question = template.render(messages[:index], add_generation_prompt=True)
        answered = template.render(messages[: index + 1])
        if not (question.startswith(written) and answered.startswith(question)):
            raise SampleError(
                f"the chat template rewrites earlier text at message {index}, so the answer cannot "
                f"be separated from the rest"
            )
        pieces += [(question[len(written) :], False), (answered[len(question) :], True)]
        written = answered
    return pieces
