"""Reviewing one run file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megastable.config import ConfigError, RunConfig, UnreadableRunFileError, load_run_file
from megastable.core.errors import UserError
from megastable.training.plan_report import with_chosen_micro_batches
from megastable.training.plan_report.micro_batch_sizes import CALIBRATION_KEY
from megastable.training.preflight.finding import LEVELS, Finding
from megastable.training.preflight.gpus import Gpu
from megastable.training.preflight.review import Review
from megastable.training.preflight.rules import RULES
from megastable.training.run_plan import RunPlan

SIZES_BY_HAND = "train_micro_batch_size_per_gpu, micro_batch_size_steps"


def preflight(path: Path, world_size: int | None, gpus: Sequence[Gpu]) -> list[Finding]:
    """All findings on a run file, gravest first. A file that would be refused gives its faults, as errors, and no more.

    Args:
        world_size: processes of the launch. None: as many as the file asks for, else the fewest that hold its stages
            and tensor ranks; the latter is a finding of its own.
        gpus: the kinds of GPU that it is to run on, as far as they are known.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        run = load_run_file(path, world_size=world_size)
        processes = world_size or run.megastable.training.world_size or fewest_processes(run)
        run = load_run_file(path, world_size=processes)  # now also checked against its layout
    except UnreadableRunFileError:
        raise
    except ConfigError as error:
        return [Finding.of_fault(fault) for fault in error.faults]
    try:
        run = with_chosen_micro_batches(run, processes)
    except UserError as error:
        instead = f'another calibration, or "micro_batch_size": null and the sizes by hand ({SIZES_BY_HAND})'
        return [Finding("error", CALIBRATION_KEY, str(error), instead)]
    assumed = world_size is None and run.megastable.training.world_size is None
    review = Review.of(RunPlan.of(run, processes), assumed, gpus)
    findings = [finding for rule in RULES for finding in rule(review)]
    if assumed:
        findings.append(_assumption(review))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def fewest_processes(run: RunConfig) -> int:
    """One replica: all stages, with all their tensor ranks."""
    return run.megastable.pipeline.num_stages * run.megastable.tensor_parallel.size


def _assumption(review: Review) -> Finding:
    layout = review.plan.layout
    return Finding(
        "note",
        "world_size",
        f"assumed {layout.world_size}, one replica: stages ({layout.num_stages}) x tensor ranks "
        f"({layout.tensor_parallel_size}); accumulation is not judged, and with more replicas "
        "each has fewer micro-batches",
        "--world-size N, or megastable.training.world_size",
    )
