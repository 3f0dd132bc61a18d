# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments and options that several commands have."""

import os
import re
from pathlib import Path
from typing import Any

import click

from energon_ext.documents.object_store import is_remote
from energon_ext.prepare.claim import Part
from energon_ext.weights.breakpoints import EXAMPLES, count_from


class Count(click.ParamType):  # type: ignore[type-arg]
    """An integer within limits, written as breakpoints may be."""

    name = "count"

    def __init__(self, least: int, most: int = 10**12):
        self.least, self.most = least, most

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        count = count_from(value)
        if count is None or not self.least <= count <= self.most:
            limits = f"an integer from {self.least} to {self.most:,} is needed"
            self.fail(f"{value!r:.80} found; {limits}, as {EXAMPLES}.", param, ctx)
        return count


class _PathOrUrl(click.ParamType):  # type: ignore[type-arg]
    """A local path, or the URL of an object or folder in a store."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | str:
        return value if is_remote(value) else Path(value)


class _PartType(click.ParamType):  # type: ignore[type-arg]
    """``R/N``: every N-th unit from unit R on, counted from 0."""

    name = "part"

    def convert(self, value: Any, param: Any, ctx: Any) -> Part:
        if isinstance(value, Part):
            return value
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value)
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"{value!r:.80} found; R/N with 0 <= R < N is needed.", param, ctx)
        return Part(int(match[1]), int(match[2]))


PATH = click.Path(path_type=Path)
INPUT = _PathOrUrl()
FILE = click.Path(path_type=Path, dir_okay=False)

metadataset = click.argument("metadataset", type=PATH)
split = click.option("--split", "split_part", default="train", help="Split of the metadataset.")
trusted_module = click.option(
    "--trusted-module",
    "trusted_modules",
    multiple=True,
    help="A module that the YAML may name.",
)
chat_template = click.option(
    "--chat-template",
    metavar="NAME",
    help="'plain', or the name or folder of a Hugging Face tokenizer; by default the --tokenizer. "
    "NAME@2026-01-31 where the template writes the date.",
)
jobs = click.option(
    "--jobs",
    type=click.IntRange(1),
    default=lambda: min(8, len(os.sched_getaffinity(0))),
    show_default="the cores, at most 8",
    help="Processes.",
)
part = click.option(
    "--part", metavar="R/N", type=_PartType(), help="Make only the units R, R + N, ..."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


def special_tokens(command: Any) -> Any:
    """The options of a command on what a tokenizer puts around a text."""
    for role, end in (("bos", "begins"), ("eos", "ends")):
        name = f"Token of --tokenizer that {end} a text."
        command = click.option(f"--{role}-token", metavar="TOKEN", help=name)(command)
    return command
