"""DeepSpeed's TensorBoard and CSV writers in a run that goes on or further back: every step stands there once."""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import MonitorMaster

SUPERSEDED_SUFFIX = ".superseded.csv"


def rewind_writers(writers: MonitorMaster, consumed_samples: int) -> None:
    """Let the writers of rank 0 go on at a sample, and take back what they have of later ones.

    W&B and Comet keep theirs on servers, where nothing can be taken back.

    Raises:
        OSError: a file cannot be rewritten.
    """
    if writers.tb_monitor is not None:
        summaries = writers.tb_monitor.summary_writer
        # Its next event opens a file that begins with what TensorBoard understands as: forget all from this step on.
        summaries.close()
        summaries.purge_step = consumed_samples + 1
    if writers.csv_monitor is not None:
        _rewind_csv_files(writers.csv_monitor, consumed_samples)


def _rewind_csv_files(writer: csvMonitor, consumed_samples: int) -> None:
    for path in sorted(Path(writer.log_dir).glob("*.csv")):
        if path.name.endswith(SUPERSEDED_SUFFIX):
            continue
        header, *rows = path.read_bytes().splitlines(keepends=True) or [b""]
        if not header.endswith(b"\n"):
            # A kill cut the header short, or came before it: the writer begins the file anew.
            path.unlink()
            continue
        _drop_rows_after(path, header, rows, consumed_samples)
        # The writer puts a header before the first row that it writes of a name which is not listed here.
        writer.filenames.append(path.stem)


def _drop_rows_after(path: Path, header: bytes, rows: list[bytes], consumed_samples: int) -> None:
    """Move the rows of later samples, and those that a kill cut short, to ``*.superseded.csv``."""
    is_kept = [_is_up_to(row, consumed_samples) for row in rows]
    if all(is_kept):
        return
    kept = [row for row, stays in zip(rows, is_kept, strict=True) if stays]
    # A header between rows is of a start that did not take back what it wrote again.
    dropped = [row for row, stays in zip(rows, is_kept, strict=True) if not stays and row != header]
    with open(path.with_suffix(SUPERSEDED_SUFFIX), "ab") as file:
        file.writelines(row.rstrip(b"\r\n") + b"\r\n" for row in dropped)
    written = path.with_suffix(".tmp")
    written.write_bytes(b"".join([header, *kept]))
    os.replace(written, path)


def _is_up_to(row: bytes, consumed_samples: int) -> bool:
    samples, _, value = row.partition(b",")
    try:
        float(value)
        return row.endswith(b"\n") and int(samples) <= consumed_samples
    except ValueError:
        return False
