# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options by which a command opens a metadataset as a run would, and the dataset of them."""

import json
from pathlib import Path
from typing import Any

import click
from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.cli import special_tokens
from energon_ext.encoders.chat import named_template
from energon_ext.encoders.load import get_train_dataset
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.prompts import PromptTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.splice import MultiSpliceTaskEncoder, SpliceTaskEncoder
from energon_ext.encoders.tokenizers import Tokenizer, load_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.packing import PACKERS
from energon_ext.splice.config import MultiSpliceConfig, splice_from_config

_OPTIONS = (
    click.argument("metadataset", type=click.Path(path_type=Path)),
    click.option("--split", default="train", help="Split of the metadataset."),
    click.option(
        "--seq-length", type=click.IntRange(2, 2**24), default=256, help="Positions of a row."
    ),
    click.option("--packing", type=click.Choice(list(PACKERS)), default="bin"),
    click.option(
        "--tokenizer", default="bytes", help="bytes, a tokenizer.json, a folder or a name."
    ),
    special_tokens,
    click.option(
        "--splice",
        help='Fields of a splice as JSON, as \'{"num_docs": 3, "content_length": 128}\'.',
    ),
    click.option("--spliced-subflavors", help="JSON; splice only sources that have these."),
    click.option("--trusted-module", multiple=True, help="A module that the YAML may name."),
)


def mix_options(command: Any) -> Any:
    """Give a command the arguments of :func:`open_mix`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_mix(
    metadataset: Path,
    *,
    split: str,
    seq_length: int,
    packing: str,
    tokenizer: str,
    eos_token: str | None,
    bos_token: str | None,
    splice: str | None,
    spliced_subflavors: str | None,
    trusted_module: tuple[str, ...],
    task: str = "text",
    chat_template: str | None = None,
    ranks: int = 1,
    micro_batch_rows: int = 1,
    rows_per_step: int | None = None,
) -> tuple[SavableDataset, Tokenizer]:
    """The training dataset of the first rank, by default a row or a prompt a step; tokenizer."""
    loaded = load_tokenizer(tokenizer, eos_token=eos_token, bos_token=bos_token)
    encoder: TaskEncoder
    if task == "text":
        encoder = _of_text(loaded, seq_length, packing, splice, spliced_subflavors)
    elif splice is not None:
        raise ConfigError(f"--splice: of text; --task {task} has none.")
    elif task == "chat":
        template = named_template(chat_template)
        encoder = SFTTaskEncoder(loaded, seq_length, chat_template=template)
    else:
        encoder = PromptTaskEncoder(loaded, chat_template=named_template(chat_template))
    dataset = get_train_dataset(
        metadataset,
        worker_config=WorkerConfig(rank=0, world_size=ranks, num_workers=0),
        batch_size=micro_batch_rows,
        rows_per_step=rows_per_step,
        split_part=split,
        task_encoder=encoder,
        trusted_modules=trusted_module,
    )
    return dataset, loaded


def _of_text(
    loaded: Tokenizer, seq_length: int, packing: str, splice: str | None, subflavors: str | None
) -> PackedTaskEncoder:
    if splice is None:
        if subflavors is not None:
            raise ConfigError("--spliced-subflavors: says which sources --splice is for; add that.")
        return PackedTaskEncoder(loaded, seq_length, packing=packing)
    config = splice_from_config(_json("--splice", splice), "--splice")
    many = isinstance(config, MultiSpliceConfig)
    chosen = _json("--spliced-subflavors", subflavors) if subflavors else None
    encoder_class = MultiSpliceTaskEncoder if many else SpliceTaskEncoder
    return encoder_class(
        loaded, seq_length, config, packing=packing, spliced_subflavors=chosen, named_documents=True
    )


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {text!r:.200} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text!r} found, a JSON object is needed.")
    return value
