# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chat templates: conversations as text."""

import datetime
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from energon_ext.arguments import choices, optional_module
from energon_ext.chats.own_reasoning import OwnReasoning, find_own_reasoning
from energon_ext.chats.reasoning import Tags
from energon_ext.compat import jinja_environment
from energon_ext.errors import ConfigError, SampleError, one_line
from energon_ext.keyed import sha256
from energon_ext.tokenizers.files import load_with_transformers

#: A message in OpenAI's format: ``role``, ``content``, and further fields such as ``tool_calls``.
Message = Mapping[str, Any]

#: A text to look for in what a template writes: letters that none adds, escapes or changes.
MARK = "zqxjkv"

#: A template's reference to the clock, with its format if that is a literal.
_CLOCK = re.compile(r"""\bstrftime_now\b(?!\s+is\s)(?:\s*\(\s*(['"])(.*?)\1\s*\))?""")
#: Tags around what the model generates.
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

#: Names that are no variables of a template, but arguments of what renders it.
RESERVED = frozenset(
    ("messages", "conversations", "chat_template", "add_generation_prompt")
    + ("continue_final_message", "return_assistant_tokens_mask")
)

#: Names of the templates of a tokenizer that has several, as ``transformers`` chooses them.
_DEFAULT, _FOR_TOOLS = "default", "tool_use"


class ChatTemplate(ABC):
    """The text format of a conversation.

    Attributes:
        writes_special_tokens: True if the text includes the special tokens that begin and end it;
            otherwise the tokenizer adds them according to its ``add_bos`` and ``add_eos``.
        has_generation_tags: True if :meth:`render_answers` finds answers by tags.
    """

    writes_special_tokens: bool = False
    has_generation_tags: bool = False

    #: Name by which ``template_names`` finds it; None if it has none.
    name: str | None = None

    #: Arguments for every conversation; those of a record take precedence.
    template_kwargs: Mapping[str, Any] = {}

    @abstractmethod
    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **context: Any
    ) -> str:
        """Return the messages as text, followed by the prefix of the next answer if asked for.

        Args:
            context: ``tools`` and further variables of the template, if the conversation has any.

        Raises:
            SampleError: the template rejects the conversation.
        """

    def render_answers(
        self, messages: Sequence[Message], **context: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the messages as text, and the (start, stop) that generation tags enclose."""
        return self.render(messages, **context), []

    def variables(self) -> frozenset[str]:
        """Return the names of the variables that the template reads."""
        return frozenset()

    def fields(self) -> frozenset[str]:
        """Return the names of the fields of messages that the template reads, and others."""
        return frozenset()

    @functools.cached_property
    def own_reasoning(self) -> tuple[OwnReasoning | None, list[str]]:
        """The way it writes the reasoning of an answer, and fields for it that it does not write.

        See :func:`~energon_ext.chats.own_reasoning.find_own_reasoning`.
        """
        return find_own_reasoning(self.render, self.fields())

    @property
    def own_tags(self) -> Tags | None:
        """The tags that it writes before and after reasoning; None if they are not known."""
        found, _ = self.own_reasoning
        return None if found is None else found.tags

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that change whenever the text of any conversation changes."""


class PlainChatTemplate(ChatTemplate):
    """One line per message, ``role: content``; the newline ends an answer.

    A prompt ends before the space, which most tokenizers make part of the first word of an answer.

    Example:
        >>> question = [{"role": "user", "content": "2 + 2"}]
        >>> PlainChatTemplate().render(question, add_generation_prompt=True)
        'user: 2 + 2\\nassistant:'
    """

    name = "plain"

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **context: Any
    ) -> str:
        lines = (f"{message['role']}: {message.get('content', '')}\n" for message in messages)
        return "".join(lines) + ("assistant:" if add_generation_prompt else "")

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "plain"}


