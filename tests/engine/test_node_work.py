"""The first rank of a node works while the others wait for as long as it takes."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed

from megastable.core.errors import UserError
from megastable.engine import node_work
from megastable.engine.node_work import first_on_each_node
from megastable.engine.process_group import Peer
from megastable.engine.progress import Progress
from tests.support.output import captured_output
from tests.support.ranks import run_ranks

WORK_SECONDS = 2.5


def nodes() -> tuple[int, list[Peer]]:
    """Return this rank and three peers: rank 0 on a node of its own, ranks 1 and 2 on another one."""
    rank = torch.distributed.get_rank()
    own = Peer(rank, "node0" if rank == 0 else "node1", 1, frozenset())
    return rank, [replace(own, rank=other, host="node0" if other == 0 else "node1") for other in range(3)]


def slow_second_node(fault: str) -> dict[str, Any]:
    """Let rank 1 work for longer than any collective may take; ``fault`` says what it ends with."""
    rank, peers = nodes()
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    node_work.REPORT_SECONDS = 1.0
    called: list[float] = []

    def work() -> int:
        if rank == 1:
            time.sleep(WORK_SECONDS)
        called.append(time.time())
        if fault and rank == 1:
            raise UserError(fault)
        return rank

    found: dict[str, Any] = {"result": None, "refusal": None}
    with captured_output() as texts:
        try:
            found["result"] = first_on_each_node(rank, peers, Progress(), work)
        except UserError as error:
            found["refusal"] = str(error)
    return {**found, "called": called, "printed": "".join(texts)}


def failing_worker() -> list[str]:
    """Let the work of rank 1 fail with an error that is no refusal."""
    rank, peers = nodes()
    called: list[str] = []

    def work() -> None:
        called.append("work")
        if rank == 1:
            raise OSError("the disk is full")

    try:
        first_on_each_node(rank, peers, Progress(), work)
    except (OSError, RuntimeError) as error:
        called.append(str(error))
    return called


def test_work_that_failed_is_not_done_again_by_the_others_of_its_node() -> None:
    failed = "rank 1 on node1 failed while it prepared the data"
    assert run_ranks(failing_worker, world_size=3) == [["work", failed], ["work", "the disk is full"], [failed]]


def test_a_node_may_work_for_longer_than_a_collective_waits() -> None:
    answers = run_ranks(slow_second_node, world_size=3, fault="")
    assert [answer["result"] for answer in answers] == [0, 1, 2]
    first, second, third = (answer["called"] for answer in answers)
    assert len(first) == len(second) == len(third) == 1
    assert first < second <= third
    assert "waits for the data on node1 (rank 1), 1 s so far" in answers[0]["printed"]
    assert not answers[2]["printed"]


def test_what_one_node_refuses_all_ranks_refuse() -> None:
    answers = run_ranks(slow_second_node, world_size=3, fault="no text")
    assert [answer["refusal"] for answer in answers] == ["on node1: no text"] * 3
