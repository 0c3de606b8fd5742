"""Files of a run folder, with every key that a run may write, to change for a test of ``megastable watch``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from megastable.cli.run_files import Row, RunReader, RunState
from megastable.cli.watch import Dashboard
from megastable.config import load_run_file
from megastable.config.run_config import run_as_dict

QUICKSTART = Path(__file__).parents[3] / "ds_configs" / "quickstart.json"
NOW_UNIX = 1_700_000_000.0

LAYERS: dict[str, Row] = {
    "embedding": {"grad_norm": 0.11, "weight_norm": 41.5, "update_norm": 0.004, "update_ratio": 1.25e-4,
                  "max_activation": 3.25, "grad_zero_share": 0.875},
    "block_0": {"grad_norm": 0.12, "weight_norm": 42.5, "update_norm": 0.004, "update_ratio": 1.5e-4,
                "max_activation": 4.25, "max_attention_logit": 13.75, "grad_zero_share": 0.0},
    "block_1": {"grad_norm": 0.96, "weight_norm": 43.5, "update_norm": 0.004, "update_ratio": 1.75e-4,
                "max_activation": 5.25, "max_attention_logit": 14.75, "grad_zero_share": 0.00002},
    "head": {"grad_norm": 0.13, "weight_norm": 44.5, "update_norm": 0.004, "update_ratio": 2e-4,
             "max_activation": 6.25, "grad_zero_share": 0.5},
}  # fmt: skip
"""block_1 has 8 times the median gradient norm, 0.125, and nothing else stands out; its logit is the largest value."""

EVENTS: list[Row] = [
    {"step": 1, "consumed_samples": 8, "kind": "ramp", "text": "global batch 8 -> 16", "data": {}},
    {"step": 2, "consumed_samples": 16, "kind": "overflow", "text": "infinite in [block_1]\non rank 1", "data": {}},
]


def metrics_row(step: int, **changes: Any) -> Row:
    """A monitored and evaluated step of the quickstart, on two replicas."""
    row = {
        "step": step, "consumed_samples": step * 16, "consumed_tokens": step * 2048, "global_batch_size": 16,
        "micro_batch_size": 4, "num_microbatches": 2, "lr": 3e-4, "loss": 5.0 - step / 100, "grad_norm": 0.625,
        "loss_scale": 4096.0, "skipped": False, "step_seconds": 0.5, "tokens_per_second": 4321.0,
        "tflops_per_device": 12.5, "hardware_tflops_per_device": 15.5, "eval_loss": 4.75, "clip_coefficient": 0.875,
        "loss_volatility": 0.0625, "host_memory_gib": 7.5, "device_memory_gib": 70.5, "headroom": 0.3125,
        "slowest_rank": 3, "slowest_rank_share": 0.75, "layers": LAYERS,
    }  # fmt: skip
    return {**row, **changes}


def write_rows(path: Path, rows: Iterable[Row], mode: str = "w") -> None:
    """Write a line of JSON for every row."""
    with open(path, mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_config(run_dir: Path) -> None:
    """Write the quickstart's config.json."""
    (run_dir / "config.json").write_text(json.dumps(run_as_dict(load_run_file(QUICKSTART))))


def state_of(run_dir: Path) -> RunState:
    """The run as a new reader sees it."""
    return RunReader(run_dir).refresh(NOW_UNIX)


def frame(state: RunState, width: int = 120, height: int | None = None, age_seconds: float = 3.0) -> str:
    """The text of a frame that is drawn ``age_seconds`` after the newest step."""
    now_unix = (state.newest_step_unix or NOW_UNIX) + age_seconds
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(Dashboard(state, now_unix, height))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
