# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One loader for all virtual pipeline stages of a process, and its state in Megatron-LM."""

import itertools
from typing import Any, Iterator


class StageLoader:
    """The batches of a loader for one virtual pipeline stage.

    A batch is kept until every stage has taken it. Between two steps all stages have taken the
    same, so the state of the loader is that of each.
    """

    def __init__(self, batches: Iterator[Any], loader: Any):
        self._batches, self.loader = batches, loader

    def __iter__(self) -> "StageLoader":
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def save_state(self) -> dict[str, Any]:
        """The state of the loader."""
        state: dict[str, Any] = self.loader.save_state()
        return state


def share_among_stages(loader: Any, stages: int) -> list[StageLoader]:
    """The loaders of all virtual pipeline stages of this process."""
    return [StageLoader(batches, loader) for batches in itertools.tee(loader, stages)]


def save_first_stage() -> None:
    """Let Megatron-LM save the state of the first virtual stage, where it has a list of them.

    Its own function takes a list for an iterator, and fails at the first save.
    """
    from megatron.training import checkpointing

    save = checkpointing.maybe_save_dataloader_state
    save = getattr(save, "of_one_stage", save)

    def save_first(train_iterator: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(train_iterator, list):
            train_iterator = train_iterator[0]
        return save(train_iterator, *arguments, **options)

    save_first.of_one_stage = save  # type: ignore[attr-defined]
    checkpointing.maybe_save_dataloader_state = save_first
