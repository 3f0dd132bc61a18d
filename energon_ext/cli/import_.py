# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext import``: convert the data arguments of Megatron-LM to a metadataset."""

import copy
import itertools
import math
import os
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import click
import yaml
from megatron.energon.epathlib import EPath

from energon_ext.cli import echo, one_of
from energon_ext.cli.import_split import (
    NAMES,
    Bounds,
    documents_of,
    parse_split,
    range_of,
    remarks_on,
    tokens_in,
)
from energon_ext.cli.option import FILE
from energon_ext.config.yaml_check import YamlChecker
from energon_ext.config.yaml_file import read_mapping
from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError
from energon_ext.state.files import write_file
from energon_ext.tokens.index import read_pair, without_suffix
from energon_ext.weights.axis import parse_breakpoint

#: Maximum bytes of a file that lists sources.
LONGEST_LIST = 32 * 2**20


class SourceList(NamedTuple):
    """The sources of a list in order, and their weights if the list has any."""

    prefixes: list[str]
    weights: list[float] | None


@click.command("import")
@click.argument("output", type=FILE)
@click.argument("sources", nargs=-1)
@click.option("--data-args-path", type=FILE, multiple=True, help="As in Megatron; once per phase.")
@click.option("--per-split-data-args-path", type=FILE, help="As in Megatron.")
@click.option("--split", help="As in Megatron: 969,30,1.  [default: all train]")
@click.option("--phase-transition-iterations", help="As in Megatron: 1000,2000.")
@click.option(
    "--rule",
    type=click.Choice(["interleave", "blend"]),
    default="interleave",
    help="How sources are mixed: in exact turns or at random.",
)
@click.option("--fim-rate", type=click.FloatRange(0, 1), help="As in Megatron, for --fim-data.")
@click.option("--fim-spm-rate", type=click.FloatRange(0, 1), help="As in Megatron.  [default: .5]")
@click.option("--fim-prefix-token", help="As in Megatron; also an id.")
@click.option("--fim-suffix-token", help="As in Megatron; also an id.")
@click.option("--fim-middle-token", help="As in Megatron; also an id.")
@click.option("--fim-eod-token", help="As in Megatron; also an id. It stays at the end.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
def import_(
    output: Path,
    sources: tuple[str, ...],
    data_args_path: tuple[Path, ...],
    per_split_data_args_path: Path | None,
    split: str | None,
    phase_transition_iterations: str | None,
    rule: str,
    overwrite: bool,
    **fill_in_the_middle: Any,
) -> None:
    """Convert Megatron's --data-path to the metadataset OUTPUT.

    SOURCES are the arguments of --data-path: alternating weights and prefixes, or prefixes alone.
    An interleave keeps shares as exactly as Megatron's blending does.

    Example: energon-ext import mix.yaml 70 data/web 30 data/code --split 98,2,0
    """
    if output.exists() and not overwrite:
        raise ConfigError(f"{output}: already exists; give --overwrite to replace it.")
    per_split = per_split_data_args_path
    inputs = {"SOURCES": sources, "--data-args-path": data_args_path}
    one_of({**inputs, "--per-split-data-args-path": per_split})
    iterations = _iterations(phase_transition_iterations or "")
    if per_split is not None:
        if split or iterations:
            raise ConfigError(f"{per_split}: has its own splits; remove --split and phases.")
        lists = _lists_of_splits(per_split)
        found = {
            NAMES[name]: _sources([given], [], output.parent, None) for name, given in lists.items()
        }
        remarks = _remarks(list(lists.values()))
    else:
        phases = [_source_list(_words(path), str(path)) for path in data_args_path]
        phases = phases or [_source_list(sources, "SOURCES")]
        parts: dict[str, Bounds | None] = {"train": None}
        if split is not None:
            parts = {**parse_split(split)}
        if len(phases) != len(iterations) + 1:
            raise ConfigError(
                f"--phase-transition-iterations: {len(iterations)} transitions need "
                f"{len(iterations) + 1} lists, {len(phases)} found; give each by --data-args-path."
            )
        found = {
            name: _sources(
                phases if name == "train" else phases[:1], iterations, output.parent, part
            )
            for name, part in parts.items()
        }
        remarks = _remarks(phases)
        if split is not None:
            remarks += remarks_on(prefix for phase in phases for prefix in phase.prefixes)
        if "train" not in parts:
            remarks.append("train: its share is 0, so there is no such split.")
    remarks += _leave_out_empty(found)
    if transform := _transform(**fill_in_the_middle):
        for source in itertools.chain(*found.values()):
            source.entry["transform"] = copy.deepcopy(transform)  # no alias in the YAML
        remarks.append("Cuts of fill-in-the-middle are between tokens, Megatron's in the text.")
    splits = {name: {rule: [each.entry for each in sources]} for name, sources in found.items()}
    _write(output, splits, remarks)
    echo("\n".join([*remarks, f"{output}: {', '.join(splits)}"]))


def _transform(fim_rate: float | None, **options: Any) -> dict[str, Any] | None:
    """Return the transform of options of Megatron's fill-in-the-middle; None without a rate."""
    tokens = ("fim_prefix_token", "fim_suffix_token", "fim_middle_token")
    needed = {name: options[name] for name in tokens}
    if fim_rate is None:
        if given := [name for name, value in options.items() if value is not None]:
            raise ConfigError(f"--{given[0].replace('_', '-')}: needs --fim-rate.")
        return None
    if missing := [name for name, value in needed.items() if value is None]:
        raise ConfigError(f"--{missing[0].replace('_', '-')}: is missing, a token is needed.")
    ids = {
        name.removeprefix("fim_").removesuffix("_token"): int(value) if value.isdigit() else value
        for name, value in options.items()
        if name.endswith("_token") and value is not None
    }
    spm_rate, end = options["fim_spm_rate"], ids.pop("eod", None)
    return {
        "fill_in_the_middle": {
            **ids,
            "rate": fim_rate,
            **({} if spm_rate is None else {"spm_rate": spm_rate}),
            **({} if end is None else {"ends": [end]}),
        }
    }


def _write(output: Path, splits: Mapping[str, Any], remarks: Sequence[str]) -> None:
    """Write the metadataset, but only if it can be loaded."""
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset", "splits": splits}
    text = "".join(f"# {line}\n" for line in remarks)
    text += yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    output.parent.mkdir(parents=True, exist_ok=True)
    written = output.with_name(f".{output.name}.new.yaml")
    write_file(written, text.encode())
    try:
        for split in splits:
            YamlChecker().check(written, split)
        written.replace(output)
    except ConfigError as error:
        raise ConfigError(str(error).replace(written.name, output.name)) from error
    finally:
        written.unlink(missing_ok=True)


def _source_list(words: Sequence[Any], where: str) -> SourceList:
    """Parse a list as Megatron does: pairs of weight and prefix, or prefixes alone."""
    if not words:
        raise ConfigError(f"{where}: the list is empty; name a source.")
    for word in map(str, words):
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            raise ConfigError(f"{where}: {word} found, whose bytes are not UTF-8; rename it.")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(map(math.isnan, weights)):
        return SourceList([without_suffix(str(word)) for word in words], None)
    for word, weight in zip(words[::2], weights):
        if math.isnan(weight):
            raise ConfigError(f"{where}: {word!r} found, a weight is needed as for the others.")
    if min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ConfigError(f"{where}: {weights} found, weights >= 0 and not all 0 are needed.")
    return SourceList([without_suffix(str(word)) for word in words[1::2]], weights)


def _number(word: object) -> float:
    """Parse a weight; NaN if the word is not a number."""
    try:
        return float(str(word))
    except ValueError:
        return math.nan


class _Source(NamedTuple):
    """An entry of the metadataset, its weight in each phase, and its tokens if they are known."""

    entry: dict[str, Any]
    weights: list[float]
    tokens: int | None


def _sources(
    phases: Sequence[SourceList], iterations: Sequence[int], folder: Path, bounds: Bounds | None
) -> list[_Source]:
    """Return all sources of a split, each with one weight or one per phase."""
    weights: dict[str, list[float]] = {}
    for number, phase in enumerate(phases):
        for place, prefix in enumerate(phase.prefixes):
            weight = phase.weights[place] if phase.weights else float(_size(prefix, bounds))
            weights.setdefault(prefix, [0.0] * len(phases))[number] += weight
    sources = []
    for prefix, values in weights.items():
        plain = [int(value) if value == int(value) else value for value in values]
        steps = {"step": dict(zip([0, *iterations], plain))}
        is_fixed = os.path.isabs(prefix) or "://" in prefix
        entry: dict[str, Any] = {}
        entry["path"] = prefix if is_fixed else os.path.relpath(prefix, folder)
        entry["weight"] = plain[0] if len(set(plain)) == 1 else steps
        if bounds is not None:
            entry["subset"] = {"range": range_of(bounds, documents_of(prefix))}
        if any(map(_reads_once, phases)) and all(phase.weights is None for phase in phases):
            entry["max_epochs"] = 1
        sources.append(_Source(entry, values, tokens_in(prefix, bounds)))
    return sources


def _size(prefix: str, bounds: Bounds | None) -> int:
    """Return the tokens of a source in a part of it; ConfigError if it is not a pair."""
    tokens = tokens_in(prefix, bounds)
    return read_pair(prefix).tokens if tokens is None else tokens


def _reads_once(given: SourceList) -> bool:
    """Return True if Megatron reads each source only once: several sources without weights."""
    return given.weights is None and len(given.prefixes) > 1


def _remarks(lists: Sequence[SourceList]) -> list[str]:
    """Return comments on differences from Megatron."""
    remarks = ["The order of documents within a source differs from Megatron's."]
    if any(map(_reads_once, lists)):
        remarks.append("Without weights, sources are weighted by tokens and read once.")
    return remarks


def _leave_out_empty(splits: dict[str, list[_Source]]) -> list[str]:
    """Remove sources without tokens in a split, and splits without sources.

    Megatron has no samples of them; a run here refuses a source without tokens.

    Returns:
        Remarks on what was removed.
    """
    remarks = []
    for split, sources in list(splits.items()):
        for source in [each for each in sources if each.tokens == 0]:
            sources.remove(source)
            ends = source.entry.get("subset", {}).get("range", [])
            unit = "documents " if ends and isinstance(ends[0], int) else ""
            where = f" in {unit}{' to '.join(map(str, ends))}" if ends else ""
            remarks.append(f"{split}: {source.entry['path']} has no tokens{where}; left out.")
        totals = [sum(weights) for weights in zip(*(each.weights for each in sources))]
        if totals and all(totals):
            continue
        if split == "train":
            phase = f" of phase {totals.index(0) + 1}" if len(totals) > 1 else ""
            found = f"train: no source{phase} has tokens and a weight above 0."
            raise ConfigError(" ".join([found, *remarks]))
        del splits[split]
        remarks.append(f"{split}: empty, so there is no such split.")
    return remarks


def _lists_of_splits(path: Path) -> dict[str, SourceList]:
    content = read_mapping(EPath(str(path)), may_be_json=True)
    if not content.get("train") or set(content) - set(NAMES):
        raise ConfigError(f"{path}: a mapping with {', '.join(NAMES)} is needed, train not empty.")
    lists = {}
    for name, value in content.items():
        words = value.split() if isinstance(value, str) else value
        if words is None:  # as Megatron writes a split without data
            continue
        if not isinstance(words, list):
            raise ConfigError(f"{path}: {name}: {words!r:.80} found, a list is needed.")
        if words:
            lists[name] = _source_list(words, f"{path}: {name}")
    return lists


def _words(path: Path) -> list[str]:
    try:
        return read_data(path, LONGEST_LIST).decode().split()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file ({error}).") from error


def _iterations(text: str) -> list[int]:
    where = "--phase-transition-iterations"
    steps = sorted(parse_breakpoint(part, where) for part in text.split(",") if part.strip())
    if len({0, *steps}) <= len(steps):
        raise ConfigError(f"{where}: {text!r} contains 0 or a duplicate.")
    return steps
