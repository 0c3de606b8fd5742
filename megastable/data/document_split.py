"""Which documents are kept for validation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megastable.data.integer_hash import hash64


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
