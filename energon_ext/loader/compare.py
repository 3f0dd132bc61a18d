# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compares once what all ranks of a run must compute alike, before the first batch.

Every rank plans the whole run alone. Ranks that see other files, settings or states would plan
other rows, and read some documents twice and others never. So the first rank of a group reads the
digests of all others, which are some hundred bytes each. If some differ, it asks one of these
ranks for the details, and all ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import RankError, log_of
from energon_ext.plan.blend import Blend
from energon_ext.plan.outline import (
    ADVICE,
    Outline,
    differing_parts,
    first_difference,
    list_differences,
    list_sources,
)
from energon_ext.state.rendezvous import Board, board_of, list_ranks, open_board

logger = log_of(__name__)

#: How long a rank waits for others by default; NCCL collectives time out after 600 s.
PATIENCE_SECONDS = 450.0

#: Seconds in which a rank waits for others to read an error, since the store may end with it.
_READ_SECONDS = 30.0


@dataclass(frozen=True)
class Peers:
    """The ranks that must compute the same as this one.

    Attributes:
        ranks: all ranks of a group, which draw their first batches independently of each other.
        first_stage: the rank of the first pipeline stage of the same model, which draws its first
            batch before those of later stages do; None without stages.
    """

    ranks: Sequence[int]
    first_stage: int | None = None


def peers_of(worker: WorkerConfig) -> Peers | None:
    """Return the data-parallel ranks of a process; None if there are no others, or unknown ones."""
    if worker.world_size < 2 or not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(worker.data_parallel_group or dist.group.WORLD)
    if len(ranks) == worker.world_size:
        return Peers(ranks)
    logger.info(
        "The %d data-parallel ranks of the worker_config are not compared, since its group has %d; "
        "give it the data_parallel_group.",
        *(worker.world_size, len(ranks)),
    )
    return None


class Comparison:
    """The comparison of a loader, which is made before its first batch.

    Args:
        worker: worker configuration of the loader.
        is_wanted: whether to compare anything.
        patience: seconds to wait for other ranks.

    Attributes:
        find_peers: finds the ranks to compare.
    """

    def __init__(
        self, worker: WorkerConfig, is_wanted: bool = True, patience: float = PATIENCE_SECONDS
    ):
        self.find_peers: Callable[[], Peers | None] = functools.partial(peers_of, worker)
        self._is_due, self._patience = is_wanted, patience

    def run(
        self, blend: Blend, settings: Mapping[str, Any] = {}, place: Mapping[str, Any] = {}
    ) -> None:
        """Compare the ranks, unless they were; see :func:`compare_ranks` and :class:`Outline`."""
        if self._is_due and (peers := self.find_peers()) is not None:
            compare_ranks(Outline(blend, settings, place), peers, self._patience)
        self._is_due = False

    def skip(self) -> None:
        """Never compare: ranks that come and go cannot wait for each other."""
        self._is_due = False


def compare_ranks(outline: Outline, peers: Peers, patience: float) -> None:
    """Compare this rank with its peers, which must all call this.

    Args:
        patience: seconds to wait for the others.

    Raises:
        RankError: ranks differ, which all raise; or some do not come in time, which those that
            have come raise.
    """
    if (board := open_board(board_of(peers.ranks), patience)) is None:
        logger.info("Ranks are not compared: torch.distributed has no store.")
        return
    board.post("outline", outline.summary())
    stages = None if peers.first_stage is None else open_board("stages", patience)
    if stages is not None:
        stages.post("outline", outline.summary())
    first = peers.ranks[0]
    if board.rank == first:
        _lead(board, stages, outline, peers)
        return
    board.read([first], "outline")
    if board.wait([first], "verdict", 2 * patience):  # it may have come later, and waited itself
        raise RankError(f"{list_ranks([first])} has ended before it compared the ranks.")
    (verdict,) = board.read([first], "verdict")
    if verdict.get("asked") == board.rank:
        board.post("answer", _answer(outline, verdict["of"]))
    if verdict:
        (error,) = board.read([first], "error")
        _raise_together(board, error, verdict["ranks"])


