# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The log of a training run with a progress bar, and what a step consumed.

The log itself, ``metrics.jsonl`` and the boards, is :class:`energon_ext.metrics.run_log.RunLog`.
"""

import math
import sys
from collections import Counter

import torch.distributed as dist
from megatron.core import parallel_state
from tqdm import tqdm

from energon_ext.batch.row_hashes import StepHash, hash_of_parts
from energon_ext.metrics.labels import short_labels
from energon_ext.metrics.run_log import RunLog


class ProgressLog(RunLog):
    """A log that also shows a progress bar.

    Args:
        last_step: last step of the run.
        interval: steps between two lines, if standard error is not a terminal.
        **options: see :class:`RunLog`.
    """

    def __init__(self, run_dir, first_step, last_step, *, interval=10, **options):
        super().__init__(run_dir, first_step, **options)
        self._last_step, self._interval = last_step, interval
        self._first = self._last_line = None
        if self.enabled:
            # In a file a bar would be one endless line, so print plain lines instead.
            self._plain = not sys.stderr.isatty()
            bar = tqdm(total=last_step, initial=first_step, unit="step", disable=self._plain)
            self._bar = self.enter_context(bar)

    def write_step(self, step, fields):
        """Append one optimizer step and move the progress bar."""
        self.write("step", step, **fields)
        if self.enabled:
            self._first = self._first or (step, fields["loss"])
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
            first = ""
            if self._first is not None:  # of this start, which may be a resume
                first = "; loss at step {:,} was {:.3f}".format(*self._first)
            last = "" if self._last_line is None else f"; now {self._last_line}"
            saved = "" if saved is None else f"; saved in {saved}"
            self._bar.close()
            self._print(f"{reason} at step {step:,}{first}{last}{saved}")

    @staticmethod
    def _print(line):
        """Print a line on standard error, above the bar."""
        tqdm.write(line, file=sys.stderr)


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

    Two steps with the same ``batch_hash`` were trained on the same rows, in any order and on any
    ranks.

    Args:
        batches: micro-batches that this rank drew, on the CPU.
        seq_len: positions per row.
    """
    rows, tokens, documents, trained = StepHash(), Counter(), Counter(), 0
    for batch in batches:
        rows.add(batch, batch.row_tokens or seq_len)
        tokens.update(batch.tokens_per_source())
        documents.update(batch.documents_per_source())
        trained += int((batch.token_weights != 0).sum())
    group = parallel_state.get_data_parallel_group()
    ranks = [None] * group.size()
    dist.all_gather_object(ranks, (rows.take(), tokens, documents, trained), group=group)
    parts, tokens, documents, trained = zip(*ranks)
    return {
        "batch_hash": hash_of_parts([sum(each) for each in zip(*parts)]),
        "tokens": dict(sum(tokens, Counter())),
        "documents": dict(sum(documents, Counter())),
        "trained_tokens": sum(trained),
    }
