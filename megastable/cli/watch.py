"""The live dashboard of ``megastable watch``."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from megastable.cli.dashboard import Dashboard
from megastable.cli.run_files import RunReader


def watch_run(run_dir: Path, refresh_seconds: float, once: bool) -> None:
    """Draw the run again every ``refresh_seconds`` until Ctrl-C; a single frame where that is all that is wanted.

    Raises:
        UserError: ``run_dir`` is no run folder.
    """
    reader, console = RunReader(run_dir), Console(highlight=False)
    if once or not sys.stdout.isatty():
        console.print(_frame(reader))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_frame(reader, console.height), refresh=True)
            time.sleep(refresh_seconds)


def _frame(reader: RunReader, height: int | None = None) -> Dashboard:
    now_unix = time.time()
    return Dashboard(reader.refresh(now_unix), now_unix, height)
