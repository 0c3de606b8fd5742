"""A rank that is killed, stopped, or leaves the order of the collectives ends the run, and one that is slow does not."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from megastable.core.checkpoint_folder import newest_complete
from megastable.core.layout import ParallelLayout
from megastable.engine.hang_watch import EXIT_CODE_HANG
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.ranks import TERMINATION_SECONDS
from tests.support.scripts import Launcher, run_script
from tests.support.stuck_rank import plant

HANG_SECONDS = 10
LATE_SECONDS = TERMINATION_SECONDS + 5.0
"""A stopped rank is killed so much later; and the machine may have other work to do."""


class Case(NamedTuple):
    """A fault in a layout, and what is reported of it."""

    fault: str
    rank: int
    layout: ParallelLayout
    reported: tuple[str, ...]
    launcher: Launcher = "torchrun"
    """Says who serves the store: torchrun itself, or rank 0."""


STUCK = "[megastable] stuck: rank {} (stage {}, replica {}, tensor {}), process "
CASES = {
    "killed": Case("killed", 2, ParallelLayout(2, 2), ("rank 2 (stage 1, replica 0, tensor 0)", "is gone")),
    "stopped": Case(
        "stopped", 3, ParallelLayout(2, 2), (STUCK.format(3, 1, 1, 0), "cannot show its stack", "in train_batch")
    ),
    "stopped with the store": Case(
        "stopped", 0, ParallelLayout(2, 1),
        ("which rank 0 (stage 0, replica 0, tensor 0), process", "waits: rank 1 (stage 1", "in receive_activation"),
        "deepspeed",
    ),
    "busy with something else": Case(
        "asleep", 2, ParallelLayout(2, 2), (STUCK.format(2, 1, 0, 0), "in sleep", "step 3 (ReduceGrads)"), "deepspeed"
    ),
    "data-parallel group": Case(
        "data", 1, ParallelLayout(2, 2), (STUCK.format(1, 0, 1, 0), "waits: rank 0 (", "in reduce_gradients"), "deepspeed"
    ),
    "pipeline group": Case("pipeline", 3, ParallelLayout(2, 2), (STUCK.format(3, 1, 1, 0), "waits: rank 1 (")),
    "tensor group": Case(
        "tensor", 1, ParallelLayout(1, 1, 2), (STUCK.format(1, 0, 0, 1), "waits: rank 0 (", "step 3 (ForwardPass)")
    ),
    "between stages": Case("sending", 1, ParallelLayout(2, 1), ("rank 1 (stage 1, ", "rank 0 (stage 0, ")),
}  # fmt: skip


IN_THE_FULL_MATRIX = ("busy with something else", "between stages")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in IN_THE_FULL_MATRIX else []) for name in CASES],
)
def test_a_stuck_rank_ends_the_run_and_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run_file = write_run_file(
        tmp_path,
        megastable__pipeline={"num_stages": case.layout.num_stages},
        megastable__tensor_parallel={"size": case.layout.tensor_parallel_size},
        megastable__training={"total_steps": 40, "seed": 7, "hang_timeout": HANG_SECONDS},
        megastable__checkpoint={"save_interval": 2},
    )
    run_dir = tmp_path / "run"
    mark = tmp_path / "mark"
    finished = run_script(
        train_command([], run_file, run_dir), case.layout.world_size, case.launcher,
        first=plant, fault=case.fault, rank=case.rank, mark=str(mark),
    )  # fmt: skip
    seconds = time.time() - mark.stat().st_mtime
    output = finished.output
    assert all(text in output for text in case.reported), output[-6000:]
    assert seconds < HANG_SECONDS + LATE_SECONDS, seconds
    code = 1 if case.fault == "killed" else EXIT_CODE_HANG
    signalled = [case.rank] if case.fault in ("killed", "stopped") else []
    expected = [-signal.SIGKILL if rank in signalled else code for rank in range(case.layout.world_size)]
    assert finished.exit_codes == expected, output[-6000:]
    if code == EXIT_CODE_HANG:
        # Said once, by one rank, and nobody reports the ends that follow.
        assert output.count("the run hangs: ") == 1 and " is gone" not in output, output[-6000:]
    kept = newest_complete(run_dir / "checkpoints", warn=lambda text: None)
    assert kept is not None and kept.name in ("step_00000002", "step_00000004")
    assert len(metrics(run_dir)) in (2, 3)
