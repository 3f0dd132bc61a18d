# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory and time of a loss and its gradients, in chunks of positions and of all at once.

Each measurement runs in a separate process, in float32 on the CPU. Four times the positions do not
fit as whole logits, so that figure is computed from those that do.
"""

import time

import torch
from timing import fresh_process, markdown, peak_mib

from energon_ext.losses import unified_loss
from energon_ext.losses.chunked import chunked_loss

WORDS, HIDDEN = 150_000, 64
POSITIONS, FITS = 16_384, 4_096
CHUNKS = (4_096, 1_024, 256)


def run():
    rows = []
    whole, seconds = fresh_process(measure, FITS, None)
    rows.append((f"whole logits, {FITS:,} positions", f"{whole:,.0f}", f"{seconds:.0f}"))
    logits = POSITIONS / FITS * whole
    rows.append((f"whole logits, {POSITIONS:,} positions (computed)", f"{logits:,.0f}", "-"))
    for chunk in CHUNKS:
        peak, seconds = fresh_process(measure, POSITIONS, chunk)
        name = f"{POSITIONS:,} positions, chunks of {chunk:,}"
        rows.append((name, f"{peak:,.0f}", f"{seconds:.0f}"))
    title = f"A loss over {WORDS:,} words with its gradients, hidden size {HIDDEN}"
    return markdown(title, ("", "peak memory, MiB", "s"), rows)


def measure(positions, chunk):
    """Return the peak memory in MiB above that of the inputs, and the time in seconds."""
    hidden = torch.randn(positions, HIDDEN, requires_grad=True)
    weight = torch.randn(WORDS, HIDDEN, requires_grad=True)
    labels, weights = torch.randint(WORDS, (positions,)), torch.ones(positions)
    chunked_loss(hidden[:2], weight, labels[:2], weights[:2]).backward()  # loads what torch needs
    before, begin = peak_mib(), time.perf_counter()
    if chunk is None:
        loss = unified_loss(hidden @ weight.T, labels, weights)
    else:
        loss = chunked_loss(hidden, weight, labels, weights, chunk=chunk)
    loss.backward()
    return peak_mib() - before, time.perf_counter() - begin
