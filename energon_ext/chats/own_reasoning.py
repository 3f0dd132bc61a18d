# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out how a chat template writes the reasoning of an answer, whatever its words for it.

A model family may have tags of its own, and a field of its own. The template is asked: it renders
an answer whose reasoning and content are markers, and the tags are what it writes around the one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from energon_ext.chats.reasoning import REASONING_FIELDS, Tags
from energon_ext.errors import SampleError

#: A text of letters that no template adds or changes, for the reasoning and for the content.
_THOUGHT, _SAID = "zqxjkvr", "zqxjkvc"

#: Names of fields that may hold reasoning.
_ABOUT_REASONING = re.compile(
    r"\w*(think|thought|reason|reflect|rational|scratch|deliberat|analys)\w*", re.IGNORECASE
)

_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_LAST_TAG, _FIRST_TAG = re.compile(rf"(?:{_TAG})\Z"), re.compile(_TAG)


class OwnReasoning(NamedTuple):
    """How a template writes reasoning.

    Attributes:
        field: the field of a message that it reads.
        tags: what it writes before and after; None if nothing sets them off from other text.
    """

    field: str
    tags: Tags | None


def find_own_reasoning(
    render: Callable[..., str], fields: Iterable[str]
) -> tuple[OwnReasoning | None, list[str]]:
    """Ask a template for its reasoning.

    Args:
        render: of the template.
        fields: names that it reads.

    Returns:
        How it writes the first field of which it writes something before the content, and the
        names of fields it seems to read, of which it writes nothing.
    """
    own = [word for word in sorted(fields) if _ABOUT_REASONING.fullmatch(word)]
    names = [*REASONING_FIELDS, *(name for name in own if name not in REASONING_FIELDS)]
    plain = _render(render, {})
    unwritten: list[str] = []
    for name in names:
        text = _render(render, {name: _THOUGHT})
        begin, end = text.find(_THOUGHT), text.find(_SAID)
        if 0 <= begin < end:
            before, between = text[:begin].rstrip(), text[begin + len(_THOUGHT) : end].strip()
            return OwnReasoning(name, _tags(before, between, plain)), unwritten
        if name in own:
            unwritten.append(name)
    return None, unwritten


def _render(render: Callable[..., str], fields: Mapping[str, Any]) -> str:
    """Return an answer with some fields as text; empty if the template rejects it."""
    answer = {"role": "assistant", "content": _SAID, **fields}
    try:
        return render([{"role": "user", "content": "x"}, answer])
    except SampleError:
        return ""


def _tags(before: str, between: str, plain: str) -> Tags | None:
    """Return the tags around a thought, given the texts before it and up to the content.

    Args:
        plain: the answer without reasoning. What comes right before its content is the header of
            every answer, and no tag.
    """
    tag, lines = _LAST_TAG.search(before), before.splitlines()
    opening = tag[0] if tag else lines[-1].strip() if lines else ""
    end = _FIRST_TAG.match(between)
    closing = end[0] if end else between.partition("\n")[0].strip()
    if not opening or not closing or opening == closing:
        return None
    is_header = re.search(rf"{re.escape(opening)}\s*{_SAID}", plain) is not None
    return None if is_header else (opening, closing)
