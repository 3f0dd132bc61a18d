# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments and options shared by several commands."""

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable

import click

from energon_ext.chats.answers import ANSWERS
from energon_ext.chats.encoding import ANSWER_ENDS
from energon_ext.errors import one_line
from energon_ext.packing import PACKERS
from energon_ext.storage.claim import Part
from energon_ext.weights.axis import EXAMPLES, count_from


class Count(click.ParamType):  # type: ignore[type-arg]
    """An integer within limits, written like a breakpoint (10k, 40B)."""

    name = "count"

    def __init__(self, least: int, most: int = 10**12):
        self.least, self.most = least, most

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        count = count_from(value)
        if count is None or not self.least <= count <= self.most:
            limits = f"an integer from {self.least} to {self.most:,} is needed"
            self.fail(f"{value!r:.80} found; {limits}, such as {EXAMPLES}.", param, ctx)
        return count


#: Positions of a row.
ROW_TOKENS = Count(2, 2**24)


class _PathOrUrl(click.ParamType):  # type: ignore[type-arg]
    """A local path, or a URL."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | str:
        return value if "://" in value else Path(value)


class _PartType(click.ParamType):  # type: ignore[type-arg]
    """``R/N``: every N-th unit, starting with unit R; units count from 0."""

    name = "part"

    def convert(self, value: Any, param: Any, ctx: Any) -> Part:
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value)
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"{value!r:.80} found; R/N with 0 <= R < N is needed.", param, ctx)
        return Part(int(match[1]), int(match[2]))


PATH = click.Path(path_type=Path)
INPUT = _PathOrUrl()
FILE = click.Path(path_type=Path, dir_okay=False)

metadataset = click.argument("metadataset", type=INPUT)
split = click.option("--split", "split_part", default="train", help="Split of the metadataset.")


class PackerName(click.ParamType):  # type: ignore[type-arg]  # a class without any in older click
    """The name of a packer, also of one that a module of the user's has registered."""

    name = "packer"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value not in PACKERS:
            self.fail(f"{value!r} is not one of {', '.join(map(repr, PACKERS))}", param, ctx)
        return str(value)

    def get_metavar(self, param: Any, ctx: Any = None) -> str:
        return f"[{'|'.join(PACKERS)}]"


def import_module(ctx: click.Context, param: click.Parameter, name: str | None) -> None:
    """Import a module of the user's, which may register packers, costs and formats."""
    if name is None:
        return
    if not all(part.isidentifier() for part in name.split(".")):
        raise click.UsageError(f"--module {name}: the name of a module is needed.")
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # code of the user's
        reason = one_line(error)
        raise click.UsageError(f"--module {name}: cannot be imported ({reason}).") from error


encoder = click.option(
    "--encoder",
    metavar="MODULE:FUNCTION",
    help="Function that returns the run's own task encoder.  [default: as described in the state]",
)
module = click.option(
    "--module",
    metavar="MODULE",
    is_eager=True,
    expose_value=False,
    callback=import_module,
    help="Module of yours to import first; it registers packers, costs or formats of documents.",
)
trusted_module = click.option(
    "--trusted-module", "trusted_modules", multiple=True, help="Module that the YAML may import."
)
jobs = click.option(
    "--jobs",
    type=click.IntRange(1),
    default=lambda: min(8, len(os.sched_getaffinity(0))),
    show_default="number of cores, at most 8",
    help="Number of processes.",
)
part = click.option(
    "--part", metavar="R/N", type=_PartType(), help="Process only units R, R + N, R + 2N, ..."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def together(*options: Any) -> Callable[[Any], Any]:
    """Combine arguments and options into one decorator."""
    return lambda command: functools.reduce(lambda f, option: option(f), options[::-1], command)


chat = together(
    click.option(
        "--chat-template",
        metavar="NAME",
        help="Chat template: 'plain', a .jinja file, one of the several templates of --tokenizer, "
        "or the name or folder of another tokenizer. NAME@2026-01-31 fixes the date in a template."
        "  [default: the template of --tokenizer]",
    ),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ),
)
answers = together(
    chat,
    click.option(
        "--answers",
        type=click.Choice(ANSWERS),
        help="Train all answers of a conversation in one sample, the last one, or each in a sample "
        "of its own.  [default: all if the template permits it, else each]",
    ),
    click.option(
        "--answer-end",
        type=click.Choice(ANSWER_ENDS),
        help="For conversations in which an answer has no end: the end-of-text token, and one "
        "sample per answer if it is not the last, or allow it.  [default: eos]",
    ),
)
special_tokens = together(
    click.option("--eos-token", metavar="TOKEN", help="Token that ends a text."),
    click.option(
        "--bos-token",
        metavar="TOKEN",
        help="Token that begins a text, or none.  [default: the tokenizer's, if it adds one]",
    ),
)
forecast = together(
    click.option("--exact", is_flag=True, help="Plan every row exactly, however long it takes."),
    click.option("--png", type=FILE, help="Draw the forecast as a PNG."),
    click.option("--html", type=FILE, help="Write the forecast as one HTML page."),
    as_json,
)
