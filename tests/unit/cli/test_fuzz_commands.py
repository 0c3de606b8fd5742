"""Whatever a command line says, the command answers soon, with exit code 0, 1 or 2 and never a traceback."""

import io
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megastable.cli import main as command
from tests.unit.config.config_examples import SHIPPED
from tests.unit.config.run_file_mutations import mutated_runs, overrides

TRAIN = SHIPPED[0].parents[1] / "launch" / "train.py"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_SECONDS = 2.0
REFUSED = 2
ODD_WORDS = (
    "",
    "-",
    "--",
    "--json",
    "--help",
    "--once",
    "a" * 5000,
    "\x1b[31m",
    "[red]",
    "\u202e",
    "~nobody",
    "nan",
    "inf",
    "1e999",
)
words = st.sampled_from(ODD_WORDS) | st.text(max_size=8).filter(lambda word: "\0" not in word)
numbers = st.sampled_from(["0", "1", "2", "-1", "8", "999999", "10000000000", "0.5", "1e308", "nan", "inf", "9" * 400])
# Not `cpu` alone, which measures this machine for ten seconds, nor --plot, which needs matplotlib.
devices = st.sampled_from(["A100", "h200", "[red]", "", "\x1b[2J"])


def options(*names: str) -> st.SearchStrategy[list[str]]:
    """Draw some of the options, each with a number that may or may not be legal."""
    return st.lists(st.tuples(st.sampled_from(names), numbers).map(list), max_size=2).map(flat)


def flat(lists: list[list[str]]) -> list[str]:
    """Join lists of words."""
    return [word for each in lists for word in each]


sets = overrides.map(lambda changes: flat([["--set", change] for change in changes if "\0" not in change]))
flags = st.lists(st.sampled_from(["--json"]), max_size=1)
files = st.sampled_from(["run.json", "run.json", "run.json", ".", "missing.json", *map(str, SHIPPED)]) | words
checks = st.tuples(st.just(["check"]), files.map(lambda name: [name]), options("--world-size"), sets, flags)
plans = st.tuples(
    st.just(["plan"]),
    files.map(lambda name: [name]),
    options("--devices", "--peak-tflops", "--memory-gib", "--efficiency"),
    st.just([]) | devices.map(lambda name: ["--device", name]),
    st.just([]) | files.map(lambda name: ["--calibration", name]),
    sets,
    flags,
)
watches = st.tuples(st.just(["watch"]), st.sampled_from([["run"], ["missing"], ["run.json"]]), st.just(["--once"]))
plots = st.tuples(st.just(["plot"]), files.map(lambda name: [name]))
reports = st.tuples(
    st.just(["report"]),
    st.sampled_from([["run"], ["missing"], ["run.json"]]),
    st.sampled_from([[], ["--compare", "run"], ["--compare", "missing"], ["-o", "."], ["-o", "run/config.json"]]),
)
checkpoints = st.tuples(
    st.just(["checkpoints"]),
    st.sampled_from(["run", "run/checkpoints", "run/checkpoints/step_00000001", ".", "missing", "run.json"]).map(
        lambda name: [name]
    )
    | words.map(lambda word: [word]),
    st.lists(st.sampled_from(["--json", "--verify"]), max_size=2),
)
lines = (
    st.one_of(
        checks, checks, plans, plans, watches, plots, reports, checkpoints, st.tuples(st.lists(words, max_size=3))
    )
    .map(list)
    .map(flat)
)
rows = st.dictionaries(
    st.sampled_from(["kind", "text", "step", "layers", "loss"]), st.text(max_size=8) | st.integers(0, 9)
)


launches = st.tuples(
    st.lists(files.map(lambda name: ["--deepspeed_config", name]), min_size=1, max_size=2).map(flat) | st.just([]),
    sets,
    st.lists(
        st.sampled_from(
            [["--resume"], ["--load", "run"], ["--run-dir", "new/one"], ["--run-dir", "run"], ["--run-dir", "run.json"]]
        )
        | words.map(lambda word: ["--run-dir", word])
        | words.map(lambda word: ["--load", word])
        | numbers.map(lambda number: ["--local_rank", number])
        | words.map(lambda word: [word]),
        max_size=3,
    ).map(flat),
)
launch_lines = launches.map(list).map(flat)


def answer(arguments: list[str], encoding: str, main: Callable[[], Any] = command.main) -> tuple[Any, str, str]:
    """Run a script's main function in this process; return its exit code, its output and its messages."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    out, errors = streams
    with (
        patch.object(sys, "argv", ["megastable", *arguments]),
        patch.object(sys, "stdout", out),
        patch.object(sys, "stderr", errors),
    ):
        code = None
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(encoding))
    return code, texts[0], texts[1]


def test_a_command_line_is_answered_or_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    # Neither this machine's GPUs nor its text are what is tried here.
    monkeypatch.setattr(command, "installed_gpus", lambda: ())
    monkeypatch.setattr(command, "look_at_text", lambda source: None)
    (tmp_path / "run/checkpoints/step_00000001").mkdir(parents=True)
    codes: Counter[Any] = Counter()

    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(line=lines, raw=mutated_runs(), row=rows, encoding=st.sampled_from(["utf-8", "ascii"]))
    # Lines that find a fault are one in a hundred.
    @example(line=["checkpoints", "run", "--verify"], raw={}, row={}, encoding="ascii")
    def check(line: list[str], raw: dict[str, Any], row: dict[str, Any], encoding: str) -> None:
        for name in ("run.json", "run/config.json"):
            Path(name).write_text(json.dumps(raw), encoding="utf-8")
        for name in ("metrics", "events"):
            Path(f"run/{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        Path("run/checkpoints/step_00000001/manifest.json").write_text(json.dumps(row), encoding="utf-8")
        begin = time.process_time()
        code, out, errors = answer(line, encoding)
        assert time.process_time() - begin < MOST_SECONDS
        codes[code] += 1
        assert code in (0, 1, REFUSED)
        assert code != 1 or line[0] in ("check", "checkpoints")
        assert "Traceback" not in errors
        if code == REFUSED:
            assert (errors + out).strip()  # the help, on standard output, where nothing was asked
        # The command's own frames and tables have line ends, and no other control characters.
        if line[:1] == ["watch"]:
            assert all(character.isprintable() or character == "\n" for character in out)

    check()
    assert codes[0] and codes[1] and codes[REFUSED]


def test_the_command_line_of_a_launch_is_taken_or_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """All of a launch but its training: what is taken comes to that, in one process."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in LAUNCHED]:
        monkeypatch.delenv(name)
    main = runpy.run_path(str(TRAIN))["main"]
    taken: list[Path] = []
    training = SimpleNamespace(train=lambda plan, launch, folder, checkpoint: taken.append(folder.path))
    monkeypatch.setitem(sys.modules, "megastable.training.build", training)
    (tmp_path / "run").mkdir()
    codes: Counter[Any] = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(line=launch_lines, raw=mutated_runs(), encoding=st.sampled_from(["utf-8", "ascii"]))
    def check(line: list[str], raw: dict[str, Any], encoding: str) -> None:
        Path("run.json").write_text(json.dumps(raw), encoding="utf-8")
        before = len(taken)
        begin = time.process_time()
        code, out, errors = answer(line, encoding, main)
        assert time.process_time() - begin < MOST_SECONDS
        codes[code] += 1
        assert code in (0, REFUSED)
        assert "Traceback" not in errors
        if code == REFUSED:
            assert errors.startswith("[megastable] error")
            assert len(taken) == before
        assert all(character.isprintable() or character == "\n" for character in out + errors)

    check()
    assert taken and codes[0] and codes[REFUSED]
