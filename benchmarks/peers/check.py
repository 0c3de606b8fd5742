"""Whether all candidates learn the same: their loss curves in fp32 beside that of the one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpt import Settings
from measure import run_rounds
from report import LIMIT
from trainers import Trainer

TOLERANCE = 1e-5  # relative; fp32 rounds at 6e-8, and a sum over tokens in another order differs by a few of those


def largest_differences(
    trainers: dict[str, Trainer], settings: Settings, batch_sizes: Sequence[int], rounds: int
) -> dict[str, float]:
    """Return, by candidate, the largest relative difference from the one process over all steps of the curve.

    The batch sizes alternate within one curve, so that what a change of batch breaks is seen.
    """
    differences = {name: 0.0 for name in trainers if name != LIMIT}
    for row in run_rounds(trainers, settings, batch_sizes, rounds):
        expected = row["losses"][LIMIT]
        for name in differences:
            if name in row["losses"]:
                differences[name] = max(differences[name], relative_difference(row["losses"][name], expected))
    return differences


def relative_difference(loss: float, expected: float) -> float:
    """Return the difference over the expected loss; infinite where one of them is not finite."""
    if not (math.isfinite(loss) and math.isfinite(expected)):
        return math.inf  # a comparison with NaN would let it pass
    return abs(loss - expected) / abs(expected)