def _lead(board: Board, stages: Board | None, outline: Outline, peers: Peers) -> None:
    """Compare all ranks with the first one, which is this one, and that with the first stage."""
    try:
        found = dict(zip(peers.ranks, board.read(peers.ranks, "outline")))
        own = found[board.rank]
        differing = [rank for rank in peers.ranks if found[rank] != own]
        if stages is not None and peers.first_stage is not None and not differing:
            (earlier,) = stages.read([peers.first_stage], "outline")
            if earlier != own:
                raise RankError(_of_summaries(earlier, own, peers.first_stage, [board.rank]))
    except RankError as error:
        absent = board.wait(peers.ranks, "outline", 0)
        ranks = [rank for rank in peers.ranks if rank not in absent]
        board.post("verdict", {"ranks": ranks})
        _publish(board, str(error), ranks)
    if not differing:
        board.post("verdict", {})
        return
    other, everyone = differing[0], [*peers.ranks]
    if found[other]["versions"] != own["versions"]:  # of which the messages may be others
        board.post("verdict", {"ranks": everyone})
        text = _of_summaries(own, found[other], board.rank, differing)
        _publish(board, text, everyone)
    board.post("verdict", {"ranks": everyone, "asked": other, "of": outline.parts})
    try:
        (answer,) = board.read([other], "answer")
        text = _explain(outline, answer, board.rank, differing)
    except RankError:  # it has ended meanwhile
        text = _of_summaries(own, found[other], board.rank, differing)
    _publish(board, text, everyone)


def _publish(board: Board, text: str, ranks: Sequence[int]) -> NoReturn:
    board.post("error", text)
    _raise_together(board, text, ranks)


def _raise_together(board: Board, text: str, ranks: Sequence[int]) -> NoReturn:
    """Raise an error once the other ranks know of it, too."""
    with contextlib.suppress(RankError):  # the process that holds the store has ended
        board.post("read", True)
        board.wait(ranks, "read", _READ_SECONDS)
    raise RankError(text)


def _answer(outline: Outline, of_first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of this rank, and its first source that differs from the first rank."""
    answer: dict[str, Any] = {"parts": outline.parts, "host": socket.gethostname()}
    if outline.parts["mix"]["sources"] == of_first["mix"]["sources"]:
        digests = zip(outline.parts["data"].values(), of_first["data"].values())
        numbers = [number for number, (own, other) in enumerate(digests) if own != other]
        if numbers:
            answer |= {"number": numbers[0], "source": outline.source(numbers[0])}
    return answer


def _explain(
    outline: Outline, answer: Mapping[str, Any], first: int, differing: Sequence[int]
) -> str:
    """Return the error for all ranks, given the answer of the first one that differs."""
    hosts = socket.gethostname(), answer["host"]
    names = f"on rank {first} ({hosts[0]})", f"on rank {differing[0]} ({hosts[1]})"
    own, parts = outline.parts, answer["parts"]
    differ = differing_parts(own, parts)
    told = {name: list_differences(own[name], parts[name], names) for name in differ}
    if "mix" in told:
        told["mix"] = list_sources(own["mix"]["sources"], parts["mix"]["sources"], names)
        told["mix"] = told["mix"] or "weights of the sources"
    if "source" in answer:
        source = outline.source(answer["number"])
        told["data"] = first_difference(source, answer["source"], names)
    else:  # the sources are others
        told.pop("data", None)
    return _sentence(told, first, differing)


def _of_summaries(
    own: Mapping[str, Any], theirs: Mapping[str, Any], first: int, differing: Sequence[int]
) -> str:
    """Return an error that names the parts that differ, of which nothing else is known."""
    names = f"on rank {first}", f"on rank {differing[0]}"
    if versions := list_differences(own["versions"], theirs["versions"], names):
        return _sentence({"versions": versions}, first, differing)
    return _sentence(dict.fromkeys(differing_parts(own, theirs), ""), first, differing)


def _sentence(told: Mapping[str, str], first: int, differing: Sequence[int]) -> str:
    """Return an error, given what differs by part; the text is empty if it is unknown."""
    texts = "; ".join(f"{name}: {text}" if text else name for name, text in told.items())
    advice = "; ".join(ADVICE[name] for name in told)
    return (
        f"{list_ranks(differing)} would read other rows than rank {first}, which differs in "
        f"{texts}. Every rank plans the whole run, so {advice}."
    )
