"""Whatever a command line says, it is answered or refused with a message, soon: nothing else happens."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.cli.main import main
from tests.unit.config.config_examples import RUN_FILES
from tests.unit.config.run_file_mutations import ODD_TEXTS, overrides

MOST_SECONDS = 2.0
"""Of this process's own processor time, so that other work on the machine fails no test."""
FILES = [str(RUN_FILES / name) for name in ("quickstart.json", "bloom_176b.json", "gpt2_125m_fp16.json")]
# Typer hands no text with a zero byte to a program, nor do shells.
odd_words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10) | st.sampled_from(
    [text for text in ODD_TEXTS if "\0" not in text and "\ud800" not in text]
)
numbers = st.sampled_from(["0", "1", "2", "16", "384", "-1", "1e9", "999999999999999999999", "nan", "inf", "0.5", ""])
options = {
    "check": ["--world-size", "--set", "--json"],
    "plan": [
        "--devices",
        "--device",
        "--peak-tflops",
        "--memory-gib",
        "--efficiency",
        "--calibration",
        "--json",
        "--set",
    ],
    "watch": ["--refresh", "--once"],
    "plot": ["--output"],
    "schema": ["--help"],
}
FLAGS = {"--json", "--once", "--help"}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Draw the words behind ``megastable``: mostly a command, a file and some options with likely and odd values."""
    command = draw(st.sampled_from(list(options)))
    words = [command]
    if draw(st.integers(0, 9)) > 0:
        words.append(draw(st.sampled_from(FILES) | odd_words))
    for option in draw(st.lists(st.sampled_from(options[command]), max_size=3)):
        words.append(option)
        if option == "--set":
            words.append(draw(overrides.map(lambda drawn: drawn[0] if drawn else "optimizer.params.lr=0.1")))
        elif option not in FLAGS:
            words.append(draw(numbers | st.sampled_from(["A100", "h200", *FILES]) | odd_words))
    if draw(st.integers(0, 9)) == 0:
        words.append(draw(odd_words))
    # Watching goes on until it is interrupted.
    return [*words, "--once"] if command == "watch" else [word for word in words if "\0" not in word]


def exit_code_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> object:
    """Run the command in this process and return its exit code; what it prints has to be more than nothing."""
    begin = time.process_time()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["megastable", *words])
        main()
        sys.exit(0)
    printed = "".join(capsys.readouterr())
    assert printed.strip(), words
    assert "Traceback" not in printed
    assert time.process_time() - begin < MOST_SECONDS, words
    return ended.value.code or 0


def test_a_command_line_is_answered_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes: Counter[object] = Counter()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(words=command_lines())
    def check(words: list[str]) -> None:
        outcomes[exit_code_of(words, capsys)] += 1

    check()
    # A fuzz of which every line is refused for the same reason would test nothing.
    assert {0, 2} <= outcomes.keys() <= {0, 1, 2}, outcomes
