"""A 64-bit integer hash: randomness that is a pure function of its input, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Any shape: the hash is element by element.
UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]

# The increment and multipliers of splitmix64 (Steele, Lea and Flood 2014), whose output passes BigCrush.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)


def hash64(values: npt.ArrayLike) -> UInt64Array:
    """Hash each integer of ``values`` (any shape, taken modulo 2^64) to 64 well-mixed bits; a bijection."""
    # At least one dimension: numpy wraps overflowing arrays silently, but warns of overflowing scalars.
    mixed = np.atleast_1d(np.asarray(values).astype(np.uint64)) + _INCREMENT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_MULTIPLIER
    return mixed ^ (mixed >> np.uint64(31))
