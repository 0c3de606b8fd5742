"""Large tensors of a CPU run without a visit to the kernel each.

glibc maps every block over 32 MB anew and gives it back when it is freed, so each large temporary of each step is
faulted in again, page by page; that can cost more than the arithmetic on it. Told to keep what is freed, the next step
finds it there. The process then holds for longer what it needed at its peak.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BLOCK_BYTES = (2**30, 2**25)
"""Larger blocks are mapped as before; the second is the most that a glibc before 2.35 takes."""
ALL_THAT_IS_FREE = 2**31 - 1  # bytes, the largest that fits


def keep_freed_memory() -> None:
    """Let this process keep freed blocks for itself; does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Either setting alone would leave the threshold of mapping where it is, at 128 kB.
    if mallopt is not None and any(mallopt(M_MMAP_THRESHOLD, size) for size in KEPT_BLOCK_BYTES):
        mallopt(M_TRIM_THRESHOLD, ALL_THAT_IS_FREE)
