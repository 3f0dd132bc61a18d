# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many mixes of the same sources at once: a metadataset and a forecast for each line of a table."""

import copy
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from megatron.energon.epathlib import EPath

from energon_ext.arguments import choices
from energon_ext.cli import echo, echo_json, table
from energon_ext.cli.forecast import epochs_by_key, plans_rows
from energon_ext.config.yaml_file import read_mapping
from energon_ext.data_files import read_data
from energon_ext.encoders.load import load_mix
from energon_ext.errors import ConfigError, ZeroWeightsError
from energon_ext.mixture.tree import BLEND, INTERLEAVE, Tree
from energon_ext.plan.blend import Blend
from energon_ext.plan.estimate import estimate, row_contents
from energon_ext.plan.forecast import Forecast, epochs_at, forecast
from energon_ext.plan.run import Run
from energon_ext.state.files import write_file

#: Column of a table of mixes that names them.
NAME = "mix"

_MAX_BYTES = 64 * 2**20

#: Sources with a column of their own in the printed table.
_MAX_COLUMNS = 8


class MixTable(NamedTuple):
    """Weights of the entries of a metadataset in many mixes.

    Attributes:
        weights: of the entries in their order, by name of the mix.
        contents: the metadataset of each mix, by name.
    """

    weights: dict[str, list[float]]
    contents: dict[str, dict[str, Any]]


def read_mixes(metadataset: Path, path: Path, split: str) -> MixTable:
    """Read a CSV file with a line for each mix, and a column for each entry of a metadataset.

    Args:
        metadataset: a file whose split is a list of weighted entries.
        path: the table. Its column ``mix`` names the mixes; the others are called as the entries:
            by their ``name``, or else their ``path``.

    Raises:
        ConfigError: names differ, or weights are not numbers >= 0, or are all 0.
    """
    content = read_mapping(EPath(str(metadataset)))
    names = [_name_of(entry) for entry in _entries(content, split, metadataset)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{metadataset}: {twice[0]} is there twice; give both a `name`.")
    weights = dict(_lines(path, names))
    if not weights:
        raise ConfigError(f"{path}: no mix found; give a line for each.")
    contents = {}
    for name, values in weights.items():
        changed = copy.deepcopy(content)
        for entry, value in zip(_entries(changed, split, metadataset), values):
            entry["weight"] = value
        contents[name] = changed
    return MixTable(weights, contents)


def _entries(content: Mapping[str, Any], split: str, path: Path) -> list[dict[str, Any]]:
    """Return the weighted entries of a split, which are not checked further."""
    splits = content.get("splits")
    node: Any = splits.get(split) if isinstance(splits, dict) else None
    rule = next((r for r in (BLEND, INTERLEAVE) if isinstance(node, dict) and r in node), None)
    if rule is None or not all(isinstance(each, dict) for each in node[rule]):
        raise ConfigError(f"{path}: {split}: --mixes needs a `blend` or an `interleave` there.")
    if "weights_file" in node:
        raise ConfigError(f"{path}: {split}.weights_file: sets the weights; remove it for --mixes.")
    entries: list[dict[str, Any]] = node[rule]
    return entries


def _name_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or entry.get("path") or "join")


