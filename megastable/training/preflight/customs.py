"""What is customary for a GPT of a given size: batches, accumulation, learning rate."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


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
    """The class of a model."""
    return next(each for each in SIZE_CLASSES if num_parameters < each.below)


def customary_peak_lr(num_parameters: int) -> float:
    """The table's learning rate, interpolated on logarithms; beyond its ends the nearest one."""
    after = bisect_right([size for size, _ in PEAK_LEARNING_RATES], num_parameters)
    if after in (0, len(PEAK_LEARNING_RATES)):
        return PEAK_LEARNING_RATES[min(after, len(PEAK_LEARNING_RATES) - 1)][1]
    (smaller, lr_before), (larger, lr_after) = PEAK_LEARNING_RATES[after - 1 : after + 1]
    share = math.log(num_parameters / smaller) / math.log(larger / smaller)
    return lr_before * (lr_after / lr_before) ** share


def short_count(number: float) -> str:
    """125M, 1.3B."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:g}"
