# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext tokenize``: the cache of text, made before a run."""

from pathlib import Path
from typing import Any

import click
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml_json
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.cli import echo, option
from energon_ext.cli.mix import make_encoder, named_encoder
from energon_ext.config.references import TokenFileFactory
from energon_ext.config.yaml_file import read_mapping
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.text_sources import cached_text, load_split
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.prepare.cache import Cached, make, make_part
from energon_ext.prepare.claim import Part


@click.command()
@option.metadataset
@click.option("--split", multiple=True, help="A split.  [default: all of METADATASET]")
@click.option("--tokenizer", metavar="NAME", help="'bytes', a name or a local file.")
@option.special_tokens
@click.option("--task", type=click.Choice(["text", "chat"]), default="text")
@option.chat_template
@click.option(
    "--encoder",
    metavar="MODULE:FUNCTION",
    help="Makes the task encoder of the run, in place of --tokenizer and --task.",
)
@option.jobs
@option.part
@option.trusted_module
def tokenize(
    metadataset: Path,
    split: tuple[str, ...],
    tokenizer: str | None,
    encoder: str | None,
    jobs: int,
    part: Part | None,
    trusted_modules: tuple[str, ...],
    **options: Any,
) -> None:
    """Tokenize the text of METADATASET once, for all runs on it.

    The tokens go to the folder that ENERGON_EXT_CACHE names, else to one beside METADATASET, where
    a run with the same tokenizer finds them. The same command again continues. --part 0/20 to
    --part 19/20 tokenize in 20 processes, on any machines that share the folder.

    Example: energon-ext tokenize mix.yaml --tokenizer my/tokenizer.json --jobs 16
    """
    if encoder is not None:
        made = named_encoder(encoder, PackedTaskEncoder)
    elif tokenizer is not None:
        special = {token: options.pop(token) for token in ("eos_token", "bos_token")}
        made = make_encoder(load_tokenizer(tokenizer, **special), **options)
    else:
        raise ConfigError("--tokenizer is missing: the one of the run; or give --encoder.")
    texts: dict[Path, Cached] = {}
    for name in split or splits_of(metadataset):
        for entry in load_split(metadataset, name, made, trusted_modules):
            if not isinstance(entry.dataset, TokenFileFactory):
                text = cached_text(made, entry)
                texts[text.folder] = text
    if not texts:
        raise ConfigError(f"{metadataset}: names no text; token files need no tokenizing.")
    for text in texts.values():
        if make_now(text, jobs, part):
            files = text.open()
            count = f"{len(files):,} documents, {files.num_tokens:,} tokens"
            echo(f"{text.name}: {count} in {text.folder}")


def make_now(cached: Cached, jobs: int, part: Part | None) -> bool:
    """Make what is missing of a source, or a part of it; False while other parts are missing."""
    if part is None:
        make(cached, jobs, wait_seconds=0.0)
        return True
    make_part(cached, part, jobs)
    if not cached.is_there:
        echo(f"{cached.name}: part {part} is {cached.verb}, other parts are not.")
    return cached.is_there


def splits_of(path: Path) -> list[str]:
    """The splits of a metadataset, of a prepared folder, or the only one of JSON Lines."""
    if path.suffix in (".yaml", ".yml"):
        return list(read_mapping(EPath(str(path))).get("splits") or {})
    for name in ("split.yaml", "split.json"):
        config = EPath(str(path)) / MAIN_FOLDER_NAME / name
        if config.is_file():
            parts = load_yaml_json(config).get("split_parts", {})
            return [split for split, files in parts.items() if files]
    return ["train"]
