"""The ``megastable`` command: its output, and one message with exit code 2 for a user's mistake."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app, main
from megastable.cli.pictures import plot_run, read_metrics
from megastable.config import json_schema
from megastable.core.errors import UserError, shown
from tests.support.odd_names import ODD_NAMES
from tests.support.tiny_run import run_dict
from tests.unit.training.metrics_examples import HARD_STEPS, step_metrics

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with metrics of every kind."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [step_metrics(), *(step_metrics(**{"consumed_samples": 200, **changes}) for changes in HARD_STEPS.values())]
    (folder / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    return folder


def exit_of_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the console script; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["megastable", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_schema_prints_the_json_schema_and_nothing_else() -> None:
    result = CliRunner().invoke(app, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json_schema()


def test_plot_draws_skipped_evaluated_and_infinite_steps(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.png"
    assert exit_of_main(monkeypatch, "plot", str(run_dir), "--output", str(output)) == 0
    assert output.read_bytes().startswith(PNG)
    assert str(output) in capsys.readouterr().out


def test_plot_draws_a_run_that_lost_its_loss_from_the_first_step_on(tmp_path: Path) -> None:
    rows = [step_metrics(loss=float("nan"), eval_loss=float("nan"), consumed_samples=samples) for samples in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    plot_run(tmp_path, tmp_path / "out.svg")
    assert (tmp_path / "out.svg").stat().st_size > 0


def test_rows_are_the_lines(run_dir: Path) -> None:
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")][:2] == [10, 10]
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 1 + len(HARD_STEPS)


@pytest.mark.parametrize("line", [b"7", b"null", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"loss": "x"}', b'{"step": 9'])
def test_plot_leaves_out_lines_that_cannot_be_read(run_dir: Path, tmp_path: Path, line: bytes) -> None:
    readable = read_metrics(run_dir / "metrics.jsonl")
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n" + json.dumps({**readable[-1], "loss": "x", "global_batch_size": []}).encode() + b"\n")
    assert len(read_metrics(run_dir / "metrics.jsonl")) == len(readable) + 1
    plot_run(run_dir, tmp_path / "out.svg")


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_a_folder_without_metrics_is_one_message_and_exit_code_2(
    tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if left == "an empty file":
        (tmp_path / "metrics.jsonl").write_text("")
    output = tmp_path / "out.png"
    assert exit_of_main(monkeypatch, "plot", str(tmp_path), "--output", str(output)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {tmp_path / 'metrics.jsonl'}")
    assert captured.err.count("\n") == 1
    assert not output.exists()


def test_matplotlib_missing_is_one_message_that_says_what_to_install(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert exit_of_main(monkeypatch, "plot", str(run_dir)) == 2
    assert "pip install 'megastable[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("what", ODD_NAMES)
def test_files_and_folders_may_have_any_name(
    what: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "odd" / ODD_NAMES[what]
    odd.mkdir(parents=True)
    run_file = odd / f"{ODD_NAMES[what]}.json"
    run_file.write_text(json.dumps(run_dict()))
    shutil.copytree(run_dir, odd / "run", dirs_exist_ok=True)
    for words in (
        ["check", str(run_file)],
        ["check", "--json", str(run_file)],
        ["plan", str(run_file)],
        ["watch", "--once", str(odd / "run")],
        ["plot", str(odd / "run"), "--output", str(odd / "out.svg")],
    ):
        assert exit_of_main(monkeypatch, *words) == 0, words
    assert (odd / "out.svg").stat().st_size > 0
    run_file.write_text("{")
    assert exit_of_main(monkeypatch, "check", str(run_file)) == 2
    assert shown(ODD_NAMES[what]) in capsys.readouterr().err.replace("\n", "\\n")


@pytest.mark.parametrize("arguments", [["no-such-command"], ["plot"], ["schema", "--no-such-option"]])
def test_a_mistyped_command_line_is_exit_code_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_of_main(monkeypatch, *arguments) == 2


def test_a_killed_run_can_be_drawn(run_dir: Path, tmp_path: Path) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(step_metrics().to_json()[:40])
    plot_run(run_dir, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["out.doc", "no_such_folder/out.png"])
def test_an_output_that_cannot_be_written_is_a_users_mistake(run_dir: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=str(tmp_path / name)):
        plot_run(run_dir, tmp_path / name)
