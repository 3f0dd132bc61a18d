# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Log of a training run: ``metrics.jsonl``, a progress bar and scalars.

``metrics.jsonl`` has one JSON object per line, each with ``event`` and ``step``: ``start`` when a
process starts (``step`` is where it resumed), ``step`` per optimizer step, ``consumption`` and
``save`` per checkpoint, and ``end``. A resumed run appends; if a step was run twice, the later line
counts. ``energon-ext report`` reads the file.

TensorBoard and Weights & Biases get the scalars under the names in ``SCALARS``.
"""

import contextlib
import hashlib
import json
import math
import sys
from collections import Counter

import torch.distributed as dist
from megatron.core import parallel_state
from tqdm import tqdm

from energon_ext import ConfigError
from energon_ext.cli.metrics import short_labels
from energon_ext.documents.permutation import stable_hash

#: Field of an event -> name of its scalar; values of a mapping get the suffix ``/<source>``.
#: Fields with a ``/`` in their name keep it.
SCALARS = {
    "loss": "train/loss",
    "loss_by_source": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "trained_tokens": "train/tokens",
    "planned_share": "data/planned_share",
    "tokens_in_all": "data/tokens",
    "shares": "data/share",
    "epochs": "data/epochs",
    "epochs_left": "data/epochs_left",
    "waiting_share": "perf/waiting_for_data",
    "step_seconds": "perf/step_seconds",
    "data_seconds": "perf/data_seconds",
    "tokens_per_second": "perf/tokens_per_second",
}


class RunLog(contextlib.ExitStack):
    """Writes the events of one process of a run; leaving the ``with`` block closes its files.

    Args:
        run_dir: an existing folder; ``metrics.jsonl`` in it is appended to.
        first_step: step at which this process starts.
        last_step: last step of the run.
        interval: steps between two lines, if standard error is not a terminal.
        enabled: False makes every method do nothing, for ranks that do not log.
        tensorboard: also write TensorBoard files to ``run_dir/tensorboard``.
        wandb_project: also log to this Weights & Biases project; a resumed run continues there.
    """

    def __init__(
        self,
        run_dir,
        first_step,
        last_step,
        *,
        enabled=True,
        interval=10,
        tensorboard=False,
        wandb_project=None,
    ):
        super().__init__()
        self.enabled = enabled
        self._last_step, self._interval, self._names = last_step, interval, {}
        self._first_loss = self._last_line = None
        if not enabled:
            return
        # Line buffering, so that a killed process leaves whole lines.
        file = open(run_dir / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self._file = self.enter_context(file)
        # In a file a bar would be one endless line, so print plain lines instead.
        self._plain = not sys.stderr.isatty()
        bar = tqdm(total=last_step, initial=first_step, unit="step", disable=self._plain)
        self._bar = self.enter_context(bar)
        self._boards = []  # functions of (scalars by name, step)
        if tensorboard:
            self._boards.append(self._tensorboard(run_dir, first_step))
        if wandb_project:
            self._boards.append(self._weights_and_biases(run_dir, wandb_project))

    def write(self, event, step, **fields):
        """Append one event."""
        if self.enabled:
            self._names = fields.get("names", self._names)
            self._file.write(json.dumps({"event": event, "step": step, **fields}) + "\n")
            if event != "consumption":  # the boards get it after every step
                self.write_boards(step, fields)

    def write_boards(self, step, fields):
        """Write the scalars among some fields to TensorBoard and Weights & Biases only."""
        scalars = _scalars(fields, self._names) if self.enabled else {}
        for write in self._boards if scalars else ():
            write(scalars, step)

    def write_step(self, step, fields):
        """Append one optimizer step and move the progress bar."""
        self.write("step", step, **fields)
        if self.enabled:
            self._first_loss = self._first_loss or fields["loss"]
            self._last_line = _summary(fields, self._names)
            self._bar.set_postfix_str(self._last_line)
            self._bar.update()
            if self._plain and (step % self._interval == 0 or step == self._last_step):
                self._print(f"step {step:,} of {self._last_step:,}: {self._last_line}")

    def write_evaluation(self, step, fields):
        """Append the results of an evaluation after a step, if there was one."""
        if fields:
            self.write("evaluation", step, **fields)
            if self.enabled:
                results = ", ".join(f"{name} {value:.3f}" for name, value in fields.items())
                self._print(f"step {step:,}: {results}")

    def show(self, text):
        """Print what the run does before its first step, which may take long."""
        if self.enabled:
            self._bar.set_postfix_str(text)
            if self._plain:
                self._print(text)

    def write_end(self, step, reason, saved):
        """Append how the run ended; print one line with the losses and the last checkpoint."""
        self.write("end", step, reason=reason)
        if self.enabled:
            first = "" if self._first_loss is None else f"; loss was {self._first_loss:.3f}"
            last = "" if self._last_line is None else f"; now {self._last_line}"
            saved = "" if saved is None else f"; saved in {saved}"
            self._bar.close()
            self._print(f"{reason} at step {step:,}{first}{last}{saved}")

    @staticmethod
    def _print(line):
        """Print a line on standard error, above the bar."""
        tqdm.write(line, file=sys.stderr)

    def _tensorboard(self, run_dir, first_step):
        from torch.utils.tensorboard import SummaryWriter

        # Discard later steps that an earlier process wrote, as they run again.
        folder = run_dir / "tensorboard"
        writer = self.enter_context(SummaryWriter(folder, purge_step=first_step + 1))

        def write(scalars, step):
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        return write

    def _weights_and_biases(self, run_dir, project):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"Logging to the Weights & Biases project {project!r} needs the package wandb: pip "
                f"install wandb, or omit the project."
            ) from error
        # The same folder is the same run, even in another process.
        name = f"{stable_hash(str(run_dir.resolve())):x}"
        run = wandb.init(project=project, name=run_dir.name, id=name, resume="allow", dir=run_dir)
        self.callback(run.finish)
        return lambda scalars, step: run.log(scalars, step=step)


def _loss(losses, key):
    """Format the loss of a source, "-" if it was not read."""
    return f"{losses[key]:.3f}" if math.isfinite(losses.get(key, math.nan)) else "-"


def _summary(fields, names, max_sources=4):
    """Summarize a step for people."""
    losses, shares = fields.get("loss_by_source", {}), fields.get("planned_share", {})
    keys = sorted(losses.keys() | shares.keys())
    by_source = ", ".join(
        f"{label} {_loss(losses, key)} at {shares.get(key, 0):.0%}"
        for key, label in zip(keys, short_labels(keys, names))
    )
    by_source = f" ({by_source})" if 1 < len(keys) <= max_sources else ""
    formats = {
        "learning_rate": "lr {:.1e}",
        "grad_norm": "grad norm {:.2f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "rollout/reward/mean": "reward {:.2f}",
        "waiting_share": "waiting for data {:.0%}",
    }
    parts = [text.format(fields[name]) for name, text in formats.items() if name in fields]
    return ", ".join([f"loss {fields['loss']:.3f}{by_source}", *parts])


def summarize_step(batches, seq_len):
    """Return the consumption of a step over all data-parallel ranks, which call this together.

    Two steps with the same ``batch_hash`` were trained on the same rows: tokens, labels, weights,
    segments and sources. The rank, the micro-batch and the order of the rows do not matter, as they
    do not change the gradient.

    Args:
        batches: micro-batches that this rank drew, on the CPU.
        seq_len: positions per row.
    """
    rows, tokens, documents, trained = [], Counter(), Counter(), 0
    for batch in batches:
        rows += row_hashes(batch, seq_len)
        tokens.update(batch.tokens_per_source())
        documents.update(batch.documents_per_source())
        trained += int((batch.token_weights != 0).sum())
    group = parallel_state.get_data_parallel_group()
    ranks = [None] * group.size()
    dist.all_gather_object(ranks, (rows, tokens, documents, trained), group=group)
    rows, tokens, documents, trained = zip(*ranks)
    return {
        "batch_hash": _sha1("".join(sorted(sum(rows, []))).encode()),
        "tokens": dict(sum(tokens, Counter())),
        "documents": dict(sum(documents, Counter())),
        "trained_tokens": sum(trained),
    }


def row_hashes(batch, seq_len):
    """Return a hash of each row of a PackedBatch."""
    ends = batch.cu_seqlens.tolist()
    names = [batch.sources[number] if number >= 0 else "" for number in batch.source_ids.tolist()]
    hashes = []
    for first in range(0, batch.num_tokens, seq_len):
        row = slice(first, first + seq_len)
        segments = range(ends.index(row.start), ends.index(row.stop))
        tensors = (batch.tokens[row], batch.labels[row], batch.token_weights[row])
        layout = [(ends[segment + 1] - first, names[segment]) for segment in segments]
        content = [tensor.numpy().tobytes() for tensor in tensors] + [json.dumps(layout).encode()]
        hashes.append(_sha1(b"".join(content)))
    return hashes


def _scalars(fields, names):
    """Return an event's scalars by the names that boards show, with display names of sources."""
    scalars = {}
    for field, value in fields.items():
        name = field if "/" in field else SCALARS.get(field)
        if name and isinstance(value, dict):
            scalars |= {f"{name}/{names.get(key, key)}": number for key, number in value.items()}
        elif name:
            scalars[name] = value
    return scalars


def _sha1(content):
    return hashlib.sha1(content).hexdigest()
