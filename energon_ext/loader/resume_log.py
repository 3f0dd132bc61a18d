# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Logs the effects of a resume."""

from typing import Any, Mapping

from energon_ext.errors import log_of, printable
from energon_ext.plan.remarks import describe_loss_weights
from energon_ext.plan.row_schedule import describe_row_change
from energon_ext.plan.run import Run
from energon_ext.plan.spec import Spec, describe_repacking
from energon_ext.state.match import ENCODER, SourceChange
from energon_ext.streamed.blend import StreamedBlend

logger = log_of(__name__)


def log_resume(
    changes: list[SourceChange],
    state: Mapping[str, Any],
    blend: Run | StreamedBlend,
) -> None:
    """Log the effect of a resume on each source, and warn about other changes."""
    lines = "\n  ".join(printable(str(change)) for change in changes)
    logger.info("Resuming the data of %d sources:\n  %s", len(changes), lines)
    if change := blend.clock.axis.change_from(state["axis"]):
        logger.warning(change)
    planned = isinstance(blend, Run)
    if isinstance(blend, Run):
        clock = blend.clock
        if change := describe_row_change(state.get("row_schedule"), clock.rows, clock.axis.one):
            logger.warning(change)
        for line in describe_loss_weights(blend, changes, state):
            logger.warning(line)
    saved = Spec.from_json(state["spec"]).compared() if planned else state["fingerprint"]
    if change := describe_repacking(saved, blend.fingerprint):
        logger.warning(change)
    before, now = saved.get(ENCODER), blend.fingerprint.get(ENCODER)
    if before != now:
        advice = "check that it reads documents the same way"
        logger.warning("The TaskEncoder was %s and is now %s; %s.", before, now, advice)
