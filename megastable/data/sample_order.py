"""A 64-bit integer hash: randomness that is a pure function of its input, the same on every machine.

The order of the training samples, as a pure function of (seed, epoch, index): there is no sampler to save.

Which documents are kept for validation.
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


def hash64(values: npt.ArrayLike) -> UInt64Array:
    """Hash each integer of ``values`` (any shape, taken modulo 2^64) to 64 well-mixed bits; a bijection."""
    # At least one dimension: numpy wraps overflowing arrays silently, but warns of overflowing scalars.
    mixed = np.atleast_1d(np.asarray(values).astype(np.uint64)) + _INCREMENT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_MULTIPLIER
    return mixed ^ (mixed >> np.uint64(31))


_NUM_ROUNDS = 8
_MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True)
class SampleOrder:
    """Each epoch visits every sample of ``[0, num_samples)`` once, in an order of its own.

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
        """Dataset indices (shape [n]) at ``positions`` (shape [n], >= 0) counted from the start of the run."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        round_keys = self._round_keys(epochs)
        indices = self._permute(offsets.astype(np.uint64), round_keys)
        outside = indices >= self.num_samples
        while outside.any():
            indices[outside] = self._permute(indices[outside], round_keys[:, outside])
            outside = indices >= self.num_samples
        return indices.astype(np.int64)

    def _round_keys(self, epochs: npt.NDArray[np.int64]) -> UInt64Array:
        """Keys of shape [rounds, n]: one per Feistel round and epoch."""
        seed_key = hash64(np.uint64(self.seed & _MAX_UINT64))
        epoch_keys = hash64(seed_key ^ epochs.astype(np.uint64))
        rounds = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None]
        return hash64(epoch_keys[None, :] + rounds)

    def _permute(self, values: UInt64Array, round_keys: UInt64Array) -> UInt64Array:
        """One pass through the network: a bijection of ``[0, 4^half_bits)`` for each column of keys."""
        half_bits = max(1, -(-(self.num_samples - 1).bit_length() // 2))
        shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        left, right = values >> shift, values & mask
        for key in round_keys:
            left, right = right, left ^ (hash64(right ^ key) & mask)
        return (left << shift) | right


def validation_documents(num_documents: int, validation_fraction: float) -> npt.NDArray[np.bool_]:
    """A mask of shape [num_documents] that is True for validation.

    The documents whose indices hash lowest are taken, so the split is the same on every run and machine. A fraction
    above 0 takes at least one document and leaves at least one, where there are two or more.
    """
    is_validation = np.zeros(num_documents, dtype=np.bool_)
    if validation_fraction > 0 and num_documents >= 2:
        count = min(max(1, round(validation_fraction * num_documents)), num_documents - 1)
        lowest = np.argpartition(hash64(np.arange(num_documents)), count - 1)[:count]
        is_validation[lowest] = True
    return is_validation
