# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train on real text, kill the run, change its size twice, and compare with a run left alone.

    python examples/demo.py                   (or `make demo`)
    python examples/demo.py --data-only       (what the files of metadatasets/ read, in seconds)

1. Three corpora that come with Python become token files in DIR/data.
2. One process trains along a curriculum, and is killed between two checkpoints.
3. Two processes go on from the last one, the model split by tensors.
4. Two data-parallel ranks with a data worker each go on from there, in other micro-batches.
5. One process trains the same without a stop.

Every step of both must have read the same rows, and their losses must agree to 1e-4. DIR/demo.png
shows both, DIR/report.html what was read.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from demo_corpora import library_questions, write_corpora, write_lines
from drawn_images import write_webdatasets
from options import count, new_parser

from energon_ext.cli.figure_style import COLORS, FAINT, INK, MUTED, new_figure
from energon_ext.cli.metrics import Run
from energon_ext.cli.report import headline, write_report

TRAINING_SCRIPT = Path(__file__).with_name("01_pretrain_gpt.py")
TOLERANCE = 1e-4

CURRICULUM = """\
# Prose first, more and more code later, documentation all along. Breakpoints are steps.
__module__: energon_ext
__class__: ScheduledMetadataset
splits:
  train:
    blend:
      - {{path: data/prose/train, weight: {{linear: {{0: 9, {late}: 1}}}}}}
      - {{path: data/code/train, weight: {{step: {{0: 0, {middle}: 4, {late}: 8}}}}}}
      - {{path: data/docs/train, weight: 1}}
"""


@dataclass(frozen=True)
class Stage:
    """A part of the run that goes on through everything.

    Attributes:
        name: for people.
        processes: of torchrun.
        options: of the training script.
        last: step after which it ends.
        killed: whether it is killed there, instead of saving.
    """

    name: str
    processes: int
    options: tuple
    last: int
    killed: bool = False


def stages_of(steps):
    """A kill in the middle of two checkpoints, and two changes of size."""
    sixth = steps // 6
    split = ("--tensor-model-parallel-size", 2)
    replicated = ("--micro-batch-rows", 4, "--num-workers", 1)
    return [
        Stage("1 process", 1, (), 2 * sixth + sixth // 2, killed=True),
        Stage("2 processes,\ntensor parallel", 2, split, 4 * sixth),
        Stage("2 data-parallel ranks,\na worker each", 2, replicated, steps),
    ]


def main():
    parser = new_parser(__doc__.splitlines()[0], "python examples/demo.py --dir /tmp/demo")
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="where to work")
    parser.add_argument("--steps", type=count, default=90, help="optimizer steps of each run")
    parser.add_argument(
        "--data-only", action="store_true", help="write what the files of metadatasets/ read"
    )
    args = parser.parse_args()
    folder, stages = args.dir, stages_of(args.steps)
    mix = prepare(folder, args.steps)
    if args.data_only:
        write_chats_and_images(folder / "data")
        return
    changing, alone = folder / "runs" / "changing", folder / "runs" / "left_alone"
    for run_dir in (changing, alone):
        shutil.rmtree(run_dir, ignore_errors=True)
    for number, stage in enumerate(stages):
        train(mix, changing, args.steps, stage, resumes=number > 0)
    train(mix, alone, args.steps, Stage("1 process, without a stop", 1, (), args.steps))
    sys.exit(compare(folder, Run.load(changing), Run.load(alone), stages))


