"""A rank that is killed, stopped or leaves the order of the collectives ends the run, and a slow one does not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed

from megastable.checkpoints.folder import newest_complete
from megastable.core.errors import EXIT_CODE_HANG
from megastable.core.launch import Launch
from megastable.core.layout import ParallelLayout
from megastable.engine.hang_watch import hangs_watched
from megastable.engine.process_group import _introduce
from megastable.engine.progress import Progress
from megastable.model.block import TransformerBlock
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.ranks import TERMINATION_SECONDS, run_ranks
from tests.support.scripts import Launcher, run_script
from tests.support.steps import build_engine, train
from tests.support.stuck_rank import plant
from tests.support.tiny_run import tiny_run
from tests.support.tokens import micro_batches

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
        "data", 1, ParallelLayout(2, 2), (STUCK.format(1, 0, 1, 0), "waits: rank 0 (", "in reduce_gradients"),
        "deepspeed",
    ),
    "pipeline group": Case("pipeline", 3, ParallelLayout(2, 2), (STUCK.format(3, 1, 1, 0), "waits: rank 1 (")),
    "tensor group": Case(
        "tensor", 1, ParallelLayout(1, 1, 2), (STUCK.format(1, 0, 0, 1), "waits: rank 0 (", "step 3 (ForwardPass)")
    ),
    "between stages": Case("sending", 1, ParallelLayout(2, 1), ("rank 1 (stage 1, ", "rank 0 (stage 0, ")),
}  # fmt: skip


BY_DEFAULT = ("killed", "stopped", "tensor group")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in CASES],
)
def test_a_stuck_rank_ends_the_run_and_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run_file = write_run_file(
        tmp_path,
        megastable__pipeline={"num_stages": case.layout.num_stages},
        megastable__tensor_parallel={"size": case.layout.tensor_parallel_size},
        megastable__training={"total_steps": 40, "seed": 7, "hang_timeout": HANG_SECONDS},
        megastable__checkpoint={"save_interval": 2, "asynchronous": False},
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


HEALTHY_SECONDS = 4.0
"""The limit of a run in which all is slow; every wait in it is longer."""
SLOW_PASS_SECONDS = 1.0
NUM_MICRO_BATCHES = 6


def be_slow_and_healthy() -> list[float]:
    """Wait, work, step, evaluate, be stopped together and end one after the other, all for longer than the limit."""
    rank = torch.distributed.get_rank()
    peers = _introduce(launch := Launch.detect(os.environ))
    progress = Progress()
    with hangs_watched(launch, ParallelLayout(2, 1), peers, progress, HEALTHY_SECONDS):
        if rank == 0:
            with progress.at_length("working while the other waits"):
                time.sleep(1.5 * HEALTHY_SECONDS)
        torch.distributed.barrier()
        with progress.at_length("building"):
            run = tiny_run(megastable__pipeline__num_stages=2, megastable__batch_rampup={"final": NUM_MICRO_BATCHES})
            plan, engine = build_engine(run, progress)
        state, _ = train(plan, engine, 40)
        block = next(layer for layer in engine.deepspeed.module.forward_funcs if isinstance(layer, TransformerBlock))
        slow = block.register_forward_pre_hook(lambda *_: time.sleep(SLOW_PASS_SECONDS))
        state, slow_rows = train(plan, engine, 1, state)
        data = micro_batches(plan.ramp.at(0), 0, 0, 1, 16, 300)
        engine.evaluate(data if engine.needs_data else None, NUM_MICRO_BATCHES)
        slow.remove()

        if rank == 0:
            stop_all_and_go_on([peer.process_id for peer in peers])
        train(plan, engine, 40, state)
        time.sleep(2 * HEALTHY_SECONDS * rank)
    return [row["step_seconds"] for row in slow_rows]


def stop_all_and_go_on(process_ids: list[int]) -> None:
    """Stop processes, this one among them, and let them go on after longer than the limit."""
    ids = " ".join(map(str, process_ids))
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {ids}; sleep {2 * HEALTHY_SECONDS}; kill -CONT {ids}"])


@pytest.mark.slow
def test_what_is_slow_and_healthy_is_not_ended() -> None:
    (seconds,), _ = run_ranks(be_slow_and_healthy, world_size=2)
    assert seconds > 1.5 * HEALTHY_SECONDS
