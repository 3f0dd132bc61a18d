# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext plan``: what a run would read, before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import click

from energon_ext.cli import echo, special_tokens, table
from energon_ext.errors import ConfigError

if TYPE_CHECKING:
    from energon_ext.encoders.tokenizers import Tokenizer
    from energon_ext.plan.dataset import BlendedDataset
    from energon_ext.splice.source import SpliceSource

#: Documents of a source that are listed.
MOST_DOCUMENTS = 40


@click.command()
@click.argument("metadataset", type=click.Path(path_type=Path))
@click.option("--split", default="train", help="Split of the metadataset.")
@click.option("--seq-length", type=click.IntRange(2), default=256, help="Positions of a row.")
@click.option("--tokenizer", default="bytes", help="bytes, a tokenizer.json, a folder or a name.")
@special_tokens
@click.option("--at", default="", help="Steps, as 0,100,500.  [default: the breakpoints]")
@click.option(
    "--splice", help='Fields of a splice as JSON, as \'{"num_docs": 3, "content_length": 128}\'.'
)
@click.option("--spliced-subflavors", help="JSON; splice only sources that have these.")
@click.option("--trusted-module", multiple=True, help="A module that the YAML may name.")
def plan(
    metadataset: Path,
    split: str,
    seq_length: int,
    tokenizer: str,
    eos_token: str | None,
    bos_token: str | None,
    at: str,
    splice: str | None,
    spliced_subflavors: str | None,
    trusted_module: tuple[str, ...],
) -> None:
    """Show the shares that METADATASET plans, and what a splice would show.

    A share is one of rows, drawn last: it changes at the step of its breakpoint, without a lag.
    Reads the documents of spliced sources once, and no others.
    """
    from megatron.energon import WorkerConfig

    from energon_ext.encoders.load import get_train_dataset
    from energon_ext.encoders.tokenizers import load_tokenizer
    from energon_ext.plan.lookup import find_blend
    from energon_ext.splice.source import splices_of

    dataset = get_train_dataset(
        metadataset,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        split_part=split,
        task_encoder=_encoder(
            load_tokenizer(tokenizer, eos_token=eos_token, bos_token=bos_token),
            seq_length,
            splice,
            spliced_subflavors,
        ),
        trusted_modules=trusted_module,
    )
    blend = find_blend(dataset)
    echo(_shares(blend, _integers(at) or sorted({0, *blend.tree.breakpoints()})))
    for source in splices_of(dataset):
        echo("\n" + _documents(source))


def _encoder(loaded: Tokenizer, seq_length: int, splice: str | None, subflavors: str | None) -> Any:
    from energon_ext.encoders.pretrain import PackedTaskEncoder
    from energon_ext.splice import MultiSpliceConfig, SpliceConfig
    from energon_ext.splice.encoders import MultiSpliceTaskEncoder, SpliceTaskEncoder

    if splice is None:
        return PackedTaskEncoder(loaded, seq_length)
    fields = _json("--splice", splice)
    many = "num_docs" in fields
    config_class = MultiSpliceConfig if many else SpliceConfig
    known = config_class.__dataclass_fields__
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(
            f"--splice: no field {', '.join(unknown)} in {config_class.__name__}; it has "
            f"{', '.join(known)}."
        )
    chosen = _json("--spliced-subflavors", subflavors) if subflavors else None
    encoder_class = MultiSpliceTaskEncoder if many else SpliceTaskEncoder
    return encoder_class(
        loaded, seq_length, config_class(**fields), spliced_subflavors=chosen, named_documents=True
    )


def _shares(blend: BlendedDataset, positions: Sequence[int]) -> str:
    columns = [blend.planned_shares(position) for position in positions]
    rows = [[name, *(f"{shares[name]:.2%}" for shares in columns)] for name in columns[0]]
    if len(rows) > MOST_DOCUMENTS:
        rows[MOST_DOCUMENTS:] = [[f"... {len(rows) - MOST_DOCUMENTS} more", *[""] * len(columns)]]
    return table([["share at step", *map(str, positions)], *rows])


def _documents(source: SpliceSource) -> str:
    from energon_ext.splice import SpliceIndex

    index = source.examples
    assert isinstance(index, SpliceIndex), "training shows an index, not a grid"
    counts = zip(index.doc_lengths, index.pairs, index.quotas)
    shares = zip(index.token_shares(), index.coverage())
    rows = [
        [name.rpartition("/")[2], *(f"{count:,}" for count in own), f"{share:.2%}", f"{seen:,.2f}"]
        for name, own, (share, seen) in list(zip(source.names, counts, shares))[:MOST_DOCUMENTS]
    ]
    more = len(source.names) - len(rows)
    title = (
        f"{source.names[0].rpartition('/')[0]}: {len(source.names):,} documents, "
        f"{int(index.doc_lengths.sum()):,} tokens, {index.size:,} examples in an epoch"
    )
    header = ["document", "tokens", "pairs", "examples", "share", "views of a token"]
    return title + "\n" + table([header, *rows]) + (f"\n... {more:,} more" if more else "")


def _integers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise ConfigError(f"--at: {text!r} found; steps like 0,100,500 are needed.")
    return numbers


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option}: {text!r} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text!r} found, a JSON object is needed.")
    return value
