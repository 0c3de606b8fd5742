"""``megastable data build``: the same pair for any number of processes and whatever ended it, and nothing is lost."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pytest
from datasets import Dataset
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.config import run_from_dict
from megastable.core.errors import UserError
from megastable.data import build as build_module
from megastable.data import encoding, prepare_corpus, token_writer
from megastable.data.indexed_format import open_indexed
from megastable.data.inputs import OPTIONS
from megastable.data.json_lines import JsonLines
from megastable.data.prompts import Document
from megastable.data.text_tokenizers import BytesTokenizer, train_bpe
from tests.data.data_examples import prepare_single, text_data, tiny_model, write_documents
from tests.support.launches import write_run_file
from tests.support.ranks import REPOSITORY


class Killed(BaseException):
    """Ends a build as a kill would: nothing catches it."""


TEXTS = [f"document {number}: {'äb' * (number % 9)}" for number in range(60)]


def rows_file(path: Path, texts: list[str] = TEXTS, **broken: str) -> Path:
    """Write JSON lines; ``line_N`` replaces line N by something else."""
    lines = [json.dumps({"text": text}) for text in texts]
    for name, line in broken.items():
        lines[int(name.removeprefix("line_")) - 1] = line
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    return path


def command(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a command; a user's mistake is its message."""
    try:
        result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    except UserError as error:
        return 2, "", str(error)
    return result.exit_code, result.stdout, result.stderr


def build(*arguments: Any) -> dict[str, Any]:
    code, output, errors = command("build", *arguments, "--json")
    assert code == 0, errors
    document: dict[str, Any] = json.loads(output)
    return document