def _lines(path: Path, names: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    """Yield the name of each mix with its weights."""
    try:
        text = read_data(path, _MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--mixes {path}: cannot be read ({error}).") from error
    reader, seen = csv.DictReader(io.StringIO(text), skipinitialspace=True), set()
    columns = list(reader.fieldnames or [])
    _check_columns(path, columns, names)
    for line in reader:
        where, mix = f"{path}:{reader.line_num}", str(line[NAME]).strip()
        if not re.fullmatch(r"[\w.-]{1,100}", mix) or mix in seen:
            needed = "a name of letters, digits, '.', '_' and '-' is needed, another for each mix"
            raise ConfigError(f"{where}: {NAME}: {mix!r:.80} found; {needed}.")
        seen.add(mix)
        if None in line or None in line.values():
            raise ConfigError(f"{where}: {len(columns)} values are needed, as in the first line.")
        weights = [_weight(line[name], f"{where}: {name}") for name in names]
        if not any(weights):
            raise ConfigError(f"{where}: all weights are 0; one above 0 is needed.")
        yield mix, weights


def _check_columns(path: Path, columns: Sequence[str], names: Sequence[str]) -> None:
    if len({*columns}) < len(columns):
        raise ConfigError(f"{path}:1: {columns} found; each column may be there once.")
    for column in columns:
        if column not in (NAME, *names):
            raise ConfigError(f"{path}:1: no entry {column!r}; there are {choices(column, names)}")
    if missing := [name for name in (NAME, *names) if name not in columns]:
        raise ConfigError(f"{path}:1: no column {missing[0]!r}; give one, of 0 if it is not read.")


def _weight(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {text!r:.80} found, a weight >= 0 is needed.")
    return value


def write_mixes(
    metadataset: Path, mixes: MixTable, load: Callable[[Path], Tree], overwrite: bool
) -> dict[str, tuple[Path, Tree]]:
    """Write the metadataset of each mix next to the given one, but only if all can be loaded.

    They are in the same folder, so that their paths name the same sources in the same order.

    Args:
        load: returns the tree of a metadataset.
        overwrite: whether to replace files of other content.
    """
    found = {}
    for name, content in mixes.contents.items():
        path = metadataset.with_name(f"{metadataset.stem}.{name}.yaml")
        text = json.dumps(content, indent=1) + "\n"  # JSON is YAML
        if path.exists() and not overwrite and path.read_bytes() != text.encode():
            raise ConfigError(f"{path}: already exists; give --overwrite to replace it.")
        found[name] = path, text
    written: dict[str, tuple[Path, Tree]] = {}
    draft = metadataset.with_name(f".{metadataset.name}.mix.yaml")
    try:
        for name, (path, text) in found.items():
            write_file(draft, text.encode())
            written[name] = path, load(draft)
    except ConfigError as error:
        raise ConfigError(f"mix {name}: {error}".replace(draft.name, path.name)) from error
    finally:
        draft.unlink(missing_ok=True)
    for path, text in found.values():
        write_file(path, text.encode())
    return written


def forecast_mixes(
    blend: Blend, trees: Mapping[str, Tree], steps: int, tokens_per_doc: float | None, exact: bool
) -> dict[str, Forecast]:
    """Forecast a run with each tree over the sources of a blend; they are opened only once."""
    rows = len(trees) * steps * blend.topology.rows_per_step
    is_exact = plans_rows(blend, rows, tokens_per_doc, exact)
    contents = row_contents(blend, tokens_per_doc)
    found = {}
    for name, tree in trees.items():
        run = _with_tree(blend, tree)
        try:
            found[name] = (
                forecast(run, steps)
                if is_exact and isinstance(run, Run)
                else estimate(run, steps, contents=contents)
            )
        except ZeroWeightsError:  # of all sources that are left; an estimate ends there
            found[name] = estimate(run, steps, contents=contents)
    return found


def _with_tree(blend: Blend, tree: Tree) -> Blend:
    if isinstance(blend, Run):
        sources = [*blend.sources.values()]
        return Run(sources, tree=tree, clock=blend.clock, options=blend.options)
    return Blend([*blend.sources.values()], tree, blend.clock)


def show_mixes(
    found: Mapping[str, Forecast], blend: Blend, steps: int, target: int | None, as_json: bool
) -> None:
    """Print the shares and epochs of all mixes, and which sources end."""
    epochs = {
        name: each.epochs[-1] if target is None else epochs_at(each, blend, target)
        for name, each in found.items()
    }
    if as_json:
        for name, each in found.items():
            extra = (
                {} if target is None else {"epochs_at_target": epochs_by_key(each, epochs[name])}
            )
            echo_json({NAME: name, **each.to_json(), **extra})
        return
    most = np.nan_to_num(np.max(list(epochs.values()), axis=0))
    shown = np.sort(np.argsort(-most, kind="stable")[:_MAX_COLUMNS])
    titles = np.array(next(iter(found.values())).titles)
    where = "" if target is None else f" at {target:,} tokens"
    rows = [[f"share of tokens x epochs{where}", *titles[shown].tolist()]]
    for name, each in found.items():
        tokens = each.tokens.sum(0)
        shares = tokens / max(tokens.sum(), 1)
        rows.append([name, *(f"{shares[n]:.2%} x {_shown(epochs[name][n])}" for n in shown)])
    echo(table(rows))
    if len(titles) > len(shown):
        hidden = f"{len(titles) - len(shown)} more sources, read less often"
        echo(f"... {hidden}; --json has all.")
    for name, each in found.items():
        for line in _remarks(each, steps):
            echo(f"{name}: {line}")


def _shown(epochs: float) -> str:
    return "-" if np.isnan(epochs) else f"{epochs:,.2f}"


def _remarks(found: Forecast, steps: int) -> Iterator[str]:
    titles = dict(zip(found.keys, found.titles))
    for key, step in found.exhausted.items():
        yield f"{titles[key]} ends at step {step:,}"
    if found.steps < steps:
        yield f"no source with a weight is left after step {found.steps:,} of {steps:,}"


def plan_mixes(
    metadataset: Path,
    table_path: Path,
    blend: Blend,
    steps: int,
    *,
    split_part: str,
    trusted_modules: tuple[str, ...],
    tokens_per_doc: float | None,
    target: int | None,
    exact: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Forecast the mixes of a table, and write a metadataset for each."""

    def load(path: Path) -> Tree:
        return load_mix(path, split_part=split_part, trusted_modules=trusted_modules)[0].tree

    mixes = read_mixes(metadataset, table_path, split_part)
    written = write_mixes(metadataset, mixes, load, overwrite)
    trees = {name: tree for name, (_, tree) in written.items()}
    found = forecast_mixes(blend, trees, steps, tokens_per_doc, exact)
    show_mixes(found, blend, steps, target, as_json)
    if not as_json:
        paths = [str(path) for path, _ in written.values()]
        ends = paths if len(paths) < 3 else [paths[0], "...", paths[-1]]
        echo(f"written: {' '.join(ends)}")
