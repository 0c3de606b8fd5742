from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from megastable.core.errors import UserError
from megastable.data import cache_folder, prepare_corpus, token_writer
from megastable.data.cache_folder import build_once
from megastable.data.text_files import TextFiles
from tests.data.data_examples import text_data, tiny_model, write_documents

REPOSITORY = Path(__file__).parents[2]
TIME_LIMIT_SECONDS = 60

Worker = subprocess.Popen[str]


def folders(cache_dir: Path) -> list[str]:
    return [entry.suffix for entry in (cache_dir / "tokens").iterdir() if entry.is_dir()]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIME_LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.02)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents")


@pytest.fixture
def start(tmp_path: Path, documents: Path) -> Iterator[Callable[[], Worker]]:
    """Start a worker that ends its build when ``tmp_path / "release"`` exists; none outlives the test."""
    workers: list[Worker] = []

    def start_worker() -> Worker:
        arguments = [documents, tmp_path / "cache", tmp_path / "log", tmp_path / "release"]
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.data.corpus_worker", *map(str, arguments)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.kill()
        worker.communicate()


def builders(tmp_path: Path) -> list[int]:
    """List the process ids of the workers that have built all but the end, in order."""
    log = tmp_path / "log"
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_until_waiting(worker: Worker) -> None:
    assert worker.stderr is not None
    assert "Waiting for another process" in worker.stderr.readline()


def fingerprint_of(worker: Worker) -> str:
    output, errors = worker.communicate(timeout=TIME_LIMIT_SECONDS)
    assert worker.returncode == 0, errors
    return output.strip()


@pytest.mark.timeout(2 * TIME_LIMIT_SECONDS)
def test_of_processes_at_once_one_builds_and_the_others_wait(
    tmp_path: Path, documents: Path, start: Callable[[], Worker]
) -> None:
    workers = [start() for _ in range(3)]
    wait_until(lambda: len(builders(tmp_path)) > 0)
    for worker in workers:
        if worker.pid not in builders(tmp_path):
            wait_until_waiting(worker)
    (tmp_path / "release").touch()
    fingerprints = {fingerprint_of(worker) for worker in workers}
    assert len(builders(tmp_path)) == 1
    corpus = prepare_corpus(text_data(documents, tmp_path / "cache"), tiny_model(), show_progress=False)
    assert fingerprints == {corpus.fingerprint}
    assert folders(tmp_path / "cache") == [""]


@pytest.mark.timeout(2 * TIME_LIMIT_SECONDS)
def test_a_killed_builder_leaves_nothing_half_built_and_the_next_in_line_builds(
    tmp_path: Path, documents: Path, start: Callable[[], Worker]
) -> None:
    killed = start()
    wait_until(lambda: builders(tmp_path) == [killed.pid])
    waiting = start()
    wait_until_waiting(waiting)
    assert folders(tmp_path / "cache") == [".building"]
    killed.kill()
    (tmp_path / "release").touch()
    fingerprint = fingerprint_of(waiting)
    assert builders(tmp_path) == [killed.pid, waiting.pid]
    assert folders(tmp_path / "cache") == [""]
    fresh = prepare_corpus(text_data(documents, tmp_path / "fresh"), tiny_model(), show_progress=False)
    assert fingerprint == fresh.fingerprint


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()],
)
def test_a_build_that_was_interrupted_is_gone_on_from(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "target"

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise error

    with pytest.raises((UserError, KeyboardInterrupt, MemoryError)):
        build_once(target, fail, show_progress=False)
    assert not target.exists()
    build_once(target, lambda folder: (folder / "rest").touch(), show_progress=False)
    assert sorted(entry.name for entry in target.iterdir()) == ["half", "rest"]
    assert not (tmp_path / "target.building").exists()


def test_a_build_of_documents_that_cannot_be_read_leaves_nothing_where_none_is_finished(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise UserError("a document")

    with pytest.raises(UserError, match="a document"):
        build_once(tmp_path / "target", fail, show_progress=False)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_a_document_that_cannot_be_read_for_once_does_not_cost_those_before_it(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(token_writer, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(token_writer, "_SYNC_SECONDS", 0)
    whole = prepare_corpus(text_data(documents, tmp_path / "whole"), tiny_model(), show_progress=False)
    own = TextFiles.__getitem__

    def stale(self: TextFiles, index: int) -> str:
        if index == 15:
            raise UserError("Stale file handle")
        return own(self, index)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="Stale file handle"):
        patch.setattr(TextFiles, "__getitem__", stale)
        prepare_corpus(text_data(documents, tmp_path / "cache"), tiny_model(), show_progress=True)
    corpus = prepare_corpus(text_data(documents, tmp_path / "cache"), tiny_model(), show_progress=True)
    assert "Going on after" in capsys.readouterr().err
    assert corpus.fingerprint == whole.fingerprint


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    def never(folder: Path) -> None:
        raise AssertionError(folder)

    build_once(tmp_path, never, show_progress=False)


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file/tokens/target"
    with pytest.raises(UserError, match=rf"megastable\.data\.cache_dir: {target.parent} cannot be written"):
        build_once(target, lambda folder: None, show_progress=False)


def test_a_process_that_waits_says_how_far_the_other_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_folder, "REPORT_SECONDS", 0.02)
    target = tmp_path / "target"
    other = FileLock(f"{target}.lock")
    other.acquire()
    reports = iter(["3 of 9 documents", ""])

    def describe(unfinished: Path) -> str:
        assert unfinished == tmp_path / "target.building"
        report = next(reports)
        if not report:
            other.release()
        return report

    build_once(target, lambda folder: None, describe, show_progress=True)
    assert capsys.readouterr().err.splitlines() == [
        "Waiting for another process that is preparing the same corpus ...",
        "Still waiting for it: 3 of 9 documents",
        "Still waiting for it",
    ]
