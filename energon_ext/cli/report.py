# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext report``: what a run read, as pictures and as one self-contained HTML file."""

import base64
import html
import io
import itertools
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Iterable, Sequence

import click
import numpy as np

from energon_ext.arguments import optional_module
from energon_ext.cli import counted, echo
from energon_ext.cli.metrics import Run, mean_of_finite, short_labels
from energon_ext.cli.spikes import Spike, spikes_of
from energon_ext.errors import printable
from energon_ext.state.files import write_file

if TYPE_CHECKING:
    from energon_ext.cli.figure_style import Picture

DOTS_PER_INCH = 160
FOLDER = click.Path(path_type=Path, file_okay=False)
PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


@click.command()
@click.argument("run_dir", type=FOLDER)
@click.option("--out", type=FOLDER, show_default="RUN_DIR", help="Where to write.")
@click.option("--reference", type=FOLDER, help="Another run, to be compared step by step.")
@click.pass_context
def report(ctx: click.Context, /, run_dir: Path, out: Path | None, reference: Path | None) -> None:
    """Show what a training run read, planned against actual.

    Reads RUN_DIR/metrics.jsonl; writes PNG pictures and report.html, which holds them all. Names
    losses that stand out, with the command that shows what was read then. With --reference it says
    whether both runs read the same rows, and ends with 1 where they did not.

    Example: energon-ext report runs/a --out report
    """
    run = Run.load(run_dir)
    echo("\n".join(map(str, write_report(run, out or run_dir, run_dir))))
    for spike, command in spike_table(spikes_of(run), run_dir):
        echo(f"{spike}: {command}")
    if reference is not None:
        said, is_equal = compared(run, Run.load(reference))
        echo(f"{run_dir} and {reference}: {said}")
        ctx.exit(0 if is_equal else 1)


def compared(run: Run, other: Run) -> tuple[str, bool]:
    """How two runs differ in the steps that both have, and whether they read the same rows."""
    steps = min(len(run.step), len(other.step))
    differs = [a != b for a, b in zip(run.batch_hash[:steps], other.batch_hash[:steps])]
    if not all((*run.batch_hash[:steps], *other.batch_hash[:steps])):
        return "one of them has no batch_hash, so rows cannot be compared", False
    if any(differs):
        first = differs.index(True) + 1
        return f"{sum(differs)} of {steps} steps read other rows, the first is step {first}", False
    gap = np.abs(run.loss[:steps] - other.loss[:steps])
    largest = float(np.nanmax(gap)) if np.isfinite(gap).any() else np.nan
    return f"all {steps} steps read the same rows; losses differ by {largest:.1e} at most", True


def write_report(run: Run, out: Path, run_dir: Path | None = None) -> list[Path]:
    """Write the pictures of a run and, last, ``report.html`` to a folder; returns their paths.

    Args:
        run_dir: of the run, for the commands that name its documents; by default ``out``.
    """
    figures = import_figures()
    spikes = spikes_of(run)
    pictures = [figures.mix_picture(run), figures.loss_picture(run, spikes)]
    pictures += [figures.loss_over_tokens_picture(run)] if len(run.sources) > 1 else []
    pictures += [figures.reward_picture(run)] if run.measured else []
    pictures += [figures.validation_picture(run)] if "val/loss" in run.validation else []
    images = [(picture.caption, png_of(picture)) for picture in pictures]
    tables = [
        ("Sources", HEAD, source_table(run)),
        ("Validation", *validation_table(run)),
        ("Losses that stand out", ("loss", "read"), spike_table(spikes, run_dir or out)),
        ("Configuration of the run", ("setting", "value"), sorted(run.config.items())),
    ]
    html_page = page("What the run read", headline(run), images, tables)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{picture.name}.png" for picture in pictures]
    for path, (_, image) in zip(paths, images):
        write_file(path, image)
    write_file(out / "report.html", html_page.encode())
    return [*paths, out / "report.html"]


