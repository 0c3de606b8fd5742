"""Calibrations: the cost of a run's steps as it was measured, in a file, and ready to predict from.

A sweep (``benchmarks/tflops_vs_gbs.py --json``) and a probe (``megastable plan --device cpu --save-calibration``) write
the same file. Its times belong to one model on one layout in one number format; those keys of the run file stand in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from megastable.config import RunConfig
from megastable.config.run_config import differences, run_as_dict
from megastable.config.section import Section
from megastable.core.errors import UserError
from megastable.core.memory import GIB
from megastable.core.pipeline_cost import PipelineCost
from megastable.planning.run_plan import RunPlan
from megastable.planning.throughput import SweepRow

FORMAT: Literal["megastable calibration"] = "megastable calibration"
VERSION: Literal[1] = 1
# Of fp16 and bf16 only whether they are on: the keys of a loss scale, or of a clip norm, cost no time.
TIMED_KEYS = (
    "megastable.model",
    "megastable.pipeline",
    "megastable.tensor_parallel",
    "megastable.training.loss_chunk_tokens",
    "fp16.enabled",
    "bf16.enabled",
    "data_types",
)
"""Measured times are of no use to a run in which one of these differs."""


@dataclass(frozen=True)
class Calibration:
    """What was measured of a run's steps, ready to predict from.

    Attributes:
        usable_bytes: memory of one process; None where it is not known.
        source: for people: what was measured, where, and what the figures leave out.
        on_cpu: the processes compute on a CPU.
    """

    cost: PipelineCost
    usable_bytes: float | None
    source: str
    on_cpu: bool = False


class Sweep(Section):
    """What a sweep measured, for people and pictures; a plan reads ``cost`` alone."""

    rows: tuple[SweepRow, ...]
    share: float = Field(description="Of the top speed, that a recommended start has to reach.")
    recommended_global_batch_size: int
    median_unseen_error: float | None = Field(description="Of the steps that the prediction has not seen.")


class CalibrationFile(Section):
    """A calibration, as it is written."""

    format: Literal["megastable calibration"] = FORMAT
    version: Literal[1] = VERSION
    method: Literal["sweep", "probe"]
    device: str = Field(description="For people: what it was measured on.")
    on_cpu: bool
    data_parallel_size: int = Field(ge=1)
    memory_gib_per_process: float | None = Field(gt=0, description="Usable; null: not known.")
    run: dict[str, Any] = Field(description="The keys of the run file that the times depend on, by their paths.")
    cost: PipelineCost = Field(description="Seconds of every stage's passes, of a transfer and once a step.")
    sweep: Sweep | None = None

    @field_validator("cost")
    @classmethod
    def _possible(cls, cost: PipelineCost) -> PipelineCost:
        """Refuse times that would make a simulated step run backwards, or take none."""
        # A pass without time would be divided by where shares of the stages are taken.
        passes = [line for stage in cost.stages for line in (stage.forward, stage.backward)]
        parts = [part for line in (*passes, cost.transfer) for part in (line.seconds, line.seconds_per_sample)]
        if min(*parts, cost.fixed_seconds) < 0 or any(line.at(1) == 0 for line in passes):
            raise ValueError("no time may be negative, and no pass may take none")
        return cost

    def write(self, path: Path) -> None:
        """Write a new file.

        Raises:
            UserError: it is there already, or cannot be written.
        """
        # Checked before the measuring as well, but others may have written in the meantime.
        check_new(path)
        try:
            path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error


def calibration_file(
    plan: RunPlan, cost: PipelineCost, *, method: str, device: str, on_cpu: bool, memory_gib: float | None
) -> CalibrationFile:
    """Describe what was measured of a plan's steps, ready to be written.

    Args:
        method: "sweep" or "probe".
        memory_gib: usable, of one process.
    """
    return CalibrationFile.model_validate(
        {
            "method": method,
            "device": device,
            "on_cpu": on_cpu,
            "data_parallel_size": plan.layout.data_parallel_size,
            "memory_gib_per_process": memory_gib,
            "run": timed_keys(plan.run),
            "cost": cost,
        }
    )


def timed_keys(run: RunConfig) -> dict[str, Any]:
    """Return the keys of a run that its times depend on; one that is absent has the value None."""
    sections = run_as_dict(run)
    found = {}
    for key in TIMED_KEYS:
        value: Any = sections
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        found[key] = value
    return found


def check_new(path: Path) -> None:
    """Refuse to write over a file that exists; better before hours of measuring than after.

    Raises:
        UserError: the file exists, or its folder does not.
    """
    if path.exists():
        raise UserError(f"{path} exists already; name another file, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist")


def read_calibration_file(path: Path) -> CalibrationFile:
    """Read and check a file.

    Raises:
        UserError: it cannot be read, is none of ours, is of another version, or holds a fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
    # Another file, or another version, would fail the checks below with a fault for every key: name the cause instead.
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(
            f"{path}: is no calibration file; write one with benchmarks/tflops_vs_gbs.py --json, or with "
            "megastable plan --device cpu --save-calibration"
        )
    if values.get("version") != VERSION:
        raise UserError(f"{path}: is version {values.get('version')} of the format, this megastable reads {VERSION}")
    # From the text, not from the values: sections are strict, and only in JSON may a list stand for a tuple.
    try:
        return CalibrationFile.model_validate_json(text)
    except ValidationError as error:
        # The first fault is enough: people do not write these files, so a faulty one is measured anew rather than
        # mended.
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path}: {where}: {fault['msg']}") from error


def load_calibration(path: Path, plan: RunPlan) -> Calibration:
    """Load a calibration file that fits the plan.

    Raises:
        UserError: the file cannot be read, or is of another model, layout of stages or number format.
    """
    file = read_calibration_file(path)
    different = [
        f"{key}: measured with {measured!r}, planned with {planned!r}"
        for key, measured, planned in differences(file.run, timed_keys(plan.run))
    ]
    if different:
        raise UserError(
            "\n  ".join([f"{path}: was measured on another run, so its times do not hold for this one:", *different])
        )
    # A file may have been edited, so that its keys fit and its cost does not.
    if len(file.cost.stages) != plan.layout.num_stages:
        raise UserError(f"{path}: has costs of {len(file.cost.stages)} stages, the run has {plan.layout.num_stages}")
    return calibration_of(file, plan, str(path))


def calibration_of(file: CalibrationFile, plan: RunPlan, name: str) -> Calibration:
    """Return what a file that fits the plan says of it, with a warning where its number of replicas differs."""
    source = f"{name}, a {file.method} on {file.device}"
    # Replicas change no pass, which is most of a step, so that a measurement on few devices serves a plan for many.
    measured = file.data_parallel_size
    planned = plan.layout.data_parallel_size
    if measured != planned:
        source += (
            f", with {measured} replica(s) instead of {planned}: what more or fewer of them change in summing "
            "gradients and sharing the update is not in the times"
        )
    usable = None
    if file.memory_gib_per_process is not None:
        usable = file.memory_gib_per_process * GIB
    return Calibration(file.cost, usable, source, file.on_cpu)
