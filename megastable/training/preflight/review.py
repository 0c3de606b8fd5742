"""What the rules look at: the run, its plan on a layout, its size, the machine's GPUs and the text at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megastable.config import ModelConfig, RunConfig
from megastable.config.stages import model_parts, model_shape
from megastable.core.parameters import num_parameters
from megastable.training.preflight.corpus import LocalText, look_at_text
from megastable.training.preflight.customs import LEAST_PARAMETERS
from megastable.training.preflight.gpus import Gpu
from megastable.training.run_plan import RunPlan


@dataclass(frozen=True)
class Review:
    """One run under review."""

    plan: RunPlan
    num_parameters: int
    world_size_was_assumed: bool
    gpus: tuple[Gpu, ...]
    text: LocalText | None
    """None where the documents are not files of this machine."""

    @classmethod
    def of(cls, plan: RunPlan, world_size_was_assumed: bool, gpus: Sequence[Gpu]) -> Review:
        """Gather what the rules need."""
        own = plan.run.megastable
        return cls(
            plan, count_parameters(own.model), world_size_was_assumed, tuple(gpus), look_at_text(own.data.source)
        )

    @property
    def run(self) -> RunConfig:
        """The run file."""
        return self.plan.run

    @property
    def model(self) -> ModelConfig:
        """The model of the run file."""
        return self.plan.run.megastable.model

    @property
    def has_customary_size(self) -> bool:
        """False where the model is too small for the customary ranges."""
        return self.num_parameters >= LEAST_PARAMETERS


def count_parameters(model: ModelConfig) -> int:
    """The weights of a model of the run file."""
    return num_parameters(model_shape(model), model_parts(model))
