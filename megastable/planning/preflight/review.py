"""The parts of a review: what a rule is given, what it finds, and what is customary for a GPT of a given size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megastable.config import Fault, ModelConfig, RunConfig
from megastable.config.reading.faults import NO_VALUE, short_json
from megastable.config.stages import model_parts, model_shape
from megastable.core.layers import num_parameters
from megastable.planning.run_plan import RunPlan

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Gravest first. error: refused, or unsafe. warning: the run will likely suffer. note: unusual, or good to know."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with which key, why (with the number), and what to write instead."""

    level: Level
    key: str
    message: str
    suggestion: str

    @classmethod
    def of_fault(cls, fault: Fault) -> Finding:
        """Turn a fault for which the file is refused into a finding.

        A fault's message ends in what is legal, mostly after a semicolon: that is the suggestion.
        """
        why, _, legal = fault.message.rpartition("; ")
        # A fault without a key is one of the layout.
        key = fault.path or "world_size"
        if fault.value is NO_VALUE and why:
            return cls("error", key, why, legal)
        if fault.value is NO_VALUE:
            return cls("error", key, fault.message, "add it" if fault.path else "change one of them")
        # A fault prints the value before its message, which then need not name it.
        message = f"is {short_json(fault.value)}"
        if why:
            message += f": {why}"
        return cls("error", key, message, legal)


@dataclass(frozen=True)
class Gpu:
    """A GPU's name and CUDA compute capability, such as (7, 5)."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class LocalText:
    """Text files of this machine, or the reason why there are none."""

    num_documents: int
    num_bytes: int
    fault: str = ""
    num_tokens: int | None = None
    """Of a source that has tokens instead of text; it has no bytes then."""


@dataclass(frozen=True)
class Review:
    """One run under review: all that a rule may look at."""

    plan: RunPlan
    num_parameters: int
    world_size_was_assumed: bool
    gpus: tuple[Gpu, ...]
    text: LocalText | None
    """None where the documents are not files of this machine."""

    @classmethod
    def of(cls, plan: RunPlan, world_size_was_assumed: bool, gpus: Sequence[Gpu], text: LocalText | None) -> Review:
        """Gather what the rules need of a planned run."""
        return cls(plan, count_parameters(plan.run.megastable.model), world_size_was_assumed, tuple(gpus), text)

    @property
    def run(self) -> RunConfig:
        """Return the run file."""
        return self.plan.run

    @property
    def model(self) -> ModelConfig:
        """Return the model of the run file."""
        return self.plan.run.megastable.model

    @property
    def has_customary_size(self) -> bool:
        """Tell whether the model is large enough for the customary ranges."""
        return self.num_parameters >= LEAST_PARAMETERS


def count_parameters(model: ModelConfig) -> int:
    """Count the weights of a model of the run file."""
    return num_parameters(model_shape(model), model_parts(model))


# What is customary


@dataclass(frozen=True)
class SizeClass:
    """Customary ranges (both ends included) of models with less than ``below`` parameters."""

    name: str
    below: float
    global_batch_size: tuple[int, int]
    accumulation_steps: tuple[int, int]


SIZE_CLASSES = (
    SizeClass("under 1B", 1e9, (256, 512), (2, 4)),
    SizeClass("1-10B", 10e9, (1024, 2048), (8, 16)),
    SizeClass("over 10B", math.inf, (4096, 8192), (32, 64)),
)

PEAK_LEARNING_RATES = (
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1e-4),
    (175e9, 0.6e-4),
)
"""Parameters and highest learning rate of GPT-3's models: Brown et al., arXiv 2005.14165, table 2.1."""

LEAST_PARAMETERS = 50e6
"""Smaller models are experiments; no customary range is theirs."""


def size_class(num_parameters: int) -> SizeClass:
    """Find the class of a model with so many parameters."""
    return next(each for each in SIZE_CLASSES if num_parameters < each.below)


def customary_peak_lr(num_parameters: int) -> float:
    """Look up the table's learning rate, interpolated on logarithms; beyond its ends that of the nearest model."""
    after = bisect_right([size for size, _ in PEAK_LEARNING_RATES], num_parameters)
    if after in (0, len(PEAK_LEARNING_RATES)):
        return PEAK_LEARNING_RATES[min(after, len(PEAK_LEARNING_RATES) - 1)][1]
    # The learning rate falls roughly as a power of the size, which is a straight line between logarithms.
    (smaller, lr_before), (larger, lr_after) = PEAK_LEARNING_RATES[after - 1 : after + 1]
    share = math.log(num_parameters / smaller) / math.log(larger / smaller)
    return lr_before * (lr_after / lr_before) ** share


def short_count(number: float) -> str:
    """Write a number in three digits and the letter of its thousands, such as 125M or 1.3B."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:g}"
