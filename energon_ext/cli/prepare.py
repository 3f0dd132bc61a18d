# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext prepare``: text and conversations of any kind into token files."""

from pathlib import Path
from typing import Any

import click

from energon_ext.cli import documents, echo, special_tokens
from energon_ext.cli.documents import Corpus, Unreadable
from energon_ext.cli.encoding import Encoding
from energon_ext.cli.energon_documents import energon_dataset
from energon_ext.cli.token_writer import Written, write_token_files
from energon_ext.encoders.chat import named_template
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("output", type=FILE)
@click.argument("files", type=FILE, nargs=-1)
@click.option("--text", type=FILE, multiple=True, help="UTF-8 text files, one document each.")
@click.option("--separator", help="Text between two documents of one --text file.")
@click.option("--folder", type=FILE, help="Read the files of a folder.")
@click.option("--glob", default="**/*.txt", help="Which files of --folder.")
@click.option(
    "--jsonl",
    type=FILE,
    multiple=True,
    help="JSON Lines files, also .gz and .zst, or folders of them; one document a line.",
)
@click.option("--parquet", type=FILE, multiple=True, help="Parquet files, or folders of them.")
@click.option("--key", default="text", help="Where the text is in JSON, Parquet or HF.")
@click.option("--hf-dataset", metavar="NAME", help="A Hugging Face dataset, or a folder.")
@click.option("--hf-config", metavar="NAME", help="Configuration of --hf-dataset.")
@click.option("--hf-split", default="train", help="Split of --hf-dataset.")
@click.option("--hf-streaming", is_flag=True, help="Read --hf-dataset without downloading it all.")
@click.option("--dataset", type=FILE, help="A prepared webdataset, or a metadataset.")
@click.option(
    "--split",
    multiple=True,
    default=("train", "val"),
    help="Splits of --dataset. Several stay what they are, one is divided by --val.",
)
@click.option("--trusted-module", multiple=True, help="A module that the YAML may name.")
@click.option(
    "--val",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    help="Share of the documents for the split val, chosen by a hash of the text.",
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, help="Selects another val split.")
@click.option("--min-chars", type=click.IntRange(1), default=1, help="Leave shorter documents out.")
@click.option("--tokenizer", metavar="NAME", help="Needed: 'bytes', a name or a local file.")
@special_tokens
@click.option("--chat", is_flag=True, help="Conversations: `messages`, or `prompt` and `response`.")
@click.option(
    "--chat-template",
    metavar="NAME",
    help="'plain', or the name or folder of a Hugging Face tokenizer; by default the --tokenizer.",
)
@click.option("--seq-length", type=click.IntRange(2), help="Of the rows that --chat is to fit in.")
@click.option(
    "--over-long",
    type=click.Choice(["cut", "error"]),
    default="cut",
    help="What becomes of a conversation of more than --seq-length + 1 tokens.",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    help="What becomes of documents that cannot be read; those left out are counted.",
)
@click.option("--force", is_flag=True, help="Replace the token files at OUTPUT.")
def prepare(
    output: Path,
    files: tuple[Path, ...],
    val: float,
    seed: int,
    min_chars: int,
    tokenizer: str | None,
    eos_token: str | None,
    bos_token: str | None,
    chat: bool,
    chat_template: str | None,
    seq_length: int | None,
    over_long: str,
    on_error: str,
    force: bool,
    **inputs: Any,
) -> None:
    """Write text to OUTPUT as Megatron's token files.

    One kind of input: --text, --folder, --jsonl, --parquet, --hf-dataset or --dataset. FILES are
    further files of --text, --jsonl or --parquet, so a shell pattern works.

    \b
    energon-ext prepare data/books --text books/*.txt --tokenizer my/tokenizer.json
    energon-ext prepare data/code --folder src --glob '**/*.py' --tokenizer my/tokenizer.json
    energon-ext prepare data/web --jsonl web-*.jsonl --key content --tokenizer my/tokenizer.json
    energon-ext prepare data/tokens --dataset data/webdataset --tokenizer my/tokenizer.json
    energon-ext prepare data/chat --chat --jsonl chat.jsonl --tokenizer NAME --seq-length 4096

    Token files are OUTPUT/train.bin and .idx, and the same for val; a metadataset names them as
    `path: data/web/train`. Those of --chat have weights, so that answers alone are trained on.
    """
    if tokenizer is None:
        raise ConfigError(
            "--tokenizer is missing: 'bytes', a tokenizer.json, a folder or a Hugging Face name. "
            "Text that is to stay text needs JSON Lines and `energon prepare`."
        )
    loaded = load_tokenizer(tokenizer, eos_token=eos_token, bos_token=bos_token)
    encoder = None
    if chat:
        if seq_length is None:
            raise ConfigError(
                "--chat: --seq-length is missing; conversations are cut to rows of so many "
                "positions."
            )
        template = named_template(chat_template)
        encoder = SFTTaskEncoder(loaded, seq_length, chat_template=template, over_long=over_long)
    encoding = Encoding(loaded, encoder)
    unreadable = Unreadable(skip=on_error == "skip")
    written = write_token_files(
        _corpus(files, chat, unreadable, inputs),
        output,
        encoding,
        val_fraction=val,
        seed=seed,
        min_chars=min_chars,
        force=force,
        unreadable=unreadable,
    )
    echo(_summary(output, written, encoding, unreadable))