class HFChatTemplate(ChatTemplate):
    """A Jinja chat template, rendered by ``transformers`` in its sandbox.

    Args:
        name_or_path: a tokenizer's folder, name or ``transformers`` object; its special tokens are
            variables of the template.
        date: a fixed date such as ``2026-01-31`` for a template that reads the clock
            (``strftime_now``), whose text would otherwise change every day.
        template: the text of a template, which replaces the tokenizer's.
        template_kwargs: variables for every conversation, such as ``{"enable_thinking": False}``.

    Raises:
        ConfigError: the tokenizer cannot be loaded or has no chat template, or the template reads
            the clock and no date can replace it.
    """

    writes_special_tokens = True

    def __init__(
        self,
        name_or_path: str | Path | Any,
        date: str | None = None,
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.template_kwargs = dict(template_kwargs or {})
        if reserved := RESERVED.intersection(self.template_kwargs):
            raise ConfigError(
                f"chat_template_kwargs: {min(reserved)} is not a variable of a template; remove it."
            )
        tokenizer: Any = name_or_path
        if isinstance(name_or_path, (str, Path)):
            name = str(name_or_path)
            tokenizer = load_with_transformers(name, f"Chat template of {name!r}")
        else:
            name = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
        own = tokenizer.chat_template
        self._templates = _by_name(template or own)
        if not self._templates:
            raise ConfigError(
                f"Tokenizer {name}: has no chat template; use one that has, give a .jinja file, or "
                f"pass chat_template=PlainChatTemplate()."
            )
        if _DEFAULT not in self._templates:
            raise ConfigError(
                f"Tokenizer {name}: has the chat templates {', '.join(self._templates)}, none of "
                f"which is the default; choose one with --chat-template."
            )
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._fix_date(name, date)
        texts = self._templates.values()
        self.has_generation_tags = any(_GENERATION_TAG.search(text) for text in texts)
        self._check_variables(name)

    def _check_variables(self, name: str) -> None:
        """Raise ConfigError for a template that cannot be parsed, or does not read a variable."""
        try:
            known = self.variables()
        except Exception as error:  # of Jinja, which may not be installed
            raise ConfigError(f"Chat template of {name}: {one_line(error):.200}.") from error
        for variable in self.template_kwargs:
            if variable not in known:
                reads = choices(variable, sorted(known - {"messages"}))
                raise ConfigError(
                    f"chat_template_kwargs: the template does not read {variable!r}; it reads "
                    f"{reads}."
                )

    def _fix_date(self, name: str, date: str | None) -> None:
        """Replace each call of the clock by a date, in the format of the call."""
        try:
            day = None if date is None else datetime.date.fromisoformat(date)
        except ValueError as error:
            needed = "a date such as 2026-01-31 is needed"
            raise ConfigError(f"date: {date!r:.40} found, {needed}.") from error
        for key, text in self._templates.items():
            if day is not None:
                text = _CLOCK.sub(
                    lambda call: repr(day.strftime(call[2])) if call[2] else call[0], text
                )
                self._templates[key] = text
            if not _CLOCK.search(text):
                continue
            advice = "a fixed date cannot replace it here: write one into a copy of the template"
            if day is None:
                advice = "give HFChatTemplate(..., date='2026-01-31') or --chat-template "
                advice += "NAME@2026-01-31"
            raise ConfigError(
                f"Chat template of {name}: writes today's date (strftime_now), so the tokens of a "
                f"text would change every day; {advice}."
            )

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **context: Any
    ) -> str:
        return self._render(messages, context, add_generation_prompt=add_generation_prompt)[0]

    def render_answers(
        self, messages: Sequence[Message], **context: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        text, tagged = self._render(
            messages, context, return_assistant_tokens_mask=self.has_generation_tags
        )
        return text, [(start, stop) for start, stop in tagged if start < stop]

    def _render(
        self, messages: Sequence[Message], context: Mapping[str, Any], **how: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and, if asked for, the characters inside generation tags."""
        if self._takes_parts:
            messages = [_with_parts(message) for message in messages]
        return self._render_as_given(messages, context, **how)

    def _render_as_given(
        self, messages: Sequence[Message], context: Mapping[str, Any], **how: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        library = _library()
        variables = {**self._special_tokens, **self.template_kwargs, **context}
        # Tokenizers may have another template for conversations with tools.
        has_own = variables.get("tools") and _FOR_TOOLS in self._templates
        template = self._templates[_FOR_TOOLS if has_own else _DEFAULT]
        try:
            texts, tagged = library.render_jinja_template(
                [list(messages)], chat_template=template, **how, **variables
            )
        except Exception as error:  # a template may raise anything
            reason = f"{type(error).__name__}: {one_line(error):.200}"
            raise SampleError(f"the chat template rejects it ({reason})") from error
        return texts[0], tagged[0] if tagged else []

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if the template writes contents that are lists of parts, but not texts (SmolVLM)."""
        question = {"role": "user", "content": MARK}
        return not self._writes(question) and self._writes(_with_parts(question))

    def _writes(self, question: Message) -> bool:
        try:
            return MARK in self._render_as_given([question], {})[0]
        except SampleError:
            return False

    def variables(self) -> frozenset[str]:
        return self._variables

    @functools.cached_property
    def _variables(self) -> frozenset[str]:
        from jinja2.meta import find_undeclared_variables  # a dependency of transformers

        return frozenset().union(*map(find_undeclared_variables, self._parse()))

    def fields(self) -> frozenset[str]:
        return frozenset().union(*map(_fields_in, self._parse()))

    def _parse(self) -> list[Any]:
        """Return the syntax trees of the templates."""
        texts = self._templates.values()
        return [jinja_environment(_library(), text).parse(text) for text in texts]

    def fingerprint(self) -> dict[str, Any]:
        text = repr((sorted(self._templates.items()), sorted(self._special_tokens.items())))
        variables = {"template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        return {"kind": "hf", "sha256": sha256(text), **variables}


def _fields_in(tree: Any) -> set[str]:
    """Return the names of the attributes, items and keys that a template asks for."""
    from jinja2 import nodes

    found = {node.attr for node in tree.find_all(nodes.Getattr)}
    keys = [node.arg for node in tree.find_all(nodes.Getitem)]
    keys += [node.expr for node in tree.find_all(nodes.Compare)]  # 'name' in message
    keys += [node.args[0] for node in tree.find_all(nodes.Call) if node.args]  # .get('name')
    return found | {str(key.value) for key in keys if isinstance(key, nodes.Const)}


def _with_parts(message: Message) -> Message:
    """Return a message with its text as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _library() -> Any:
    """Return the module of transformers that renders templates."""
    module = "transformers.utils.chat_template_utils"
    return optional_module(module, "A chat template", "transformers", "energon_ext[hf]")


def _by_name(templates: Any) -> dict[str, str]:
    """Return the templates of a tokenizer by name; a single one is the default."""
    if not templates:
        return {}
    return dict(templates) if isinstance(templates, dict) else {_DEFAULT: templates}
