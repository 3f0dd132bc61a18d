# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Options with which a command opens a metadataset as a run would, and the resulting dataset."""

import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.chats.template_names import named_template
from energon_ext.cli import option
from energon_ext.config.mix import sample_entries
from energon_ext.data_files import parse_json
from energon_ext.encoders.load import get_train_dataset, load_mix
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.preferences import PreferenceTaskEncoder
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.prompts import PromptTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.sources import check_excluded_names, read_live_weights
from energon_ext.encoders.splice import MultiSpliceTaskEncoder, SpliceTaskEncoder
from energon_ext.encoders.splicing import choose_splices
from energon_ext.encoders.written_tokenizer import written_tokenizer
from energon_ext.errors import ConfigError, printable
from energon_ext.mixture.checks import check_mixture
from energon_ext.plan.blend import Blend
from energon_ext.plan.clock import Clock
from energon_ext.plan.topology import Topology
from energon_ext.splice.config import MultiSpliceConfig, splice_from_config
from energon_ext.streamed.source import StreamedSource
from energon_ext.tokenizers.protocol import Tokenizer, UnknownTokenizer
from energon_ext.tokenizers.tokenizers import load_tokenizer

#: Returns the tokenizer of ``(metadataset, split, trusted modules)``.
_FindTokenizer = Callable[[Path, str, tuple[str, ...]], Tokenizer]

#: Why an option is refused next to --encoder.
SET_BY_ENCODER = "is set by --encoder; remove it"

#: Tasks that read an option of :func:`make_encoder`; the others are for all.
_TASKS_OF = {
    "splice": ("text",),
    "chat_template": ("chat", "prompts", "preferences"),
    "chat_template_kwargs": ("chat", "prompts", "preferences"),
    "answers": ("chat",),
    "answer_end": ("chat", "preferences"),
}

#: The arguments of :func:`open_mix`.
mix_options = option.together(
    option.metadataset,
    option.split,
    click.option("--seq-length", type=option.ROW_TOKENS, default=256, help="Positions per row."),
    click.option(
        "--packing", type=option.PackerName(), default="bin", help="Packing of documents."
    ),
    click.option(
        "--tokenizer",
        help="'bytes', a tokenizer.json or .model file, a folder, or a Hugging Face name.  "
        "[default: the tokenizer recorded in the token files, or bytes; none to plan token files]",
    ),
    option.special_tokens,
    click.option(
        "--task",
        type=click.Choice(["text", "chat", "prompts", "preferences"]),
        default="text",
        help="Pretraining on text, fine-tuning on chats, prompts for reinforcement learning, or "
        "preferences.",
    ),
    option.answers,
    click.option(
        "--splice",
        help='Splice settings as JSON, such as \'{"num_docs": 3, "content_length": 128}\'.',
    ),
    click.option(
        "--encoder",
        metavar="MODULE:FUNCTION",
        help="Function that returns your own task encoder; replaces --seq-length to --splice.",
    ),
    option.module,
    option.trusted_module,
)


