# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers to prompts that open a block of reasoning.

Some templates end a prompt with ``<think>``, and show an answer without the block. The model writes
the reasoning, closes the block and answers, so that is the text to train on: the prompt, the
reasoning, the end of the block, and the answer as the template shows it.
"""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_ext.errors import SampleError

#: The tags before and after a block of reasoning.
Tags = tuple[str, str]

#: Fields of a message with its reasoning. They are names for the same text.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

#: Tags of a block that differ in more than a slash: Command R and Gemma 4.
_OTHER_TAGS = {"<|START_THINKING|>": "<|END_THINKING|>", "<|channel>thought": "<channel|>"}

_NAME = r"[\w:]*(?:think|thought|reason)[\w:]*[>\]]"
_OPENING = "|".join([rf"[<\[]{_NAME}", *map(re.escape, _OTHER_TAGS)])
_CLOSING = "|".join([rf"[<\[]/{_NAME}", *map(re.escape, _OTHER_TAGS.values())])
_BLOCK = re.compile(rf"(?:({_OPENING})(\s*)({_CLOSING})?|({_CLOSING}))\s*\Z", re.IGNORECASE)

#: The tags around a block, and white space: templates move them.
_TAGS_AND_SPACE = re.compile(rf"{_OPENING}|{_CLOSING}|\s+", re.IGNORECASE)


def is_said(value: str, text: str, own: Tags | None = None) -> bool:
    """Return True if a text contains all of a value, apart from reasoning tags and white space.

    Args:
        own: further tags, of the chat template.

    Example:
        >>> is_said("<think>sum</think>Four.", "<think>\\nsum\\n</think>\\n\\nFour.<end>")
        True
        >>> is_said("<think>sum</think>Four.", "Four.<end>")
        False
    """
    if value.strip() in text:
        return True
    for tag in own or ():
        value, text = value.replace(tag, ""), text.replace(tag, "")
    bare = _TAGS_AND_SPACE.sub("", text)
    escaped = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    variants = (value, *escaped, html.escape(value))
    return any(_TAGS_AND_SPACE.sub("", each) in bare for each in variants)


@dataclass(frozen=True)
class Block:
    """A block of reasoning at the end of a prompt.

    Attributes:
        start: where it begins in the prompt.
        opening, closing: its tags.
        space: white space after the opening tag.
        is_closed: True if the prompt closes it as well, so that an answer has no reasoning.
    """

    start: int
    opening: str
    closing: str
    space: str
    is_closed: bool

    def fits(self, message: Mapping[str, Any]) -> bool:
        """Return True if an answer with reasoning is asked for it, or one without is not."""
        return self.is_closed != has_reasoning(message, self)


def block_at_end(prompt: str, own: Tags | None = None) -> Block | None:
    """Return the block of reasoning that a prompt opens or closes at its end, if there is one.

    Some prompts have the end of a block only, to ask for an answer without reasoning.

    Args:
        own: tags of the chat template, beside those that are known.

    Example:
        >>> block_at_end("assistant\\n<think>\\n")
        Block(start=10, opening='<think>', closing='</think>', space='\\n', is_closed=False)
        >>> block_at_end("assistant</think>").is_closed
        True
    """
    found = _BLOCK.search(prompt)
    if found is None:
        return None if own is None else _own_block(prompt, *own)
    opening, space, closed, alone = found.groups()
    if alone is not None:
        opening = _opening_of(alone)
        return Block(found.start(), opening, alone, "", True)
    closing = _OTHER_TAGS.get(opening, f"{opening[0]}/{opening[1:]}")
    if closed not in (None, closing):
        return None
    return Block(found.start(), opening, closing, space, closed is not None)


def _own_block(prompt: str, opening: str, closing: str) -> Block | None:
    begin, end = map(re.escape, (opening, closing))
    found = re.search(rf"(?:({begin})(\s*)({end})?|{end})\s*\Z", prompt)
    if found is None:
        return None
    is_closed = found[1] is None or found[3] is not None
    return Block(found.start(), opening, closing, found[2] or "", is_closed)


def _opening_of(closing: str) -> str:
    others = {end: begin for begin, end in _OTHER_TAGS.items()}
    return others.get(closing, closing.replace("/", "", 1))


def has_reasoning(message: Mapping[str, Any], block: Block) -> bool:
    """Return True if an answer has reasoning, in a field or in its content."""
    if any(str(message.get(name) or "").strip() for name in REASONING_FIELDS):
        return True
    content = message.get("content")
    return isinstance(content, str) and has_thought(content, block)


def continue_block(prompt: str, block: Block, shown: str, message: Mapping[str, Any]) -> str | None:
    """Return the text of a prompt with its answer.

    Args:
        block: at the end of the prompt.
        shown: what the template writes after the prompt, or in place of the block and after it.
        message: the answer; its reasoning is in a field, or in its content.

    Returns:
        None if the block is open, but the answer has no reasoning, or the other way around.

    Example:
        >>> prompt = "assistant\\n<think>\\n"
        >>> message = {"content": "No.", "reasoning_content": "It is 7 times 13."}
        >>> continue_block(prompt, block_at_end(prompt), "No.<end>", message)
        'assistant\\n<think>\\nIt is 7 times 13.\\n</think>\\n\\nNo.<end>'
    """
    if not block.fits(message):
        return None
    answer = _drop_empty_blocks(shown, block)
    rest = answer.lstrip()
    if not rest.startswith(block.opening):
        return prompt + answer if block.is_closed else _fill_block(prompt, block, answer, message)
    inner = rest.removeprefix(block.opening).lstrip("\n")  # the template writes all of the block
    return None if block.is_closed or block.closing not in inner else prompt + inner


def _drop_empty_blocks(shown: str, block: Block) -> str:
    """Return what a template writes without an empty block, or the end of one, before the rest."""
    rest = shown.lstrip()
    if rest.startswith(block.opening):
        rest = rest.removeprefix(block.opening).lstrip()
    if not rest.startswith(block.closing):
        return shown
    return _drop_empty_blocks(rest.removeprefix(block.closing).lstrip("\n"), block)


def _fill_block(prompt: str, block: Block, answer: str, message: Mapping[str, Any]) -> str | None:
    """Return a prompt with the reasoning of a message, the end of the block, and an answer."""
    thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if isinstance(thought, str):
        thought = thought.strip("\n")
        if _is_shown(thought, answer, block):
            return prompt + answer
        _check_not_elsewhere(answer, block, str(message.get("content") or ""))
        return f"{prompt}{thought}{block.space}{block.closing}{2 * block.space}{answer}"
    content = str(message.get("content", ""))
    thought, closing, said = content.partition(block.closing)
    if not closing:
        return None
    thought = thought.lstrip().removeprefix(block.opening).lstrip("\n")
    if _is_shown(thought, answer, block):
        return prompt + answer
    if block.opening in thought:
        return None
    _check_not_elsewhere(answer, block, said)
    between = said[: len(said) - len(said.lstrip())]  # the content has its own white space
    return f"{prompt}{thought}{closing}{between}{answer.lstrip()}"


def _is_shown(thought: str, answer: str, block: Block) -> bool:
    """Return True if a template writes the reasoning and its end, but not the opening tag."""
    thought = thought.strip()
    if not thought or not answer.lstrip().startswith(thought):
        return False
    return answer.lstrip()[len(thought) :].lstrip().startswith(block.closing)


def _check_not_elsewhere(answer: str, block: Block, content: str) -> None:
    """Raise SampleError if a template writes a block of reasoning after other text."""
    if any(tag in answer and tag not in content for tag in (block.opening, block.closing)):
        raise SampleError(
            f"the chat template writes {block.opening} after other text of an answer, unlike its "
            f"generation prompt, so the reasoning would be repeated; use another template"
        )


def has_thought(content: str, block: Block) -> bool:
    """Return True if a content begins with reasoning that is not empty, to the end of its block.

    The tag that opens the block may be missing. A tag after other text is only mentioned.

    Example:
        >>> block = block_at_end("<think></think>")
        >>> contents = "4", "<think></think>4", "Sum.</think>4", "Between <think> and </think>."
        >>> [has_thought(each, block) for each in contents]
        [False, False, True, False]
    """
    rest = content.lstrip()
    if rest.startswith(block.opening):
        inner = rest[len(block.opening) :].lstrip()
        if not inner.startswith(block.closing):
            return True
        rest = inner[len(block.closing) :]
    return block.closing in rest and block.opening not in rest.partition(block.closing)[0]


def without_repeated(message: Mapping[str, Any]) -> str | None:
    """Return a content without the block of reasoning that a field has too; None if it has none.

    Example:
        >>> without_repeated({"reasoning": "2 + 2", "content": "<think>\\n2 + 2\\n</think>\\n\\n4"})
        '4'
    """
    content = message.get("content")
    if not isinstance(content, str) or not content.lstrip().startswith("<think>"):
        return None
    inner, closing, rest = content.lstrip().removeprefix("<think>").partition("</think>")
    fields = [message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)]
    is_repeated = closing and inner.strip() and inner.strip() in [each.strip() for each in fields]
    return rest.lstrip("\n") if is_repeated else None


def lacks_opening(content: Any, block: Block) -> bool:
    """Return True if a content has reasoning up to the end of a block that it does not begin."""
    is_text = isinstance(content, str) and not content.lstrip().startswith(block.opening)
    return is_text and has_thought(content, block)
