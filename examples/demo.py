# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train on real text, kill the run, change its size twice, and compare with an uninterrupted run.

    python examples/demo.py                   (or `make demo`)
    python examples/demo.py --data-only       (only the data of metadatasets/, in seconds)

1. Three corpora that come with Python become token files in DIR/data.
2. One process trains on a curriculum, and is killed between two checkpoints.
3. Two processes resume from the last checkpoint, with tensor parallelism.
4. Two data-parallel ranks with one data worker each continue, with other micro-batches.
5. One process trains the same steps without interruption.

In every step, both runs must read the same rows, and their losses must agree to 1e-4. DIR/demo.png
shows both losses, and DIR/report.html the data.
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
from energon_ext.cli.report import headline, write_report
from energon_ext.metrics.file import Run

TRAINING_SCRIPT = Path(__file__).with_name("01_pretrain_gpt.py")
TOLERANCE = 1e-4

CURRICULUM = """\
# Prose first, then more and more code, and documentation throughout. Breakpoints are steps.
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
    """A stage of the run that is killed and changes its size.

    Attributes:
        name: display name.
        processes: number of processes of torchrun.
        options: options of the training script.
        last: step after which the stage ends.
        killed: kill the process after that step instead of saving.
    """

    name: str
    processes: int
    options: tuple
    last: int
    killed: bool = False


def stages_of(steps):
    """Return stages with a kill between two checkpoints, and two changes of size."""
    sixth = steps // 6
    split = ("--tensor-model-parallel-size", 2)
    replicated = ("--micro-batch-rows", 4, "--num-workers", 1)
    return [
        Stage("1 process", 1, (), 2 * sixth + sixth // 2, killed=True),
        Stage("2 processes,\ntensor parallel", 2, split, 4 * sixth),
        Stage("2 data-parallel ranks,\none worker each", 2, replicated, steps),
    ]


def main():
    parser = new_parser(__doc__.splitlines()[0], "python examples/demo.py --dir /tmp/demo")
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="working folder")
    parser.add_argument("--steps", type=count, default=90, help="optimizer steps of each run")
    parser.add_argument(
        "--data-only", action="store_true", help="only write the data of metadatasets/"
    )
    args = parser.parse_args()
    folder, stages = args.dir, stages_of(args.steps)
    mix = prepare(folder, args.steps)
    if args.data_only:
        write_chats_and_images(folder / "data")
        return
    changing, reference = folder / "runs" / "changing", folder / "runs" / "left_alone"
    for run_dir in (changing, reference):
        shutil.rmtree(run_dir, ignore_errors=True)
    for number, stage in enumerate(stages):
        train(mix, changing, args.steps, stage, resumes=number > 0)
    train(mix, reference, args.steps, Stage("1 process, uninterrupted", 1, (), args.steps))
    sys.exit(compare(folder, Run.load(changing), Run.load(reference), stages))


def prepare(folder, steps):
    """Write the token files, unless they exist, and their metadataset."""
    write_corpora(folder / "data")
    mix = folder / "curriculum.yaml"
    mix.write_text(CURRICULUM.format(middle=steps // 4, late=5 * steps // 6))
    return mix


def write_chats_and_images(folder):
    """Write the conversations and the captioned images, unless they exist."""
    write_lines(folder / "chats.jsonl", library_questions())
    if not (folder / "images").exists():
        write_webdatasets(folder / "images", images=300)
    print(f"{folder} has all data of metadatasets/.")


def train(mix, run_dir, steps, stage, resumes=False):
    print(f"\n{stage.name.replace(chr(10), ' ')}: to step {stage.last} of {steps}", flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", stage.processes]
    options = ["--run-dir", run_dir, "--train-iters", steps, "--save-interval", steps // 6]
    options += [*stage.options] + ["--resume"] * resumes
    options += [] if stage.killed else ["--stop-after", stage.last]
    command = [sys.executable, *(launcher if stage.processes > 1 else ())]
    command += [TRAINING_SCRIPT, mix, *options]
    # Hide a dozen warnings of Megatron-core about optional GPU libraries.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    environment["OMP_NUM_THREADS"] = "1"  # more threads would mostly wait for each other
    # Two processes need no two GPUs, and the backward pass of attention on a GPU differs between
    # two identical runs by more than the demo allows.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(list(map(str, command)), env=environment)
    if stage.killed:
        kill_after(process, run_dir / "metrics.jsonl", stage.last)
        print(f"\nkilled by SIGKILL after step {stage.last}")
    elif process.wait() != 0:
        sys.exit(f"The stage {stage.name!r} exited with status {process.returncode}, see above.")


def kill_after(process, metrics, step):
    """Kill a process as soon as its log has a step."""
    line = f'"event": "step", "step": {step},'
    while not metrics.exists() or line not in metrics.read_text():
        if process.poll() is not None:
            sys.exit(f"Training ended before step {step}, see above.")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def compare(folder, run, reference, stages):
    """Draw and print a comparison of the runs; return an error message or None."""
    same_rows = np.array(run.batch_hash) == np.array(reference.batch_hash)
    differences = np.abs(run.loss - reference.loss)
    *_, page = write_report(run, folder)
    draw(run, reference, same_rows, differences, stages).savefig(folder / "demo.png", dpi=160)
    print("\nthe run that was killed and changed its size, compared with an uninterrupted run")
    equal = f"{same_rows.sum()} of {len(same_rows)}"
    for value, name in (*headline(run), (equal, "steps that read the same rows")):
        print(f"  {value:>16}  {name}")
    print(f"  {differences.max():>16.3g}  largest difference of the loss")
    print(f"  {folder / 'demo.png'}\n  {page}")
    if not same_rows.all():
        return f"The rows differ, first in step {np.flatnonzero(~same_rows)[0] + 1}."
    if differences.max() > TOLERANCE:
        return f"Losses differ by more than {TOLERANCE:g}."
    return None


def draw(run, reference, same_rows, differences, stages):
    """Draw the losses of both runs above their difference, with a line at every change."""
    figure, (losses, difference) = new_figure(
        "Killed, and moved to other processes twice: the same rows, the same losses",
        "wide: an uninterrupted run · thin: the run that was killed and moved · "
        f"{same_rows.sum()} of {len(same_rows)} steps read the same rows",
        height=5.0,
        height_ratios=(3, 1),
        top=1.05,
    )
    losses.plot(reference.step, reference.loss, color=FAINT, linewidth=7, solid_capstyle="round")
    begins = [0, *run.resumed_after]
    ends = [*begins[1:], len(run.step)]
    for stage, begin, end, color in zip(stages, begins, ends, (INK, COLORS[0], COLORS[2])):
        steps = slice(max(begin - 1, 0), end)
        losses.plot(run.step[steps], run.loss[steps], color=color, linewidth=1.6)
        write(losses, stage.name, (begin + end) / 2, 1.02, color, ha="center", va="bottom")
        for axes in (losses, difference) if begin else ():
            axes.axvline(begin + 0.5, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    killed = stages[0].last + 0.5
    losses.axvspan(begins[1] + 0.5, killed, color=COLORS[1], alpha=0.12, linewidth=0)
    losses.axvline(killed, color=COLORS[1], linewidth=1.2)
    lost = f"SIGKILL after step {stages[0].last};\nresumes from the\ncheckpoint of step {begins[1]}"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the grid
    write(losses, lost, killed + 0.01 * len(run.step), 0.97, COLORS[1], va="top", bbox=box)
    losses.set_ylabel("loss (nats per byte)")
    losses.tick_params(labelbottom=False)
    difference.plot(reference.step, differences, color=INK, linewidth=1)
    difference.axhline(TOLERANCE, color=COLORS[1], linewidth=0.9)
    difference.set_yscale("symlog", linthresh=1e-7)
    difference.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4], ["0", "1e-7", "1e-6", "1e-5", "1e-4"])
    difference.set_ylim(0, 3e-4)
    difference.set_ylabel("their difference")
    difference.set_xlabel("optimizer step")
    right = 1.015 * (len(run.step) + 1)
    write(difference, "allowed: 1e-4", right, 0.87, COLORS[1], va="center")
    write(difference, f"largest: {differences.max():.1e}", right, 0.2, INK, va="center")
    for axes in (losses, difference):
        axes.set_xlim(0, len(run.step) + 1)
    return figure


def write(axes, text, step, height, color, **options):
    """Write text at a step and a height from 0 to 1."""
    transform = axes.get_xaxis_transform()
    axes.text(step, height, text, color=color, fontsize=8.5, transform=transform, **options)


if __name__ == "__main__":
    main()
