"""Writes checkpoints in the background: training waits for a copy of the state, and for nothing else.

On every rank a thread writes the copy to the rank's own file. The threads agree through a process group of their own,
so that nothing of it meets the collectives of training, and rank 0 publishes what all have written. At most one save is
under way.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megastable.checkpoints.folder import PARTIAL_SUFFIX, abandon_after, delete_abandoned, folder_name, publish
from megastable.checkpoints.manifest import write_manifest
from megastable.checkpoints.thinning import space_fault, thin
from megastable.checkpoints.tokenizer_files import write_tokenizer_files
from megastable.checkpoints.verify import faults_of_file
from megastable.config.training import CheckpointConfig
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout
from megastable.engine.checkpoint import RankRecord, RunRecord, make_manifest, num_state_bytes, write_pieces
from megastable.engine.checkpoint_tensors import file_name
from megastable.engine.model_state import ModelState, Snapshot

ATTEMPTS = 2
RETRY_SECONDS = 3.0
SLOWEST_WRITE = timedelta(hours=24)
"""A rank that has written waits for the others; what writes this long is not alive."""
SPARE_BYTES = 2**20
"""What the manifest, the tokenizer and the random generators may take beside the tensors, for each rank."""


@dataclass(frozen=True)
class SaveOutcome:
    """Says how a save has ended; the same on every rank, but known on each when its thread learns of it.

    Attributes:
        step: of the state that was saved.
        folder: the published checkpoint.
        fault: why there is none; None where there is.
        warning: what else went wrong.
        seconds: from the copy to the publication.
        stall_seconds: what training waited for it.
    """

    step: int
    folder: Path
    fault: str | None
    warning: str | None
    seconds: float
    stall_seconds: float


class CheckpointWriter:
    """Saves the state of a run below ``checkpoints``; collective but for what only looks at an outcome.

    Args:
        config: whether to write in the background, and which checkpoints to keep.
        loss: asked on rank 0, from the thread: says that the folder is another run's by now, so that nothing may be
            written or deleted there; None while it is this run's.

    Attributes:
        checkpoints: the folder.
    """

    def __init__(
        self,
        checkpoints: Path,
        state: ModelState,
        layout: ParallelLayout,
        config: CheckpointConfig,
        loss: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.checkpoints = checkpoints
        self._state = state
        self._layout = layout
        self._config = config
        self._loss = loss
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=SLOWEST_WRITE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._buffers: Snapshot | None = None
        self._under_way: Future[SaveOutcome] | None = None
        self._ended: list[SaveOutcome] = []
        self._bytes_of_all = sum(self._gathered(num_state_bytes(state.partitions) + SPARE_BYTES))

    def save(self, record: RunRecord) -> None:
        """Begin to save the state as it is; a save that is still under way is waited for first."""
        started = time.perf_counter()
        self.wait()
        if self._config.asynchronous:
            self._buffers = self._state.snapshot(reused=self._buffers)
            snapshot = self._buffers
        else:
            snapshot = self._state.as_it_is()
        write = partial(self._write, record, snapshot, started, time.perf_counter() - started)
        if self._config.asynchronous:
            self._under_way = self._thread.submit(write)
        else:
            self._ended.append(write())

    def outcomes(self) -> list[SaveOutcome]:
        """Return, once each, the saves that have ended.

        Raises:
            Exception: whatever the thread met that is no fault of the disk.
        """
        if self._under_way is not None and self._under_way.done():
            self.wait()
        ended = self._ended
        self._ended = []
        return ended

    def wait(self) -> None:
        """Return once no save is under way."""
        if self._under_way is not None:
            self._ended.append(self._under_way.result())
            self._under_way = None

    def abandon_after(self, step: int) -> str | None:
        """Let no resume go on from the checkpoints of later steps, which the run has gone back from; none is under way.

        Returns:
            Why that did not work; None where it did.
        """
        return self._said_by_rank_0(lambda: self._abandon_after(step))

    def _abandon_after(self, step: int) -> None:
        if self._loss() is None:
            abandon_after(self.checkpoints, step)

    def _write(self, record: RunRecord, snapshot: Snapshot, started: float, stall_seconds: float) -> SaveOutcome:
        step = record.state.step
        final = self.checkpoints / folder_name(step)
        fault = self._attempt(final, record, snapshot)
        for _ in range(ATTEMPTS - 1):
            if fault is not None:
                time.sleep(RETRY_SECONDS)
                fault = self._attempt(final, record, snapshot)
        # That an old checkpoint stays is no fault of the new one.
        warning = self._said_by_rank_0(lambda: self._thin(step)) if fault is None else None
        seconds = time.perf_counter() - started
        stall_seconds = stall_seconds if self._config.asynchronous else seconds
        return SaveOutcome(step, final, fault, warning, seconds, stall_seconds)

    def _attempt(self, final: Path, record: RunRecord, snapshot: Snapshot) -> str | None:
        """Write and publish once; return why that did not work, the same on every rank."""
        partial_folder = final.with_name(final.name + PARTIAL_SUFFIX)
        fault = self._said_by_rank_0(lambda: self._prepare(partial_folder))
        if fault is not None:
            return fault
        written = self._gathered(self._write_own(partial_folder, snapshot))
        fault = self._said_by_rank_0(lambda: self._publish(partial_folder, final, record, snapshot, written))
        if fault is not None:
            # The next save wants the space.
            self._said_by_rank_0(lambda: self._remove(partial_folder))
            return fault
        if self._config.keep_last is None:
            return None
        # Older ones may go: what is on the disk has to be what was written.
        fault = _joined(self._gathered(faults_of_file(final, file_name(self._rank), written[self._rank].file)))
        return None if fault is None else f"what was written cannot be read back: {fault}"

    def _write_own(self, partial_folder: Path, snapshot: Snapshot) -> RankRecord | str:
        try:
            return write_pieces(partial_folder, self._rank, self._state.partitions, snapshot)
        except OSError as error:
            return f"{self._layout.describe(self._rank)}: {error}"

    def _prepare(self, partial_folder: Path) -> str | None:
        lost = self._loss()
        if lost is not None:
            return lost
        shutil.rmtree(partial_folder, ignore_errors=True)  # of an attempt that failed
        # Before the first save there is none, and of a folder that is not there the free space is not known.
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        fault = space_fault(self.checkpoints, self._bytes_of_all)
        if fault is None:
            partial_folder.mkdir()
        return fault

    def _publish(
        self,
        partial_folder: Path,
        final: Path,
        record: RunRecord,
        snapshot: Snapshot,
        written: list[RankRecord | str],
    ) -> str | None:
        fault = _joined(rank for rank in written if isinstance(rank, str))
        if fault is None:
            ranks = [rank for rank in written if isinstance(rank, RankRecord)]
            tokenizer = write_tokenizer_files(partial_folder, record.tokenizer)
            write_manifest(make_manifest(record, self._layout, snapshot, ranks, tokenizer), partial_folder)
            fault = self._loss()
        if fault is None:
            publish(partial_folder, final)
        return fault

    def _remove(self, partial_folder: Path) -> None:
        if self._loss() is None:
            shutil.rmtree(partial_folder, ignore_errors=True)

    def _thin(self, step: int) -> str | None:
        if self._loss() is not None:
            return None
        try:
            thin(self.checkpoints, step, self._config)
            delete_abandoned(self.checkpoints)
        except OSError as error:
            return f"an older checkpoint cannot be deleted: {error}"
        return None

    def _said_by_rank_0(self, act: Callable[[], str | None]) -> str | None:
        """Let rank 0 act, and tell every rank what it says is wrong; a disk that does not do what it should is that."""
        said: list[str | None] = [None]
        if self._rank == 0:
            try:
                said[0] = act()
            # A ValueError is of a manifest that breaks a rule; the other ranks wait for an answer all the same.
            except (OSError, UserError, ValueError) as error:
                said[0] = str(error)
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def _gathered(self, value: Any) -> list[Any]:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, value, group=self._group)
        return everywhere


def _joined(faults: Iterable[str | None]) -> str | None:
    """Make one sentence of all faults; None where there is none."""
    found = [fault for fault in faults if fault is not None]
    return "; ".join(found) if found else None