def open_mix(
    metadataset: Path,
    *,
    split_part: str,
    trusted_modules: tuple[str, ...],
    ranks: int = 1,
    batch_size: int = 1,
    rows_per_step: int | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[SavableDataset, Any]:
    """Return the training dataset of rank 0, by default with one row per step, and its tokenizer.

    The tokenizer is None if a user's encoder has none.

    Args:
        **options: see :func:`task_encoder_of`.
    """
    task_encoder = task_encoder_of(metadataset, split_part, trusted_modules, **options)
    dataset = open_dataset(
        metadataset,
        task_encoder,
        split_part=split_part,
        trusted_modules=trusted_modules,
        ranks=ranks,
        batch_size=batch_size,
        rows_per_step=rows_per_step,
        seed=seed,
    )
    return dataset, getattr(task_encoder, "tokenizer", None)


def open_dataset(
    metadataset: Path,
    task_encoder: Any,
    *,
    ranks: int,
    workers: int = 0,
    seed: int,
    **options: Any,
) -> SavableDataset:
    """Return the training dataset of rank 0."""
    config = WorkerConfig(rank=0, world_size=ranks, num_workers=workers, seed_offset=seed)
    return get_train_dataset(
        metadataset, worker_config=config, task_encoder=task_encoder, **options
    )


def task_encoder_of(
    metadataset: Path,
    split_part: str,
    trusted_modules: tuple[str, ...],
    encoder: str | None = None,
    default_tokenizer: _FindTokenizer = written_tokenizer,
    **options: Any,
) -> Any:
    """Return the task encoder that the options describe.

    Args:
        encoder: ``MODULE:FUNCTION`` that returns it.
        default_tokenizer: finds the tokenizer of a metadataset if no option names one.
        **options: arguments for the tokenizer and :func:`make_encoder`; not with ``encoder``.
    """
    if encoder is not None:
        refuse_given(options, SET_BY_ENCODER)
        return named_encoder(encoder, DynamicBlendMixin)
    name = options.pop("tokenizer")
    special = {token: options.pop(token) for token in ("eos_token", "bos_token")}
    if name is None and not any(special.values()):
        loaded = default_tokenizer(metadataset, split_part, trusted_modules)
    else:
        loaded = load_tokenizer(name or "bytes", **special)
    return make_encoder(loaded, **options)


def refuse_given(names: Iterable[str], reason: str) -> None:
    """Raise ConfigError if any of these options is on the command line."""
    source_of = click.get_current_context().get_parameter_source
    for name in names:
        if source_of(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')}: {reason}.")


def weights_of(
    metadataset: Path,
    *,
    split_part: str,
    trusted_modules: tuple[str, ...],
    encoder: str | None = None,
    **options: Any,
) -> tuple[Blend, list[str]] | None:
    """Return a blend without rows, from the YAML and the indices alone, and its subsets.

    Returns None if all sources are token files, which a run opens at no cost, or if some are
    spliced, so that shares depend on documents.
    """
    # A module of the user's may register formats of documents.
    task_encoder = encoder and task_encoder_of(
        metadataset, split_part, trusted_modules, encoder, **options
    )
    mix, _ = load_mix(metadataset, split_part=split_part, trusted_modules=trusted_modules)
    if not sample_entries(mix.entries):
        return None
    task_encoder = task_encoder or task_encoder_of(
        *(metadataset, split_part, trusted_modules),
        default_tokenizer=lambda *names: UnknownTokenizer(),
        **options,
    )
    if choose_splices(mix.entries, task_encoder.task().spec(mix.entries, 0)).by_key:
        return None
    read_live_weights(mix)
    check_excluded_names(mix)
    limits = {entry.key: entry.max_epochs for entry in mix.entries}
    check_mixture(mix.tree, mix.axis, limits, absent={}, splices={})
    sources = [
        StreamedSource(entry.key, None, shown_as=entry.name, loss_weight=entry.loss_weight)
        for entry in mix.entries
    ]
    subsets = [
        f"{entry.name or entry.key}: a subset of {entry.budget.unit}: {entry.budget.amount:,}"
        for entry in mix.entries
        if entry.budget is not None
    ]
    return Blend(sources, mix.tree, Clock(mix.axis, Topology(1), rows=mix.run.rows)), subsets


def warn_of_undecided_weights(blend: Blend, step: int) -> None:
    """Warn on stderr if live weights are not decided up to a step."""
    for live in blend.live_weights:
        if not live.covers(step):
            reason = f"no line covers steps from {live.next_step} on; the last weights are used"
            click.echo(printable(f"{live.path}: {reason}."), err=True)


def named_encoder(name: str, needed: type) -> Any:
    """Call the function ``MODULE:FUNCTION`` and return its task encoder."""
    sys.path.insert(0, os.getcwd())
    try:
        encoder = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        wanted = "MODULE:FUNCTION is needed, an importable function without arguments"
        raise ConfigError(f"--encoder {name}: {wanted} ({error}).") from error
    if not isinstance(encoder, needed):
        kind = type(encoder).__name__
        raise ConfigError(f"--encoder {name}: returns a {kind}, a {needed.__name__} is needed.")
    return encoder


def make_encoder(
    tokenizer: Tokenizer,
    *,
    task: str = "text",
    chat_template: str | None = None,
    chat_template_kwargs: str | None = None,
    answers: str | None = None,
    answer_end: str | None = None,
    seq_length: int = 2,
    packing: str = "bin",
    splice: str | None = None,
) -> Any:
    """Return the task encoder for ``text``, ``chat``, ``prompts`` or ``preferences``.

    Raises:
        ConfigError: an option has a wrong value, or is for other tasks.
    """
    _check_task(
        task,
        splice=splice,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        answers=answers,
        answer_end=answer_end,
    )
    if task != "text":
        variables = _json_object("--chat-template-kwargs", chat_template_kwargs or "{}")
        template = named_template(chat_template, tokenizer, variables)
        if task == "chat":
            return SFTTaskEncoder(
                *(tokenizer, seq_length),
                chat_template=template,
                answers=answers,
                answer_end=answer_end,
            )
        if task == "preferences":
            return PreferenceTaskEncoder(
                tokenizer, seq_length, chat_template=template, answer_end=answer_end
            )
        return PromptTaskEncoder(tokenizer, chat_template=template)
    if splice is None:
        return PackedTaskEncoder(tokenizer, seq_length, packing=packing)
    fields = _json_object("--splice", splice)
    config = splice_from_config(fields, "--splice")
    many = isinstance(config, MultiSpliceConfig)
    encoder_class = MultiSpliceTaskEncoder if many else SpliceTaskEncoder
    return encoder_class(tokenizer, seq_length, config, packing=packing, named_documents=True)


def _check_task(task: str, **given: str | None) -> None:
    """Raise ConfigError for an option that is for other tasks."""
    for name, value in given.items():
        if value is not None and task not in _TASKS_OF[name]:
            tasks = " or ".join(_TASKS_OF[name])
            raise ConfigError(f"--{name.replace('_', '-')}: is for {tasks}, not for {task}.")


def _json_object(option_name: str, text: str) -> dict[str, Any]:
    """Return the JSON object that is the value of an option."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{option_name}: {text!r:.200} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option_name}: {text!r:.200} found, a JSON object is needed.")
    return value
