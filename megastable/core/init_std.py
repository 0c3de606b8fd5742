"""Standard deviations of freshly drawn weights, by width and depth.

0.02 was right for GPT-2's widths and broke a 104B model; the formulas below shrink with the width. To add a scheme:
a function of ``(MatrixSize, fixed_std)`` and a line in ``INIT_SCHEMES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixSize:
    """Sizes of a whole matrix, over all tensor ranks, and the width of the model that it belongs to."""

    fan_in: int
    fan_out: int
    hidden_size: int

    @classmethod
    def square(cls, hidden_size: int) -> MatrixSize:
        """Make the matrix that maps the width of the model to itself."""
        return cls(hidden_size, hidden_size, hidden_size)


def fixed(size: MatrixSize, fixed_std: float | None) -> float:
    """Return the given number, whatever the width.

    Raises:
        ValueError: no number is given.
    """
    if fixed_std is None:
        raise ValueError("the scheme 'fixed' needs a std")
    return fixed_std


def transformers_without_tears(size: MatrixSize, fixed_std: float | None) -> float:
    """Compute sqrt(2 / (5 * hidden)), SmallInit of Nguyen and Salazar, arXiv 1910.05895, section 2.2."""
    return math.sqrt(2.0 / (5.0 * size.hidden_size))


def megatron_530b(size: MatrixSize, fixed_std: float | None) -> float:
    """Compute sqrt(1 / (3 * hidden)), Smith et al., arXiv 2201.11990, section 3.2.

    At a width of 14336 that is 0.00482, which held for BLOOM-176B.
    """
    return math.sqrt(1.0 / (3.0 * size.hidden_size))


def xavier(size: MatrixSize, fixed_std: float | None) -> float:
    """Compute sqrt(2 / (fan_in + fan_out)), Glorot and Bengio, AISTATS 2010, equation 12, of each stored matrix.

    Projections that are stored as one matrix count as one: their outputs are one fan_out.
    """
    return math.sqrt(2.0 / (size.fan_in + size.fan_out))


INIT_SCHEMES: dict[str, Callable[[MatrixSize, float | None], float]] = {
    "fixed": fixed,
    "transformers_without_tears": transformers_without_tears,
    "megatron_530b": megatron_530b,
    "xavier": xavier,
}
"""Name in a run file -> the std of a matrix of some size, given the std of the file, which only ``fixed`` has."""


def residual_output_std(std: float, num_layers: int) -> float:
    """Compute the std of the two projections that write into the residual stream, std / sqrt(2 * num_layers).

    ``num_layers`` counts the whole model, not one pipeline stage (Radford et al., GPT-2, section 2.3): each block adds
    twice to the stream, and so the variance of the sum does not grow with the depth.
    """
    return std / math.sqrt(2.0 * num_layers)
