"""Waits until what was written would survive a power cut, as whoever renames a file or a folder has to."""

from __future__ import annotations

import os
from pathlib import Path


def flush_to_disk(*paths: Path) -> None:
    """Return once files, or the names in folders, would survive a power cut."""
    # A renamed or new file is safe only when its folder is flushed, too: the name is an entry of the folder.
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
