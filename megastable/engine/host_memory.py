"""Large tensors of a CPU run that are not paged in anew at every step.

glibc maps every block over 32 MB anew and returns it when it is freed, so each large temporary of each step is faulted
in again, page by page, which can cost more than the arithmetic on it. A process that keeps what it frees finds it there
at the next step. It then holds for longer what it needed at its peak.
"""

from __future__ import annotations

import ctypes

# The parameters of mallopt, as malloc.h numbers them.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BLOCK_BYTES = (2**30, 2**25)
"""Blocks up to this size are kept. 1 GiB is tried first; 32 MiB is the most that a glibc before 2.35 takes."""
ALL_THAT_IS_FREE = 2**31 - 1
"""Bytes at the end of the heap that are not returned: the largest number that fits."""


def keep_freed_memory() -> None:
    """Let this process keep freed blocks for itself; do nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Either setting alone stops glibc from adapting the other, and would leave the threshold of mapping at 128 kB.
    if mallopt is not None and any(mallopt(M_MMAP_THRESHOLD, size) for size in KEPT_BLOCK_BYTES):
        mallopt(M_TRIM_THRESHOLD, ALL_THAT_IS_FREE)
