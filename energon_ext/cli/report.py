# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext report``: report what a run read, as figures and one self-contained HTML file."""

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
from energon_ext.cli import echo, plural, table
from energon_ext.cli.document_losses import document_options, highest_documents
from energon_ext.cli.spikes import Spike, spikes_of
from energon_ext.errors import printable
from energon_ext.metrics.file import Run, mean_of_finite
from energon_ext.metrics.labels import short_labels
from energon_ext.state.files import write_file

if TYPE_CHECKING:
    from energon_ext.cli.figure_style import Picture

DOTS_PER_INCH = 160
MAX_ANSWERS = 16
FOLDER = click.Path(path_type=Path, file_okay=False)
PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


@click.command()
@click.argument("run_dir", type=FOLDER)
@click.option("--out", type=FOLDER, show_default="RUN_DIR", help="Folder to write to.")
@click.option("--reference", type=FOLDER, help="Another run to compare with, step by step.")
@document_options
@click.pass_context
def report(
    ctx: click.Context,
    /,
    run_dir: Path,
    out: Path | None,
    reference: Path | None,
    **documents: Any,
) -> None:
    """Report what a training run read, planned against actual.

    Reads RUN_DIR/metrics.jsonl, and writes figures as PNGs and report.html, which contains them
    all. Lists loss spikes, each with the command that shows what was read at that step. With
    --reference, reports whether both runs read the same rows, and exits with status 1 if not.

    With --documents, also lists the documents with the highest mean loss, if the run has written
    the loss of every document.

    \b
    energon-ext report runs/a --out report
    energon-ext report runs/a --documents 20 --after 1000 --write-exclude excluded.txt
    """
    run = Run.load(run_dir)
    highest = highest_documents(run_dir, **documents)
    echo("\n".join(map(str, write_report(run, out or run_dir, run_dir, highest))))
    if len(highest) > 1:
        echo(table(highest))
    for spike, command in spike_table(spikes_of(run), run_dir):
        echo(f"{spike}: {command}")
    if reference is not None:
        verdict, is_equal = compare(run, Run.load(reference))
        echo(f"{run_dir} and {reference}: {verdict}")
        ctx.exit(0 if is_equal else 1)


def compare(run: Run, other: Run) -> tuple[str, bool]:
    """Compare the steps common to two runs; return the verdict, and True if rows are equal.

    Rows are compared by the hashes of the steps, or, if a run has none, by what decides its rows.
    """
    steps = min(len(run.step), len(other.step))
    hashes = run.batch_hash[:steps], other.batch_hash[:steps]
    digests = run.data_digests[:steps], other.data_digests[:steps]
    if all((*hashes[0], *hashes[1])):
        (ours, theirs), verb = hashes, "read"
    elif all((*digests[0], *digests[1])):
        (ours, theirs), verb = digests, "plan"
    else:
        return "one has neither batch_hash nor data_digest, so rows cannot be compared", False
    differs = [a != b for a, b in zip(ours, theirs)]
    if any(differs):
        first = differs.index(True)
        verdict = (
            f"{sum(differs)} of {steps} steps {verb} different rows, first at step {first + 1}"
        )
        named = digests[0][first], digests[1][first]
        if all(named) and named[0] != named[1]:
            verdict += f"; their data digests there are {named[0]} and {named[1]}"
        return verdict, False
    gap = np.abs(run.loss[:steps] - other.loss[:steps])
    largest = float(np.nanmax(gap)) if np.isfinite(gap).any() else np.nan
    return f"all {steps} steps {verb} the same rows; losses differ by at most {largest:.1e}", True


