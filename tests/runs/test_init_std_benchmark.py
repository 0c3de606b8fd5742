"""The recorded experiment on initial stds, with settings that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.scripts import run_script

TINY = ["--hidden", "32", "--layers", "1", "--seq-length", "8", "--batch", "1", "--steps", "12", "--warmup-steps", "2"]


def test_it_records_every_std_and_repeats_no_run(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    common = ["benchmarks/init_std.py", "--output", str(output), "--cache-dir", str(tmp_path / "cache")]
    runs: list[list[dict[str, object]]] = []
    for seeds in (["1"], ["1", "2"]):
        finished = run_script([*common, *TINY, "--lrs", "1e-2", "--seeds", *seeds])
        assert finished.exit_codes == [0], finished.output[-4000:]
        runs.append(json.loads(output.read_text())["runs"])
    once, twice = runs
    assert [(run["seed"], run["init"]) for run in twice] == [
        (seed, init) for seed in (1, 2) for init in ("0.02", "formula", "3.73 formula")
    ]
    assert twice[:3] == once and len({str(run["loss"]) for run in twice}) == 6
    assert output.with_suffix(".png").stat().st_size > 0