def prepare(folder, steps):
    """Write the token files, unless they are there, and the metadataset over them."""
    write_corpora(folder / "data")
    mix = folder / "curriculum.yaml"
    mix.write_text(CURRICULUM.format(middle=steps // 4, late=5 * steps // 6))
    return mix


def write_chats_and_images(folder):
    """Write the conversations and the pictures with captions, unless they are there."""
    write_lines(folder / "chats.jsonl", library_questions())
    if not (folder / "images").exists():
        write_webdatasets(folder / "images", images=300)
    print(f"{folder}: there is all that the files of metadatasets/ name.")


def train(mix, run_dir, steps, stage, resumes=False):
    print(f"\n{stage.name.replace(chr(10), ' ')}: to step {stage.last} of {steps}", flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", stage.processes]
    options = ["--run-dir", run_dir, "--train-iters", steps, "--save-interval", steps // 6]
    options += [*stage.options] + ["--resume"] * resumes
    options += [] if stage.killed else ["--stop-after", stage.last]
    command = [sys.executable, *(launcher if stage.processes > 1 else ())]
    command += [TRAINING_SCRIPT, mix, *options]
    # Megatron-core warns a dozen times of optional GPU libraries, which the demo does not need.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    environment["OMP_NUM_THREADS"] = "1"  # more would mostly wait for each other
    process = subprocess.Popen(list(map(str, command)), env=environment)
    if stage.killed:
        kill_after(process, run_dir / "metrics.jsonl", stage.last)
        print(f"\nkilled by SIGKILL after step {stage.last}")
    elif process.wait() != 0:
        sys.exit(f"The stage {stage.name!r} ended with exit code {process.returncode}, see above.")


def kill_after(process, metrics, step):
    """Kill a process as soon as its log holds a step."""
    line = f'"event": "step", "step": {step},'
    while not metrics.exists() or line not in metrics.read_text():
        if process.poll() is not None:
            sys.exit(f"The training ended before step {step}, see above.")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def compare(folder, run, alone, stages):
    """Draw and print how the runs compare; what is wrong, None where nothing is."""
    same_rows = np.array(run.batch_hash) == np.array(alone.batch_hash)
    differences = np.abs(run.loss - alone.loss)
    *_, page = write_report(run, folder)
    draw(run, alone, same_rows, differences, stages).savefig(folder / "demo.png", dpi=160)
    print("\nthe run that was killed and changed its size, against the one left alone")
    equal = f"{same_rows.sum()} of {len(same_rows)}"
    for value, name in (*headline(run), (equal, "steps that read the same rows")):
        print(f"  {value:>16}  {name}")
    print(f"  {differences.max():>16.3g}  largest difference of the loss")
    print(f"  {folder / 'demo.png'}\n  {page}")
    if not same_rows.all():
        return f"Other rows, first in step {np.flatnonzero(~same_rows)[0] + 1}."
    if differences.max() > TOLERANCE:
        return f"Losses differ by more than {TOLERANCE:g}."
    return None


def draw(run, alone, same_rows, differences, stages):
    """Losses of both runs over their difference, with a line at every change."""
    figure, (losses, difference) = new_figure(
        "Killed, and moved to other processes twice: the same rows, the same losses",
        "wide: a run that was left alone · thin: the run that was killed and moved · "
        f"{same_rows.sum()} of {len(same_rows)} steps read the same rows",
        height=5.0,
        height_ratios=(3, 1),
        top=1.05,
    )
    losses.plot(alone.step, alone.loss, color=FAINT, linewidth=7, solid_capstyle="round")
    begins = [0, *run.resumed_after]
    ends = [*begins[1:], len(run.step)]
    for stage, begin, end, color in zip(stages, begins, ends, (INK, COLORS[0], COLORS[2])):
        own = slice(max(begin - 1, 0), end)
        losses.plot(run.step[own], run.loss[own], color=color, linewidth=1.6)
        write(losses, stage.name, (begin + end) / 2, 1.02, color, ha="center", va="bottom")
        for axes in (losses, difference) if begin else ():
            axes.axvline(begin + 0.5, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    killed = stages[0].last + 0.5
    losses.axvspan(begins[1] + 0.5, killed, color=COLORS[1], alpha=0.12, linewidth=0)
    losses.axvline(killed, color=COLORS[1], linewidth=1.2)
    lost = f"SIGKILL after step {stages[0].last};\ngoes on from the\ncheckpoint of step {begins[1]}"
    free = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # of the lines of the grid
    write(losses, lost, killed + 0.01 * len(run.step), 0.97, COLORS[1], va="top", bbox=free)
    losses.set_ylabel("loss (nats per byte)")
    losses.tick_params(labelbottom=False)
    difference.plot(alone.step, differences, color=INK, linewidth=1)
    difference.axhline(TOLERANCE, color=COLORS[1], linewidth=0.9)
    difference.set_yscale("symlog", linthresh=1e-7)
    difference.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4], ["0", "1e-7", "1e-6", "1e-5", "1e-4"])
    difference.set_ylim(0, 3e-4)
    difference.set_ylabel("their difference")
    difference.set_xlabel("optimizer step")
    beside = 1.015 * (len(run.step) + 1)
    write(difference, "allowed: 1e-4", beside, 0.87, COLORS[1], va="center")
    largest = f"largest: {differences.max():.1e}"
    write(difference, largest, beside, 0.2, INK, va="center")
    for axes in (losses, difference):
        axes.set_xlim(0, len(run.step) + 1)
    return figure


def write(axes, text, step, height, color, **options):
    """Text at a step, and at a height from 0 to 1."""
    where = axes.get_xaxis_transform()
    axes.text(step, height, text, color=color, fontsize=8.5, transform=where, **options)


if __name__ == "__main__":
    main()
