"""How a process is set up before it trains: its groups, its accelerator and its threads."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import deepspeed.comm
import pytest
import torch
import torch.distributed
from deepspeed.accelerator import real_accelerator

import megastable.engine
from megastable.core.host import cpu_mask, usable_cpus
from megastable.engine import process_group
from megastable.engine.process_group import Peer
from tests.support.output import captured_output
from tests.support.ranks import run_ranks

SHORT = timedelta(minutes=7)
"""A timeout that is nobody's default."""


def connected_process() -> dict[str, Any]:
    """Return what a process has once it is connected, and what later calls make of it."""
    c10d = torch.distributed.distributed_c10d
    found: dict[str, Any] = {
        "extension": deepspeed.comm.comm.cdb.shm_comm_op is not None,
        "timeouts": [str(getattr(c10d, name)) for name in ("default_pg_timeout", "default_pg_nccl_timeout")],
        "accelerator": accelerator_and_warnings(),
        "threads": threads_beside_another_process(),
    }
    process_group.set_default_timeout(SHORT)
    group = torch.distributed.new_group([0])
    found["sub_group"] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return found


def accelerator_and_warnings() -> list[str]:
    """Return the accelerator that DeepSpeed picks where only our package was imported before it, and what it writes."""
    name = os.environ.pop("DS_ACCELERATOR")
    picked = real_accelerator.ds_accelerator
    real_accelerator.ds_accelerator = None
    try:
        with captured_output() as texts:
            importlib.reload(megastable.engine)
            found = real_accelerator.get_accelerator().device_name()
    finally:
        os.environ["DS_ACCELERATOR"] = name
        real_accelerator.ds_accelerator = picked
    return [found, *texts]


def threads_beside_another_process() -> dict[str, int]:
    """Count the threads of a process beside a second one, where the environment does not say how many."""
    del os.environ["OMP_NUM_THREADS"]
    own = Peer(0, "here", 1, cpu_mask())
    others = {
        "on the same processors": replace(own, rank=1),
        "on processors of its own": replace(own, rank=1, cpus=frozenset({-1})),
        "on another machine": replace(own, rank=1, host="there"),
    }
    found = {}
    for name, other in others.items():
        torch.set_num_threads(usable_cpus() + 1)
        process_group.share_processors([own, other], rank=0)
        found[name] = torch.get_num_threads()
    return found


@pytest.fixture(scope="module")
def process() -> dict[str, Any]:
    return run_ranks(connected_process, world_size=1)[0]


def test_sub_groups_have_the_timeout_of_the_run(process: dict[str, Any]) -> None:
    # On a CPU the run's timeout is torch's own default, so another one shows that sub-groups follow.
    assert process["timeouts"] == [str(process_group.COLLECTIVE_TIMEOUT)] * 2
    assert process["sub_group"] == SHORT.total_seconds()


def test_connecting_builds_no_extension(process: dict[str, Any]) -> None:
    assert not process["extension"]


def test_the_accelerator_is_found_without_a_warning(process: dict[str, Any]) -> None:
    assert process["accelerator"] == ["cpu", ""]


def test_processes_of_a_node_share_its_cores(process: dict[str, Any]) -> None:
    assert process["threads"] == {
        "on the same processors": max(1, usable_cpus() // 2),
        "on processors of its own": usable_cpus(),
        "on another machine": usable_cpus(),
    }
