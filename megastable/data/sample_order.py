"""Which sample comes when, and which documents are kept for validation: pure functions of integers.

Both rest on one integer hash, which is the same on every machine and in every version. So the data layer has no
generator whose state could be lost: a resumed run computes where it is from the seed and the samples consumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Any shape: the hash is element by element.
UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]

# The increment and multipliers of splitmix64 (Steele, Lea and Flood 2014), whose output passes BigCrush.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)
_MAX_UINT64 = 2**64 - 1

_NUM_ROUNDS = 8
"""Of the Feistel network. With fewer, the orders of small data sets are not equally frequent."""


def hash64(values: npt.ArrayLike) -> UInt64Array:
    """Hash each integer of ``values`` (any shape, taken modulo 2^64) to 64 well-mixed bits; a bijection."""
    # At least one dimension: numpy wraps overflowing arrays silently, but warns of overflowing scalars.
    mixed = np.atleast_1d(np.asarray(values).astype(np.uint64)) + _INCREMENT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_MULTIPLIER
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class SampleOrder:
    """Visits every sample of ``[0, num_samples)`` once an epoch, in another order each epoch.

    The order is a keyed Feistel network over the smallest even number of bits that holds ``num_samples``; results
    past the end are fed through it again until they fall inside (cycle walking), which keeps it a bijection. So any
    position of any epoch costs the same and no permutation is ever held in memory.
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"an order needs at least one sample, got {self.num_samples}")

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return dataset indices (shape [n]) at ``positions`` (shape [n], >= 0) counted from the start of the run."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)  # (n,) each
        round_keys = self._round_keys(epochs)  # (rounds, n)
        indices = self._permute(offsets.astype(np.uint64), round_keys)  # (n,)
        # The network permutes up to four times as many numbers as there are samples. Walking on along the cycle of a
        # number inside must come back inside, and two numbers never arrive at the same place.
        outside = indices >= self.num_samples
        while outside.any():
            indices[outside] = self._permute(indices[outside], round_keys[:, outside])
            outside = indices >= self.num_samples
        return indices.astype(np.int64)

    def _round_keys(self, epochs: npt.NDArray[np.int64]) -> UInt64Array:
        """Derive keys of shape [rounds, n]: one per Feistel round and epoch."""
        # Seeds of any size: their low 64 bits count.
        seed_key = hash64(np.uint64(self.seed & _MAX_UINT64))
        epoch_keys = hash64(seed_key ^ epochs.astype(np.uint64))  # (n,)
        rounds = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None]  # (rounds, 1)
        return hash64(epoch_keys[None, :] + rounds)

    def _permute(self, values: UInt64Array, round_keys: UInt64Array) -> UInt64Array:
        """Pass ``values`` (shape [n]) once through the network: a bijection of ``[0, 4^half_bits)`` for each column."""
        half_bits = max(1, -(-(self.num_samples - 1).bit_length() // 2))
        shift = np.uint64(half_bits)
        mask = np.uint64((1 << half_bits) - 1)
        left = values >> shift
        right = values & mask
        for key in round_keys:
            # Whatever the hash gives, this can be undone from its result, so it is a bijection.
            left, right = right, left ^ (hash64(right ^ key) & mask)
        return (left << shift) | right


def validation_documents(num_documents: int, validation_fraction: float) -> npt.NDArray[np.bool_]:
    """Return a mask of shape [num_documents] that is True for validation.

    The documents whose indices hash lowest are taken, so the split is the same on every run and machine. A fraction
    above 0 takes at least one document and leaves at least one, where there are two or more.
    """
    is_validation = np.zeros(num_documents, dtype=np.bool_)
    count = num_validation_documents(num_documents, validation_fraction)
    if count:
        lowest = np.argpartition(hash64(np.arange(num_documents)), count - 1)[:count]
        is_validation[lowest] = True
    return is_validation


def num_validation_documents(num_documents: int, validation_fraction: float) -> int:
    """Count the documents that are for validation; see ``validation_documents``."""
    if validation_fraction <= 0 or num_documents < 2:
        return 0
    return min(max(1, round(validation_fraction * num_documents)), num_documents - 1)
