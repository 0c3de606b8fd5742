"""What a process writes to its terminal, by Python or by C++."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def captured_output() -> Iterator[list[str]]:
    """Keep what is written to stdout and stderr meanwhile; it stands in the yielded list afterwards."""
    texts: list[str] = []
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with tempfile.TemporaryFile() as file:
        for descriptor in kept:
            os.dup2(file.fileno(), descriptor)
        try:
            yield texts
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in kept.items():
                os.dup2(original, descriptor)
                os.close(original)
            file.seek(0)
            texts.append(file.read().decode())