def headline(run: Run) -> list[tuple[str, str]]:
    """The main figures of a run as (value, what it is)."""
    ends = max(1, len(run.step) // 15)
    return [
        (f"{run.step[-1]:,}", "optimizer step" + "s" * (len(run.step) > 1)),
        (f"{run.tokens.sum():,}", "tokens read"),
        (
            f"{mean_of_finite(run.loss[:ends]):.2f} → {mean_of_finite(run.loss[-ends:]):.2f}",
            f"loss, nats per token (means of {counted(ends, 'step')})",
        ),
        (f"{np.median(run.tokens_per_second):,.0f}", "tokens per second (median step)"),
    ]


def import_figures() -> Any:
    """The module that draws; ConfigError where matplotlib is not installed."""
    figures = "energon_ext.cli.figures"
    return optional_module(figures, "The report", "matplotlib", "energon_ext[report]")


def png_of(picture: "Picture") -> bytes:
    """The bytes of a picture."""
    buffer, figure = io.BytesIO(), picture.figure
    for text in itertools.chain(figure.texts, *(axes.texts for axes in figure.axes)):
        text.set_parse_math(False)  # names of sources stay what they are
        text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def page(
    title: str,
    tiles: Iterable[tuple[str, str]],
    pictures: Iterable[tuple[str, bytes]],
    tables: Iterable[tuple[str, Sequence[str], Iterable[Sequence[object]]]],
) -> str:
    """One self-contained HTML page; everything in it is escaped.

    Args:
        tiles: (value, what it is).
        pictures: (caption, PNG).
        tables: (title, head, rows); one without a row is left out.
    """
    parts = ['<div class="tiles">']
    for value, name in tiles:
        parts.append(f"<div><b>{_escaped(value)}</b><span>{_escaped(name)}</span></div>")
    parts.append("</div>")
    for caption, image in pictures:
        parts.append(
            f'<figure><div class="wide"><img alt="{_escaped(caption)}" '
            f'src="data:image/png;base64,{base64.b64encode(image).decode()}"></div>'
            f"<figcaption>{_escaped(caption)}</figcaption></figure>"
        )
    for name, head, rows in tables:
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
        if body:
            parts.append(
                f'<h2>{_escaped(name)}</h2><div class="wide"><table><thead>'
                f"<tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
            )
    return PAGE.substitute(title=_escaped(title), content="\n".join(parts))


def _escaped(text: object) -> str:
    return html.escape(printable(str(text)))


def spike_table(spikes: Iterable[Spike], run_dir: Path) -> list[tuple[str, str]]:
    """Each spike, and the command that names its documents; steps of a plan count from 0."""
    command = f"energon-ext trace {run_dir} METADATASET --step"
    return [(str(spike), f"{command} {spike.step - 1}") for spike in spikes]


HEAD = ("source", "tokens", "share", "planned", "documents", "an epoch", "epochs", "last loss")


def source_table(run: Run) -> Iterable[tuple[str, ...]]:
    """One row of text per source, most tokens first, under ``HEAD``."""
    tokens = run.tokens.sum(0)
    planned = (run.planned_share * run.tokens.sum(1, keepdims=True)).sum(0)
    documents = run.documents.sum(0)
    total = max(tokens.sum(), 1)
    for index in np.argsort(-tokens, kind="stable"):
        losses = run.source_loss[:, index]
        losses = losses[np.isfinite(losses)]
        yield (
            run.titles[index],
            f"{tokens[index]:,}",
            f"{100 * tokens[index] / total:.1f} %",
            f"{100 * planned[index] / total:.1f} %",
            f"{documents[index]:,}",
            f"{run.epoch_documents[index]:,}",
            f"{run.epochs[index]:.2f}",
            f"{losses[-1]:.3f}" if len(losses) else "–",
        )


def validation_table(run: Run) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    """Head and rows: first and last loss of each source or document, and P(z) of spliced ones."""
    losses, likely = run.validated("val/loss"), run.validated("val/memorized")
    found = [("loss", losses)] + [("P(z)", likely)] * bool(likely)
    head = ["source", *(f"{when} {what}" for what, _ in found for when in ("first", "last"))]
    rows = []
    for key, label in zip(losses, short_labels([*losses])):
        ends = (own[key][1, [0, -1]] if key in own else () for _, own in found)
        rows.append([label, *(f"{value:.3f}" for both in ends for value in both)])
    return head, rows


def _cells(tag: str, texts: Iterable[object]) -> str:
    return "".join(f"<{tag}>{_escaped(text)}</{tag}>" for text in texts)
