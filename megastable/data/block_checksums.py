"""Checksums of the blocks of a token file: written with it, and compared with each block when it is first read."""

from __future__ import annotations

import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1 << 16
"""What a sample reads at least, the first time. The kernel reads as much ahead: a slow disk has no more to do."""
CHECKSUM_DTYPE = np.dtype("<u4")
"""CRC-32, which notices every change within 32 bits in a row, such as that of one token, and all others but one in
2**32. A checksum against malice would take four times as long."""

TokenArray = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]


class ChecksumWriter:
    """Collects the checksums of a file that is written in parts of any size."""

    def __init__(self) -> None:
        """Start with an empty file."""
        # Four bytes a block: a list of ints would take a gigabyte for a file of two terabytes.
        self._checksums = array("I")
        self._last_block_bytes = BLOCK_BYTES

    def append(self, stored: bytes) -> None:
        """Take in the bytes that are written next."""
        view = memoryview(stored)
        while len(view):
            if self._last_block_bytes == BLOCK_BYTES:
                self._checksums.append(0)
                self._last_block_bytes = 0
            part = view[: BLOCK_BYTES - self._last_block_bytes]
            self._checksums[-1] = zlib.crc32(part, self._checksums[-1])
            self._last_block_bytes += len(part)
            view = view[len(part) :]

    def write(self, path: Path) -> None:
        """Write the checksums of all blocks, the last of which may be shorter."""
        path.write_bytes(np.array(self._checksums, CHECKSUM_DTYPE).tobytes())


class BlockChecksums:
    """Compares blocks of tokens with their checksums, each once."""

    def __init__(self, tokens: TokenArray, path: Path) -> None:
        """Map the checksums of ``tokens`` into memory; a ValueError says that there is not one for each block."""
        num_blocks = -(-tokens.nbytes // BLOCK_BYTES)
        expected = num_blocks * CHECKSUM_DTYPE.itemsize
        found = path.stat().st_size
        if found != expected:
            raise ValueError(f"{path.name} has {found:,} bytes instead of {expected:,}")
        self.tokens = tokens
        # An empty file cannot be mapped.
        self._checksums = np.memmap(path, CHECKSUM_DTYPE, mode="r") if num_blocks else np.zeros(0, CHECKSUM_DTYPE)
        self._verified = np.zeros(num_blocks, np.bool_)

    def first_damaged(self, start: int, stop: int) -> slice | None:
        """Compare the blocks that hold the tokens ``[start, stop)``; returns the tokens of the first one that differs.

        A block that was as written is not read again.
        """
        block_tokens = BLOCK_BYTES // self.tokens.itemsize
        for block in range(start // block_tokens, -(-stop // block_tokens)):
            if self._verified[block]:
                continue
            tokens = slice(block * block_tokens, (block + 1) * block_tokens)
            if zlib.crc32(self.tokens[tokens].data) != self._checksums[block]:
                return tokens
            self._verified[block] = True
        return None


def describe_damage(tokens: npt.NDArray[Any], start: int, vocab_size: int) -> str:
    """Say what a file has instead of ``tokens``, its own from ``start`` on; names an id that is impossible."""
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        first = int(outside[0])
        return f"the id {tokens[first]} at token {start + first:,}, outside its vocabulary of {vocab_size:,}"
    return f"other tokens than were written, somewhere in {start:,} to {start + len(tokens) - 1:,}"