def _summary(output: Path, written: Written, encoding: Encoding, unreadable: Unreadable) -> str:
    columns = ("documents", "characters", "tokens")
    lines = [f"{output}:", " " * 9 + "".join(f"{column:>16}" for column in columns)]
    for split, counts in written.splits.items():
        cells = "".join(f"{counts[column]:>16,}" for column in columns)
        lines.append(f"  {split:<7}{cells}")
    if written.too_short:
        lines.append(f"  left out as too short: {written.too_short:,}")
    for to_be, left_out in (("read", unreadable), ("trained on", encoding.refused)):
        if left_out.count:
            lines.append(f"  left out, not to be {to_be}: {left_out.count:,}")
            lines.append(f"    the first: {left_out.first}")
    return "\n".join(lines)


def _corpus(
    files: tuple[Path, ...], chat: bool, unreadable: Unreadable, inputs: dict[str, Any]
) -> Corpus:
    """The documents that the options of :func:`prepare` on its input speak of."""
    options = ("--text", "--folder", "--jsonl", "--parquet", "--hf-dataset", "--dataset")
    kinds = [option for option in options if inputs[option[2:].replace("-", "_")]]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise ConfigError(f"Give one kind of input of {', '.join(options)}; found {found}.")
    (kind,) = kinds
    if files and kind not in ("--text", "--jsonl", "--parquet"):
        raise ConfigError(
            f"{files[0]}: further files go with --text, --jsonl, --parquet, not {kind}."
        )
    if chat and kind in ("--text", "--folder"):
        raise ConfigError(
            f"--chat: {kind} holds no conversations; give rows of JSON, Parquet or a dataset."
        )
    if kind == "--text":
        return documents.text_files([*inputs["text"], *files], unreadable, inputs["separator"])
    if kind == "--folder":
        found_files = documents.folder_files(inputs["folder"], inputs["glob"])
        return documents.text_files(found_files, unreadable, inputs["separator"])
    if kind == "--dataset":
        if unreadable.skip:
            raise ConfigError(
                "--on-error skip: --dataset is read by Energon, which has checked it."
            )
        return energon_dataset(
            inputs["dataset"], inputs["split"], chat=chat, trusted_modules=inputs["trusted_module"]
        )
    read_row = documents.read_conversation if chat else documents.text_under(inputs["key"])
    if kind == "--jsonl":
        return documents.jsonl_files([*inputs["jsonl"], *files], read_row, unreadable)
    if kind == "--parquet":
        return documents.parquet_files([*inputs["parquet"], *files], read_row, unreadable)
    return documents.hugging_face_dataset(
        inputs["hf_dataset"],
        config=inputs["hf_config"],
        split=inputs["hf_split"],
        streaming=inputs["hf_streaming"],
        read_row=read_row,
        unreadable=unreadable,
    )
