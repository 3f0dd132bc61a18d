# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Log lines about a resume."""

from typing import Any, Mapping

from energon_ext.errors import log_of, printable
from energon_ext.packing import repacking
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.state.match import ENCODER, SourceChange
from energon_ext.streamed.blend import StreamedBlend

logger = log_of(__name__)


def log_resume(
    changes: list[SourceChange],
    state: Mapping[str, Any],
    blend: PlannedDataset | StreamedBlend,
) -> None:
    """Say what a resume does with each source, and what else is not as it was."""
    lines = "\n  ".join(printable(str(change)) for change in changes)
    logger.info("Resuming the data of %d sources:\n  %s", len(changes), lines)
    if change := blend.clock.axis.change_from(state["axis"]):
        logger.warning(change)
    if change := repacking(state["fingerprint"], blend.fingerprint):
        logger.warning(change)
    before, now = state["fingerprint"].get(ENCODER), blend.fingerprint.get(ENCODER)
    if before != now:
        logger.warning("The TaskEncoder was %s, and is %s; see that it reads alike.", before, now)
