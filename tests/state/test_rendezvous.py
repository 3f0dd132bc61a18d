# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks exchange messages through any store of torch.distributed, with a bounded wait."""

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from energon_ext.errors import RankError
from energon_ext.state.rendezvous import Board, board_of, list_ranks
from tests.megatron.processes import free_port

RANKS = range(3)


@pytest.fixture(params=["file", "hash", "tcp"])
def store(request, tmp_path):
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    return dist.HashStore() if request.param == "hash" else tcp_store()


def tcp_store(port=None, **options):
    is_server = port is None
    limit = datetime.timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", port or free_port(), None, is_server, limit, **options)


def test_every_rank_reads_what_the_others_post(store):
    with ThreadPoolExecutor(len(RANKS)) as pool:

        def exchange(rank):
            board = Board("name", dist.PrefixStore("run", store), rank, 60)
            board.post("greeting", {"rank": rank})
            return board.read(RANKS, "greeting")

        found = list(pool.map(exchange, RANKS))
    assert found == [[{"rank": rank} for rank in RANKS]] * 3


def test_messages_of_an_earlier_board_are_not_read_again(store):
    for text in ("first", "second"):
        boards = [Board("name", store, rank, 60) for rank in RANKS]
        for board in boards:
            assert board.wait(RANKS, "text", 0) == [*RANKS[board.rank :]]
            board.post("text", f"{text} of {board.rank}")
        assert boards[0].read([2, 1], "text") == [f"{text} of 2", f"{text} of 1"]


def test_groups_of_ranks_count_their_own_boards(store):
    for rank in (0, 1):
        Board(board_of([0, 1]), store, rank, 60)
    boards = [Board(board_of(RANKS), store, rank, 60) for rank in RANKS]
    for board in boards:
        board.post("text", board.rank)
    assert [board.read(RANKS, "text") for board in boards] == [[0, 1, 2]] * 3


def test_ranks_that_post_nothing_are_named(store):
    board = Board("name", store, 1, 0.01)
    board.post("text", "here")
    with pytest.raises(
        RankError, match=r"^Ranks 0, 2 did not draw a batch within 0.01 s of rank 1"
    ):
        board.read(RANKS, "text")
    assert board.wait(RANKS, "text", 0.01) == [0, 2]


def test_the_end_of_the_process_with_the_store_is_one_error():
    server = tcp_store()
    board = Board("name", tcp_store(server.port), 1, 60)
    del server
    with pytest.raises(RankError, match=r"the process that holds it, usually rank 0, has ended"):
        board.read([0], "text")


def test_few_of_many_ranks_are_listed():
    assert list_ranks([3]) == "Rank 3"
    assert list_ranks(range(8, 16)) == "Ranks 8, 9, 10, 11, 12, 13, 14, 15"
    assert list_ranks(range(20)) == "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
