"""The loss does not depend on how "auto" splits the batches of the ramp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config import RunConfig, run_from_dict
from megastable.planning.micro_batches import with_chosen_micro_batches
from tests.support.calibrations import write_calibration
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import run_dict

NUM_STEPS = 8
RAMP = {"steps": [[0, 4], [12, 12], [36, 20], [76, 24]]}
MICRO_BATCH_SECONDS = {"costly micro-batches": 0.9, "cheap micro-batches": 0.1}


def run_of(num_stages: int, **ramp: Any) -> RunConfig:
    """Return the tiny run in fp32, with more keys of the ramp."""
    changes = {"megastable__pipeline": {"num_stages": num_stages}, "megastable__batch_rampup": {**RAMP, **ramp}}
    return run_from_dict(run_dict(**changes))


def steps_of(num_stages: int, calibrations: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return, on every rank, the rows with micro-batches of one sample, and with those chosen by each calibration."""
    rows = {"one sample": train(*build_engine(run_of(num_stages)), NUM_STEPS)[1]}
    for name, path in calibrations.items():
        run = with_chosen_micro_batches(run_of(num_stages, micro_batch_size="auto", calibration=path), 2)
        rows[name] = train(*build_engine(run), NUM_STEPS)[1]
    return rows


@pytest.mark.parametrize("num_stages", [1, 2])
def test_losses_are_those_of_micro_batches_of_one_sample(tmp_path: Path, num_stages: int) -> None:
    files = {
        name: str(write_calibration(tmp_path / f"{seconds}.json", run_of(num_stages), 2, seconds))
        for name, seconds in MICRO_BATCH_SECONDS.items()
    }
    by_rank = run_ranks(steps_of, world_size=2, num_stages=num_stages, calibrations=files)
    assert by_rank[0].keys() == by_rank[1].keys() == {"one sample", *files}
    for rows in by_rank:
        splits = {name: [row["micro_batch_size"] for row in steps] for name, steps in rows.items()}
        # One stage has no bubble: whatever a micro-batch costs, a single one is fastest.
        assert len({tuple(sizes) for sizes in splits.values()}) == (2 if num_stages == 1 else 3), splits
        costly = splits["costly micro-batches"]
        assert num_stages == 1 or costly != sorted(costly), "no micro-batch size that falls was tried"
        for name in files:
            for key in ("loss", "grad_norm"):
                expected = [row[key] for row in rows["one sample"]]
                assert [row[key] for row in rows[name]] == pytest.approx(expected, rel=1e-5), (name, key)
