# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options by which a command opens a metadataset as a run would, and the dataset of them."""

import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any, Iterable

import click
from click.core import ParameterSource
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.cli import option
from energon_ext.encoders.chat import named_template
from energon_ext.encoders.load import get_train_dataset
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.prompts import PromptTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.splice import MultiSpliceTaskEncoder, SpliceTaskEncoder
from energon_ext.encoders.tokenizer_protocol import Tokenizer
from energon_ext.encoders.tokenizers import ByteTokenizer, load_tokenizer
from energon_ext.encoders.written_tokenizer import written_tokenizer
from energon_ext.errors import ConfigError, printable
from energon_ext.packing import PACKERS
from energon_ext.plan.source import Blend
from energon_ext.splice.config import MultiSpliceConfig, splice_from_config

#: The arguments of :func:`open_mix`.
mix_options = option.together(
    option.metadataset,
    option.split,
    click.option(
        "--seq-length", type=click.IntRange(2, 2**24), default=256, help="Positions of a row."
    ),
    click.option("--packing", type=click.Choice(list(PACKERS)), default="bin"),
    click.option(
        "--tokenizer",
        help="bytes, a tokenizer.json, a .model, a folder or a name.  [default: the one that wrote "
        "the token files, else bytes]",
    ),
    option.special_tokens,
    click.option(
        "--task",
        type=click.Choice(["text", "chat", "prompts"]),
        default="text",
        help="What the data is for: pretraining, fine-tuning or reinforcement.",
    ),
    option.chat_template,
    click.option(
        "--splice",
        help='Fields of a splice as JSON, as \'{"num_docs": 3, "content_length": 128}\'.',
    ),
    click.option(
        "--encoder",
        metavar="MODULE:FUNCTION",
        help="Makes a task encoder of your own, in place of the options of ours.",
    ),
    option.trusted_module,
)


def open_mix(
    metadataset: Path,
    *,
    split_part: str,
    trusted_modules: tuple[str, ...],
    encoder: str | None = None,
    ranks: int = 1,
    batch_size: int = 1,
    rows_per_step: int | None = None,
    **options: Any,
) -> tuple[SavableDataset, Tokenizer]:
    """The training dataset of the first rank, by default a row or a prompt a step; tokenizer.

    Args:
        encoder: where a function of the user's makes it.
        options: of :func:`make_encoder`, where they make it.
    """
    if encoder is not None:
        _refuse_beside_encoder(options)
        made = named_encoder(encoder, DynamicBlendMixin)
    else:
        name = options.pop("tokenizer")
        special = {token: options.pop(token) for token in ("eos_token", "bos_token")}
        if name is None and not any(special.values()):
            loaded = written_tokenizer(metadataset, split_part, trusted_modules)
        else:
            loaded = load_tokenizer(name or "bytes", **special)
        made = make_encoder(loaded, **options)
    dataset = get_train_dataset(
        metadataset,
        worker_config=WorkerConfig(rank=0, world_size=ranks, num_workers=0),
        batch_size=batch_size,
        rows_per_step=rows_per_step,
        split_part=split_part,
        task_encoder=made,
        trusted_modules=trusted_modules,
    )
    return dataset, getattr(made, "tokenizer", None) or ByteTokenizer()


def tell_undecided(blend: Blend, step: int) -> None:
    """Say on stderr from where live weights are not decided, if that is up to a step."""
    for live in blend.live_weights:
        if not live.covers(step):
            said = f"no line covers steps from {live.next_step} on; the last weights are used"
            click.echo(printable(f"{live.path}: {said}."), err=True)


def _refuse_beside_encoder(options: Iterable[str]) -> None:
    source_of = click.get_current_context().get_parameter_source
    for name in options:
        if source_of(name) is ParameterSource.COMMANDLINE:
            said = "the encoder that --encoder makes says it; leave it out"
            raise ConfigError(f"--{name.replace('_', '-')}: {said}.")


def named_encoder(name: str, needed: type) -> Any:
    """The encoder that a function of the user's makes."""
    sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        meant = "a function without arguments in a module that can be imported here"
        reason = f"MODULE:FUNCTION is needed, {meant}"
        raise ConfigError(f"--encoder {name}: {reason} ({error}).") from error
    if not isinstance(found, needed):
        made = type(found).__name__
        raise ConfigError(f"--encoder {name}: makes a {made}, a {needed.__name__} is needed.")
    return found


def make_encoder(
    tokenizer: Tokenizer,
    *,
    task: str = "text",
    chat_template: str | None = None,
    seq_length: int = 2,
    packing: str = "bin",
    splice: str | None = None,
) -> Any:
    """The task encoder that options name, for ``text``, ``chat`` or ``prompts``."""
    if task != "text":
        if splice is not None:
            raise ConfigError(f"--splice: is for text; --task {task} has none.")
        template = named_template(chat_template)
        if task == "chat":
            return SFTTaskEncoder(tokenizer, seq_length, chat_template=template)
        return PromptTaskEncoder(tokenizer, chat_template=template)
    if splice is None:
        return PackedTaskEncoder(tokenizer, seq_length, packing=packing)
    try:
        fields = json.loads(splice)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--splice: {splice!r:.200} is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--splice: {splice!r} found, a JSON object is needed.")
    config = splice_from_config(fields, "--splice")
    many = isinstance(config, MultiSpliceConfig)
    encoder_class = MultiSpliceTaskEncoder if many else SpliceTaskEncoder
    return encoder_class(tokenizer, seq_length, config, packing=packing, named_documents=True)