def texts_of(prefix: Path) -> list[str]:
    opened = open_indexed(prefix)
    documents = [opened.document(index).tolist() for index in range(opened.num_documents)]
    assert all(document[-1] == BytesTokenizer.eod_id for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


def files_of(folder: Path, name: str) -> dict[str, bytes]:
    """The content of all files of a pair, by what comes after its name."""
    return {
        str(path.relative_to(folder)).removeprefix(name): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_writer, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(token_writer, "_SYNC_SECONDS", 0)


@pytest.mark.usefixtures("_small_batches")
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz", line_7="{", line_9='{"text": ""}')
    found = []
    for workers in (1, 2, 5):
        folder = tmp_path / str(workers)
        options = ["-t", "bytes", "--workers", workers, "--broken", "skip", "--validation-fraction", 0.2]
        build(rows, "-o", folder / "pair", *options)
        found.append(files_of(folder, "pair"))
    assert found[0] == found[1] == found[2]
    suffixes = {name for name in found[0] if not name.startswith(".tokenizer")}
    pair = {".bin", ".idx", ".crc32"}
    assert suffixes == {*pair, *(f".validation{suffix}" for suffix in pair), ".json", ".broken.jsonl", ".empty.jsonl"}


def test_every_document_is_somewhere_or_counted(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz", line_7="{", line_9='{"text": ""}', line_11='{"body": "a"}', line_60="")
    document = build(rows, "-o", tmp_path / "pair", "-t", "bytes", "--broken", "skip", "--validation-fraction", 0.2)
    assert document["documents"] == 60
    assert document["empty_documents"] == 2
    assert document["broken_documents"] == 2
    assert ["line 7 is not JSON" in document["broken"][0], "line 11 has no key" in document["broken"][1]] == [True] * 2
    listed = [json.loads(line) for line in (tmp_path / "pair.broken.jsonl").read_text().splitlines()]
    assert [line["document"] for line in listed] == [6, 10]
    assert [line["fault"] for line in listed] == document["broken"]
    assert document["broken"][0].startswith(f"{rows}, line 7 ") and document["broken"][1].startswith("--text-key: ")
    empty = [json.loads(line) for line in (tmp_path / "pair.empty.jsonl").read_text().splitlines()]
    assert empty == [{"document": number - 1, "place": f"{rows}, line {number}"} for number in (9, 60)]
    kept = [text for number, text in enumerate(TEXTS, start=1) if number not in (7, 9, 11, 60)]
    written = texts_of(tmp_path / "pair") + texts_of(tmp_path / "pair.validation")
    assert sorted(written) == sorted(kept)
    assert len(texts_of(tmp_path / "pair.validation")) in range(8, 13)
    assert document["tokens"] == sum(len(text.encode()) + 1 for text in kept)


def test_a_broken_document_stops_a_build_unless_it_is_to_be_skipped(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz", line_7="{")
    code, _, message = command("build", rows, "-o", tmp_path / "pair", "-t", "bytes")
    assert (code, message) == (2, f"{rows}, line 7 is not JSON (column 2: Expecting property name enclosed in double "
                               "quotes)")  # fmt: skip
    assert not (tmp_path / "pair.idx").exists()


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupted_build_goes_on_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz", line_3="{", line_9="", line_40="[]")
    options = ["-t", "bytes", "--workers", workers, "--broken", "skip"]
    build(rows, "-o", tmp_path / "whole/pair", *options)
    read: list[int] = []
    own = JsonLines.__getitem__

    def interrupting(self: JsonLines, index: int) -> Document:
        read.append(index)
        if index == 45 and not interrupted:
            interrupted.append(index)
            raise Killed
        return own(self, index)

    interrupted: list[int] = []
    monkeypatch.setattr(JsonLines, "__getitem__", interrupting)
    with pytest.raises(Killed):
        CliRunner().invoke(
            app, ["data", "build", str(rows), "-o", str(tmp_path / "cut/pair"), *map(str, options)],
            catch_exceptions=False, standalone_mode=False,
        )  # fmt: skip
    assert not list((tmp_path / "cut").glob("pair.idx"))
    read.clear()
    build(rows, "-o", tmp_path / "cut/pair", *options)
    assert 10 < read[0] <= 45, "what is on disk is not read again"
    assert files_of(tmp_path / "cut", "pair") == files_of(tmp_path / "whole", "pair")


@pytest.mark.slow
def test_a_killed_build_goes_on_to_the_same_files(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz", [f"{number} {'many words ' * 9}" for number in range(4000)])
    script = (
        "from megastable.data import token_writer as writer\n"
        "writer._BATCH_CHARACTERS = 2000; writer._SYNC_SECONDS = 0\n"
        "from megastable.cli.main import main; main()"
    )
    words = [sys.executable, "-c", script, "data", "build", str(rows), "-t", "bytes", "--workers", "2", "-o"]
    progress = tmp_path / "killed/pair.building/progress.json"
    process = subprocess.Popen([*words, str(tmp_path / "killed/pair")], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (progress.exists() and '"finished_documents": 0' not in progress.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    for name in ("killed", "whole"):
        finished = subprocess.run(
            [*words, str(tmp_path / name / "pair")], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
        )
        assert finished.returncode == 0, finished.stderr
        assert ("Going on after" in finished.stderr) == (name == "killed")
    assert files_of(tmp_path / "killed", "pair") == files_of(tmp_path / "whole", "pair")


def test_a_build_that_was_ended_while_its_files_were_moved_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    options = ["-t", "bytes", "--validation-fraction", "0.2"]
    build(rows, "-o", tmp_path / "whole/pair", *options)
    own = os.rename
    for allowed in range(1, 8):
        moved: list[Any] = []

        def few(source: Any, target: Any, moved: list[Any] = moved, allowed: int = allowed) -> None:
            if len(moved) == allowed:
                raise Killed
            moved.append(target)
            own(source, target)

        prefix = tmp_path / f"cut{allowed}/pair"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "rename", few)
            CliRunner().invoke(
                app, ["data", "build", str(rows), "-o", str(prefix), *options],
                catch_exceptions=False, standalone_mode=False,
            )  # fmt: skip
        build(rows, "-o", prefix, *options)
        assert files_of(prefix.parent, "pair") == files_of(tmp_path / "whole", "pair")


def test_other_documents_or_options_are_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz", line_50="{")
    monkeypatch.setattr(token_writer, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(token_writer, "_SYNC_SECONDS", 0)
    assert command("build", rows, "-o", tmp_path / "pair", "-t", "bytes")[0] == 2
    rows_file(rows, ["new"] * 60)
    code, _, errors = command("build", rows, "-o", tmp_path / "pair", "-t", "bytes")
    assert code == 0 and "Building anew: the documents or options have changed" in errors
    assert texts_of(tmp_path / "pair") == ["new"] * 60


def end_at(monkeypatch: pytest.MonkeyPatch, words: list[Any], document: int) -> None:
    """Run a build that is killed at a document."""
    own = build_module._ReadableDocuments.__getitem__

    def killed(self: Any, index: int) -> Any:
        if index == document:
            raise Killed
        return own(self, index)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(build_module._ReadableDocuments, "__getitem__", killed)
        CliRunner().invoke(
            app, ["data", "build", *map(str, words)], catch_exceptions=False, standalone_mode=False
        )  # fmt: skip


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.arrow", "saved"])
def test_a_build_is_not_gone_on_from_with_another_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = Dataset.from_dict({"text": TEXTS, "b": [text.upper() for text in TEXTS]})
    writers = {".parquet": rows.to_parquet, ".csv": rows.to_csv}
    writers.get(Path(name).suffix, rows.save_to_disk)(tmp_path / name.removesuffix(".arrow"))
    if name == "a.arrow":
        next((tmp_path / "a").glob("*.arrow")).rename(tmp_path / name)
    words = [tmp_path / name, "-o", tmp_path / "pair", "-t", "bytes", "--workers", 1]
    end_at(monkeypatch, [*words, "--text-key", "text"], 40)
    assert token_writer.finished_documents(tmp_path / "pair.building") > 0
    build(*words, "--text-key", "b")
    assert texts_of(tmp_path / "pair") == [text.upper() for text in TEXTS]


@pytest.mark.parametrize("other", ["documents", "tokenizer", "fraction"])
def test_a_finished_build_is_not_published_as_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    second = rows_file(tmp_path / "second.jsonl.gz", ["other"] * 60)
    train_bpe(260, TEXTS).save(tmp_path)
    output = ["-o", tmp_path / "pair"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(build_module, "_publish", mock.Mock(side_effect=Killed))
        CliRunner().invoke(
            app, ["data", "build", str(rows), "-t", "bytes", *map(str, output)],
            catch_exceptions=False, standalone_mode=False,
        )  # fmt: skip
    words = {
        "documents": [second, "-t", "bytes"],
        "tokenizer": [rows, "-t", tmp_path],
        "fraction": [rows, "-t", "bytes", "--validation-fraction", 0.2],
    }
    code, _, message = command("build", *words[other], *output)
    assert code == 2 and "pair.building holds a finished build of other documents or options" in message
    assert not (tmp_path / "pair.idx").exists()
    build(rows, "-t", "bytes", *output)
    assert texts_of(tmp_path / "pair") == TEXTS


OUTPUTS = [".idx", ".bin", ".json", ".tokenizer", ".crc32", ".broken.jsonl", ".empty.jsonl"]
VALIDATION_OUTPUTS = [".validation.idx", ".validation.bin", ".validation.crc32"]


@pytest.mark.parametrize("suffix", OUTPUTS + VALIDATION_OUTPUTS)
def test_nothing_is_overwritten(tmp_path: Path, suffix: str) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    (tmp_path / f"pair{suffix}").write_text("mine")
    before = files_of(tmp_path, "")
    code, _, message = command("build", rows, "-o", tmp_path / "pair", "-t", "bytes", "--validation-fraction", 0.2)
    assert code == 2 and f"pair{suffix} exists, and nothing is overwritten" in message
    assert files_of(tmp_path, "") == before, "nothing is left behind"


@pytest.mark.usefixtures("_small_batches")
def test_a_file_in_the_way_does_not_cost_an_unfinished_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    words = [rows, "-o", tmp_path / "pair", "-t", "bytes", "--workers", 1]
    end_at(monkeypatch, words, 40)
    (tmp_path / "pair.bin").write_text("mine")
    assert command("build", *words)[0] == 2
    assert token_writer.finished_documents(tmp_path / "pair.building") > 0


def test_a_process_that_is_lost_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(tokenizer: Any, texts: Any) -> Any:
        if texts:
            os._exit(9)
        return []

    monkeypatch.setattr(encoding, "_encode", lose)
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    code, _, message = command("build", rows, "-o", tmp_path / "pair", "-t", "bytes", "--workers", 2)
    assert code == 2 and "one of 2 processes that encode was ended" in message


def test_a_run_reads_what_was_built(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl.gz")
    build(rows, "-o", tmp_path / "pair", "-t", "bytes", "--validation-fraction", 0.2)
    source = {
        "type": "indexed", "path": str(tmp_path / "pair"), "validation_path": str(tmp_path / "pair.validation"),
    }  # fmt: skip
    tokenizer = {"type": "transformers", "path": str(tmp_path / "pair.tokenizer")}
    built = prepare_single(text_data(tmp_path, tmp_path / "cache", source=source, tokenizer=tokenizer), tiny_model())
    jsonl = {"type": "jsonl", "path": str(rows)}
    direct = prepare_single(text_data(tmp_path, tmp_path / "cache", source=jsonl), tiny_model())
    assert built.fingerprint == direct.fingerprint
    np.testing.assert_array_equal(built.train.tokens, direct.train.tokens)


def test_the_cache_of_a_run_file_is_made_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = write_run_file(tmp_path)
    code, output, errors = command("build", run_file, "--workers", 2)
    assert code == 0, errors
    assert "training and" in output
    monkeypatch.delattr("megastable.data.corpus.write_token_store")
    settings = run_from_dict(json.loads(run_file.read_text())).megastable
    corpus = prepare_corpus(settings.data, settings.model, show_progress=False)
    assert f"{corpus.num_train_tokens:,} training" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows", "-o", "pair"], "--tokenizer: is required with --output"),
        (["rows", "-o", "pair", "-t", "./nowhere"], "--tokenizer: there is no folder ./nowhere"),
        (["rows", "-o", "pair", "-t", "bytes", "--set", "a=1"], "--set: goes with a run file"),
        (["rows.json", "-t", "bytes"], "go with --output"),
        *((["rows.json", option, "text"], "go with --output") for option in OPTIONS.values()),
        (["./none", "-o", "pair", "-t", "bytes"], "./none does not exist; legal are a file, a folder or a glob"),
        (["none.parquet", "-o", "pair", "-t", "bytes"], "none.parquet does not exist"),
    ],
)
def test_a_command_line_that_cannot_be_obeyed_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = command("build", *arguments)
    assert code == 2
    assert error.startswith(message) or message in error
    assert "megastable.data" not in error


def test_text_files_are_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "texts")
    document = build(tmp_path / "texts", "-o", tmp_path / "out/pair", "-t", "bytes")
    assert document["documents"] == 20


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("verb", ["build", "train"])
def test_files_that_are_left_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verb: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "input"
    folder.mkdir()
    content = {"txt": "text", "jsonl": '{"text": "a"}', "csv": "text\na\n"}
    (folder / f"a.{kind}").write_text(content[kind])
    (folder / f"empty.{kind}").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    words = ["data", "build", str(folder), "-o", str(tmp_path / "pair"), "-t", "bytes"]
    if verb == "train":
        words = ["tokenizer", "train", str(folder), "-o", str(tmp_path / "made"), "--vocab-size", "260"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert f"{folder}: left out 1 empty files, such as {folder}/empty.{kind}" in result.stderr
    assert f"{folder}: left out 1 files " in result.stderr and "image.png" in result.stderr


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_of_a_file_that_was_cut_the_lines_before_are_kept(tmp_path: Path, suffix: str) -> None:
    lines = [f"line {number} {os.urandom(600).hex()}" for number in range(1000)]
    stored = "".join(json.dumps({"text": text}) + "\n" for text in lines).encode()
    folder = tmp_path / "rows"
    folder.mkdir()
    compressed = gzip.compress(stored) if suffix == "gz" else pyarrow.compress(stored, "zstd", asbytes=True)
    (folder / f"a.jsonl.{suffix}").write_bytes(compressed[: len(compressed) // 2])
    (folder / "b.jsonl").write_text('{"text": "last"}\n')
    (folder / f"c.jsonl.{suffix}").write_bytes(b"nothing of the kind")
    code, _, message = command("build", folder, "-o", tmp_path / "pair", "-t", "bytes")
    assert code == 2 and f"a.jsonl.{suffix} cannot be read after line" in message
    document = build(folder, "-o", tmp_path / "pair", "-t", "bytes", "--broken", "skip")
    kept = texts_of(tmp_path / "pair")
    assert kept == [*lines[: len(kept) - 1], "last"] and 200 < len(kept) < 520
    assert document["broken_documents"] == 2
    assert f"a.jsonl.{suffix} cannot be read after line" in document["broken"][0]
    assert f"c.jsonl.{suffix} cannot be read" in document["broken"][1]


def test_what_is_moved_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    own = os.rename

    def checked(source: Path, target: Path) -> None:
        assert Path(source).is_dir() or os.stat(source).st_ino in flushed, source
        own(source, target)

    monkeypatch.setattr(os, "rename", checked)
    rows = rows_file(tmp_path / "rows.jsonl.gz", line_7="{", line_9="")
    words = ["-t", "bytes", "--validation-fraction", 0.2, "--broken", "skip"]
    assert build(rows, "-o", tmp_path / "pair", *words)["broken_documents"] == 1
