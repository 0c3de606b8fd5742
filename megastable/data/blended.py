"""Data sets joined to one, and the order in which a blend reads them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastable.core.blend import Blend
from megastable.data.dataset import TokenDataset
from megastable.data.sample_order import SampleOrder

Sample = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Samples(Protocol):
    """What micro-batches are made of; see ``TokenDataset``."""

    def __len__(self) -> int:
        """Count the samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Read the input ids and labels of one sample, each of shape [seq_length]."""
        ...

    def valid_tokens(self, index: int) -> int:
        """Count the labels of a sample that are not ignored."""
        ...

    def padding_sample(self) -> Sample:
        """Make a sample that changes no loss."""
        ...


class Order(Protocol):
    """Which sample comes when."""

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples (shape [n]) at ``positions`` (shape [n], >= 0) counted from the start of the run."""
        ...


class JoinedDatasets:
    """Several data sets of samples of one length, numbered through."""

    def __init__(self, parts: Sequence[TokenDataset]) -> None:
        """Join at least one data set."""
        self.parts = tuple(parts)
        self.first_samples = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.first_samples[-1]

    def __getitem__(self, index: int) -> Sample:
        """Read the input ids and labels of one sample, each of shape [seq_length].

        Raises:
            DamagedDataError: the tokens are not those that were written, or an id is outside the vocabulary.
        """
        part, inside = self._place(index)
        return part[inside]

    def valid_tokens(self, index: int) -> int:
        """Count the labels of sample ``index`` that are not ignored, without reading its tokens."""
        part, inside = self._place(index)
        return part.valid_tokens(inside)

    def padding_sample(self) -> Sample:
        """Make a sample of end-of-document ids with ignored labels."""
        return self.parts[0].padding_sample()

    def _place(self, index: int) -> tuple[TokenDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect.bisect_right(self.first_samples, index) - 1
        return self.parts[part], index - self.first_samples[part]


@dataclass(frozen=True)
class BlendedOrder:
    """Takes the samples of several data sets by weight, those of each in the order that it would have alone."""

    blend: Blend
    orders: tuple[SampleOrder, ...]
    first_samples: tuple[int, ...]
    """Of each data set in the joined one."""

    @classmethod
    def of(cls, blend: Blend, joined: JoinedDatasets, seed: int) -> BlendedOrder:
        """Order joined data sets, of which none is empty."""
        orders = tuple(SampleOrder(len(part), seed) for part in joined.parts)
        return cls(blend, orders, tuple(joined.first_samples[:-1]))

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples (shape [n]) at ``positions`` (shape [n], >= 0) counted from the start of the run."""
        places = [self.blend.at(position) for position in positions.tolist()]
        sources = np.array([source for source, _ in places], np.int64)  # (n,)
        counts = np.array([count for _, count in places], np.int64)  # (n,)
        samples = np.zeros_like(counts)
        for source, (order, first) in enumerate(zip(self.orders, self.first_samples, strict=True)):
            own = sources == source
            samples[own] = first + order(counts[own])
        return samples