def write_report(
    run: Run, out: Path, run_dir: Path | None = None, documents: Sequence[Sequence[str]] = ()
) -> list[Path]:
    """Write the figures of a run and finally ``report.html`` to a folder; return their paths.

    Args:
        run_dir: folder of the run, for the commands that trace spikes; ``out`` by default.
        documents: see :func:`~energon_ext.cli.document_losses.highest_documents`.
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
        ("Answers", ("step", "source", "reward", "answer («not trained on»)"), answer_table(run)),
        ("Documents with the highest mean loss", documents[0] if documents else (), documents[1:]),
        ("Loss spikes", ("spike", "what was read"), spike_table(spikes, run_dir or out)),
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
    """Return the key numbers of a run as (value, caption)."""
    ends = max(1, len(run.step) // 15)
    return [
        (f"{run.step[-1]:,}", "optimizer step" + "s" * (len(run.step) > 1)),
        (f"{run.tokens.sum():,}", "tokens read"),
        (
            f"{mean_of_finite(run.loss[:ends]):.2f} → {mean_of_finite(run.loss[-ends:]):.2f}",
            f"loss in nats per token (mean of {plural(ends, 'step')})",
        ),
        (f"{np.median(run.tokens_per_second):,.0f}", "tokens per second (median step)"),
    ]


def import_figures() -> Any:
    """Import the module that draws; raise ConfigError if matplotlib is not installed."""
    figures = "energon_ext.cli.figures"
    return optional_module(figures, "The report", "matplotlib", "energon_ext[report]")


def png_of(picture: "Picture") -> bytes:
    """Render a figure as PNG."""
    buffer, figure = io.BytesIO(), picture.figure
    for text in itertools.chain(figure.texts, *(axes.texts for axes in figure.axes)):
        text.set_parse_math(False)  # a `$` in the name of a source is not TeX
        text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def page(
    title: str,
    tiles: Iterable[tuple[str, str]],
    pictures: Iterable[tuple[str, bytes]],
    tables: Iterable[tuple[str, Sequence[str], Iterable[Sequence[object]]]],
) -> str:
    """Return a self-contained HTML page; all text is escaped.

    Args:
        tiles: (value, caption).
        pictures: (caption, PNG).
        tables: (title, header, rows); tables without rows are omitted.
    """
    parts = ['<div class="tiles">']
    for value, name in tiles:
        parts.append(f"<div><b>{_escape(value)}</b><span>{_escape(name)}</span></div>")
    parts.append("</div>")
    for caption, image in pictures:
        parts.append(
            f'<figure><div class="wide"><img alt="{_escape(caption)}" '
            f'src="data:image/png;base64,{base64.b64encode(image).decode()}"></div>'
            f"<figcaption>{_escape(caption)}</figcaption></figure>"
        )
    for name, head, rows in tables:
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
        if body:
            parts.append(
                f'<h2>{_escape(name)}</h2><div class="wide"><table><thead>'
                f"<tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
            )
    return PAGE.substitute(title=_escape(title), content="\n".join(parts))


def _escape(text: object) -> str:
    return html.escape(printable(str(text)))


def spike_table(spikes: Iterable[Spike], run_dir: Path) -> list[tuple[str, str]]:
    """Return each spike with the command that lists its documents."""
    command = f"energon-ext trace {run_dir} METADATASET --step"  # counts from 0
    return [(str(spike), f"{command} {spike.step - 1}") for spike in spikes]


HEAD = ("source", "tokens", "share", "planned", "documents", "per epoch", "epochs", "last loss")


def source_table(run: Run) -> Iterable[tuple[str, ...]]:
    """Yield one row per source under ``HEAD``, most tokens first."""
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


def answer_table(run: Run) -> Iterable[tuple[object, ...]]:
    """Yield step, source, reward and text of the last answers that the run logged."""
    for step, (source, reward, text) in run.answers[-MAX_ANSWERS:]:
        yield step, source, f"{reward:g}", text


def validation_table(run: Run) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    """Return header and rows: first and last loss of each source or document, and P(z) if any."""
    losses, likely = run.validation_curves("val/loss"), run.validation_curves("val/memorized")
    metrics = [("loss", losses)] + [("P(z)", likely)] * bool(likely)
    head = ["source", *(f"{when} {what}" for what, _ in metrics for when in ("first", "last"))]
    rows = []
    for key, label in zip(losses, short_labels([*losses])):
        ends = (curves[key][1, [0, -1]] if key in curves else () for _, curves in metrics)
        rows.append([label, *(f"{value:.3f}" for pair in ends for value in pair)])
    return head, rows


def _cells(tag: str, texts: Iterable[object]) -> str:
    return "".join(f"<{tag}>{_escape(text)}</{tag}>" for text in texts)
