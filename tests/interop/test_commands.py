"""The commands that move a model and let it speak: their words, exit codes and what reaches the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cli.test_fuzz_commands import answer


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["export", "missing", "out"], "missing is no folder"),
        (["export", ".", "out"], "is no run folder"),
        (["export", ".", "out", "--max-shard-size", "much"], "--max-shard-size much: must be a whole number of a unit"),
        (["import", "missing", "run.json"], "missing is no folder; a model of the hub"),
        (["import", ".", "run.json"], "config.json does not exist"),
        (["generate", "missing", "once"], "missing is no folder"),
        (["export", "\x1b[31m", "out"], r"\x1b[31m is no folder"),
        (["generate", ".", "x", "--temperature", "nan"], "--temperature"),
        (["generate", ".", "x", "--top-p", "0"], "--top-p"),
    ],
)
def test_what_is_refused_is_one_message_and_exit_code_2(words: list[str], expected: str) -> None:
    code, _, errors = answer(words, "utf-8")
    assert code == 2
    assert expected in errors
    assert "Traceback" not in errors
    assert list(Path().iterdir()) == []


def test_a_run_folder_without_a_checkpoint_is_said_to_be_one() -> None:
    Path("run/checkpoints").mkdir(parents=True)
    code, _, errors = answer(["generate", "run", "x"], "utf-8")
    assert code == 2
    assert "has no complete checkpoint" in errors


def test_an_import_does_not_write_into_a_run() -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 1}\n')
    code, _, errors = answer(["import", ".", "run.json", "--run-dir", "run"], "utf-8")
    assert code == 2
    assert "already holds a run" in errors


@pytest.mark.parametrize("name", ["export", "import", "generate"])
def test_the_help_teaches(name: str) -> None:
    code, out, _ = answer([name, "--help"], "utf-8")
    assert code == 0
    assert "Exit code" in out


def test_generated_text_is_shown_and_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    import megastable.interop.generation as generation
    import megastable.interop.saved_model as saved_model
    import megastable.interop.tokenizer as tokenizer

    pieces = ["ä\n", "\x1b[2J", "", "\u202e", "\tb"]
    monkeypatch.setattr(saved_model, "open_saved_model", lambda path, warn: SimpleNamespace())
    for name in ("find_tokenizer", "open_tokenizer", "check_tokenizer_fits"):
        monkeypatch.setattr(tokenizer, name, lambda *arguments: None)
    seen: list[Any] = []

    def generate(*arguments: Any) -> Any:
        seen.extend(arguments)
        return iter(pieces)

    monkeypatch.setattr(generation, "generate", generate)
    code, out, _ = answer(["generate", "run", "p\x07: ", "--max-tokens", "5", "--top-k", "2", "--seed", "9"], "utf-8")
    assert code == 0
    assert out == "p\\x07: ä\n\\x1b[2J\\u202e\tb\n"
    assert seen[2:] == ["p\x07: ", 5, generation.Sampling(0.8, 2, 0.95), 9]


def test_the_commands_load_torch_only_when_they_run() -> None:
    import subprocess

    script = "import sys; import megastable.cli.main; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
