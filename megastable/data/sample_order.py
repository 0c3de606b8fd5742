"""The order of the training samples, as a pure function of (seed, epoch, index): there is no sampler to save."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.data.integer_hash import UInt64Array, hash64

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
