"""A disk that fills up under a run: the run goes on, the last good checkpoint stays, and later saves succeed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megastable.checkpoints.folder import PARTIAL_SUFFIX, step_folders, step_of
from megastable.checkpoints.verify import verify
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.scripts import run_script

DISK_BYTES = 24 * 2**20
FILLER = "filler"
MOUNT_SECONDS = 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a small disk of its own, in memory; it is gone with the process that holds it."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    # In a namespace of its own, where any user may mount; it is reached through the process that lives there.
    script = f'mount -t tmpfs -o size={DISK_BYTES} small "$0" && echo mounted && exec cat'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(mounted)]
    if shutil.which("unshare") is None:
        pytest.skip("no small disk can be made: there is no command unshare")
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert holder.stdout is not None
        said = holder.stdout.readline().strip()
        if said != "mounted":
            pytest.skip(f"no small disk can be made: {said}")
        yield Path(f"/proc/{holder.pid}/root{mounted}")
    finally:
        holder.kill()
        holder.communicate(timeout=MOUNT_SECONDS)


def fill_the_disk(run_dir: str, free_bytes: dict[str, int], says_so_before: bool) -> None:
    """Let rank 0 leave so many bytes before the save of a step, and the others take the disk as they find it.

    Args:
        free_bytes: step to bytes; at every other step the disk is as good as empty.
        says_so_before: whether a save asks for the free space before it writes.
    """
    from megastable.engine import checkpoint_writer
    from megastable.training.saving import Checkpoints

    vars(checkpoint_writer).update(RETRY_SECONDS=0.05)
    if not says_so_before:
        vars(checkpoint_writer).update(space_fault=lambda folder, needed_bytes: None)
    save = vars(Checkpoints)["save"]
    checkpoints = Path(run_dir) / "checkpoints"

    def fill_and_save(self: Any, state: Any, *losses: Any) -> None:
        self.finish()  # what is under way is not to meet the disk of the next save
        if os.environ["RANK"] == "0":
            filler = Path(run_dir).parent / FILLER
            filler.unlink(missing_ok=True)
            left = [path.name for path in checkpoints.glob(f"*{PARTIAL_SUFFIX}")]
            assert not left, f"{left} takes room before the save of step {state.step}"
            if str(state.step) in free_bytes:
                leave_free(filler, free_bytes[str(state.step)])
        save(self, state, *losses)

    setattr(Checkpoints, "save", fill_and_save)  # noqa: B010 - a method of a class that is not ours to change


def leave_free(filler: Path, free_bytes: int) -> None:
    """Write a file that leaves so many bytes of its disk."""
    filler.touch()
    status = os.statvfs(filler)
    rest = status.f_bavail * status.f_frsize - free_bytes
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(rest))


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def size_of_checkpoint(folder: Path) -> int:
    """Return the bytes that the files of the ranks take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("rank_*"))


CASES = {
    "the save asks first, in the background": (True, True),
    "the save finds out while it writes, in the background": (False, True),
    "the save finds out while it writes, and the run waits": (False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_full_disk_goes_on_and_saves_when_there_is_room_again(tmp_path: Path, disk: Path, case: str) -> None:
    says_so_before, asynchronous = CASES[case]
    run_file = write_run_file(
        tmp_path,
        megastable__checkpoint={"save_interval": 1, "keep_last": 3, "asynchronous": asynchronous},
        megastable__training={"total_steps": 8, "seed": 7},
    )
    measured = run_script(train_command([], run_file, tmp_path / "run"), world_size=2)
    assert measured.exit_codes == [0, 0], measured.output
    size_bytes = size_of_checkpoint(step_folders(tmp_path / "run" / "checkpoints")[0])

    # Not even the folder; the folder and a part of a file; all files of the ranks, and not the manifest.
    free_bytes = {"3": 0, "4": size_bytes // 3, "5": size_bytes}
    run_dir = disk / "run"
    finished = run_script(
        train_command([], run_file, run_dir), world_size=2,
        first=fill_the_disk, run_dir=str(run_dir), free_bytes=free_bytes, says_so_before=says_so_before,
    )  # fmt: skip
    assert finished.exit_codes == [0, 0], finished.output
    failed = events(run_dir, "save_failed")
    assert [event["step"] for event in failed] == [3, 4, 5], finished.output
    for event in failed:
        expected = "bytes free" if says_so_before else os.strerror(errno.ENOSPC)
        assert expected in event["text"] and f"no checkpoint of step {event['step']}" in event["text"], event
        assert event["text"] in finished.outputs[0]
    # Three are kept, and what failed is none of them.
    kept = step_folders(run_dir / "checkpoints")
    assert [step_of(folder) for folder in kept] == [8, 7, 6]
    assert all(verify(folder) == [] for folder in kept)
    assert len(list((run_dir / "checkpoints").iterdir())) == len(kept), "something else was left"
    rows = [[(row["step"], row["loss"]) for row in metrics(folder)] for folder in (tmp_path / "run", run_dir)]
    assert rows[0] == rows[1], "a line of the metrics was lost"


def test_the_last_good_checkpoint_of_a_run_that_ends_on_a_full_disk_is_gone_on_from(tmp_path: Path, disk: Path) -> None:
    run_file = write_run_file(
        tmp_path,
        megastable__checkpoint={"save_interval": 1, "keep_last": 1},
        megastable__training={"total_steps": 8, "seed": 7},
    )
    run_dir = disk / "run"
    finished = run_script(
        train_command([], run_file, run_dir), world_size=2,
        first=fill_the_disk, run_dir=str(run_dir), free_bytes={str(step): 0 for step in (6, 7, 8)},
        says_so_before=False,
    )  # fmt: skip
    # All steps are taken, and the last of them are lost: that is no good end.
    assert finished.exit_codes == [3, 3], finished.output
    assert "the run is at its end and could not save step 8" in finished.outputs[0]
    (last_good,) = step_folders(run_dir / "checkpoints")
    assert step_of(last_good) == 5 and verify(last_good) == []
    (disk / FILLER).unlink()
    finished = run_script(train_command([], run_file, run_dir, "--resume"), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output
    assert [step_of(folder) for folder in step_folders(run_dir / "checkpoints")] == [8]
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 9))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_that_is_to_stop_where_a_save_fails_does(tmp_path: Path, disk: Path, asynchronous: bool) -> None:
    run_file = write_run_file(
        tmp_path,
        megastable__checkpoint={"save_interval": 2, "on_failure": "stop", "asynchronous": asynchronous},
        megastable__training={"total_steps": 100, "seed": 7},
    )
    run_dir = disk / "run"
    finished = run_script(
        train_command([], run_file, run_dir), world_size=2,
        first=fill_the_disk, run_dir=str(run_dir), free_bytes={str(step): 0 for step in range(4, 101)},
        says_so_before=False,
    )  # fmt: skip
    # Asked to stop, and its last steps are not saved.
    assert finished.exit_codes == [76, 76], finished.output
    # What fills the disk waits for the save before, and takes its outcome, where that ends late.
    told = re.search(r"could not save step (\d+), and megastable.checkpoint.on_failure is 'stop'", finished.outputs[0])
    assert told is not None and int(told[1]) in ((4, 6) if asynchronous else (4,)), finished.output
    assert "this step could not be saved" in finished.outputs[0]
    # In the background a save may take some steps to fail, but not until the next one is due.
    last_step = metrics(run_dir)[-1]["step"]
    assert 4 <= last_step <= 10 if asynchronous else last_step == 4
    (kept,) = step_folders(run_dir / "checkpoints")
    assert step_of(kept) == 2 and verify(kept) == []
