"""What a run will take before it is launched: its steps, its time, its memory, and the layouts it could have."""

from megastable.training.plan_report.assumptions import DEFAULT_EFFICIENCY, Machine
from megastable.training.plan_report.basis import Basis
from megastable.training.plan_report.calibrated import Calibration, load_calibration
from megastable.training.plan_report.forecast import Forecast, forecast
from megastable.training.plan_report.micro_batch_sizes import (
    describe_choice,
    with_chosen_micro_batches,
    with_recorded_micro_batches,
)
from megastable.training.plan_report.request import load_plan, load_run
from megastable.training.plan_report.search import Candidate, search_layouts

__all__ = [
    "DEFAULT_EFFICIENCY",
    "Basis",
    "Calibration",
    "Candidate",
    "Forecast",
    "Machine",
    "describe_choice",
    "forecast",
    "load_calibration",
    "load_plan",
    "load_run",
    "search_layouts",
    "with_chosen_micro_batches",
    "with_recorded_micro_batches",
]
