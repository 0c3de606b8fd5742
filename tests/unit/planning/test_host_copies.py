"""The copies of the state that a run may hold in host memory: every one that it may come to is counted."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.planning.memory import host_copies
from megastable.planning.run_plan import RunPlan
from tests.support.tiny_run import tiny_run


@pytest.mark.parametrize("save_interval", [None, 10])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("guard", ["warn", "rollback"])
def test_every_copy_that_a_run_may_hold_is_counted(save_interval: int | None, asynchronous: bool, guard: str) -> None:
    """A run without an interval saves where the file SAVE asks for it, and needs the same memory then."""
    checkpoint: dict[str, Any] = {"save_interval": save_interval, "asynchronous": asynchronous}
    run = tiny_run(megastable__checkpoint=checkpoint, megastable__stability={"guard": guard})
    copies = host_copies(RunPlan.of(run, 1))
    assert len(copies.uses) == asynchronous + 2 * (guard == "rollback")
    assert copies.total_bytes == len(copies.uses) * copies.bytes_each
    assert ("where the file SAVE asks for one" in str(copies)) == (asynchronous and save_interval is None)
    assert ("snapshot_seconds" in str(copies)) == (guard == "rollback")
