"""A user's mistake is one message and exit code 2, before torch loads, and nothing is written over."""

import io
import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megastable.config import RunConfig
from megastable.core.errors import UserError, shown
from megastable.core.launch import Launch
from megastable.core.records import TrainingState
from megastable.planning.run_plan import RunPlan
from megastable.training import entry
from megastable.training import start as start_module
from megastable.training.entry import run_command
from megastable.training.run_folder import RunFolder
from megastable.training.start import WRITER_PACKAGES, RunRequest, Start, find_start
from tests.support.checkpoints import write_checkpoint
from tests.support.odd_names import ODD_NAMES
from tests.support.tiny_run import run_dict, tiny_run


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a launcher's variables away, and give an ImportError instead of training where nothing refuses the run."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "megastable.training.build", None)
    monkeypatch.setattr(entry, "RANK_0_SPEAKS_FIRST_SECONDS", 0.0)


@pytest.fixture
def request_of_tiny_run(tmp_path: Path) -> RunRequest:
    """Ask for the tiny run, into a folder that does not exist yet."""
    run_file = tmp_path / "tiny.json"
    run_file.write_text(json.dumps(run_dict()))
    return RunRequest(run_file, run_dir=tmp_path / "run")


def refusal(request: RunRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a refused run."""
    assert run_command(request) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


def saved_at(step: int, request: RunRequest, run: RunConfig | None = None) -> Path:
    """Write a checkpoint of five samples a step into the folder of the run."""
    assert request.run_dir is not None
    samples = 5 * step
    state = TrainingState(step, samples, samples, 16 * samples, 0)
    return write_checkpoint(request.run_dir / "checkpoints" / f"step_{step:08d}", run or tiny_run(), state)


def changed(request: RunRequest, **changes: object) -> RunRequest:
    """Return the request with changes."""
    return RunRequest(**{**request.__dict__, **changes})


def test_mistakes_of_the_request(request_of_tiny_run: RunRequest, capsys: pytest.CaptureFixture[str]) -> None:
    no_file = changed(request_of_tiny_run, run_file=Path("no_such_file.json"))
    assert "no_such_file.json" in refusal(no_file, capsys)
    bad_value = changed(request_of_tiny_run, overrides=["megastable.training.total_steps=many"])
    assert "megastable.training.total_steps" in refusal(bad_value, capsys)
    bad_stages = changed(request_of_tiny_run, overrides=["megastable.pipeline.num_stages=2"])
    assert "world size 1" in refusal(bad_stages, capsys)
    bad_ramp = changed(request_of_tiny_run, overrides=["train_micro_batch_size_per_gpu=3"])
    assert "global batch 4 " in refusal(bad_ramp, capsys)
    assert "no complete checkpoint" in refusal(changed(request_of_tiny_run, resume=True), capsys)
    assert "no_such_folder" in refusal(changed(request_of_tiny_run, load=Path("no_such_folder")), capsys)
    assert request_of_tiny_run.run_dir is not None
    assert not request_of_tiny_run.run_dir.exists()


@pytest.mark.parametrize("load", [False, True])
def test_a_used_folder_is_not_written_over(
    request_of_tiny_run: RunRequest, load: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request_of_tiny_run.run_dir
    assert folder is not None
    checkpoint = saved_at(4, request_of_tiny_run)
    (folder / "metrics.jsonl").write_text("{}\n")
    request = changed(request_of_tiny_run, load=checkpoint) if load else request_of_tiny_run
    assert "already holds a run" in refusal(request, capsys)
    assert (folder / "metrics.jsonl").read_text() == "{}\n"


def test_another_run_does_not_resume_a_checkpoint(
    request_of_tiny_run: RunRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_at(4, request_of_tiny_run, tiny_run(megastable__training__seed=8))
    text = refusal(changed(request_of_tiny_run, resume=True), capsys)
    assert "megastable.training.seed: 8 in the checkpoint, 7 now; --allow-change megastable.training.seed" in text


# Where a run starts from


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunPlan, Path | None]]:
    """Collect the plans that reach the training, each with its checkpoint."""
    plans: list[tuple[RunPlan, Path | None]] = []

    def train(start: Start, launch: object, folder: object, lock: object) -> None:
        plans.append((start.plan, start.checkpoint))

    monkeypatch.setitem(sys.modules, "megastable.training.build", SimpleNamespace(train=train))
    return plans


def test_one_line_starts_and_goes_on(
    request_of_tiny_run: RunRequest, planned: list[tuple[RunPlan, Path | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    request = changed(request_of_tiny_run, resume="auto")
    folder = request.run_dir
    assert folder is not None
    assert run_command(request) == 0 and capsys.readouterr().err == ""
    (folder / "checkpoints" / "step_00000004.partial").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run_command(request) == 0
    assert "saved no checkpoint: it starts again from step 0" in capsys.readouterr().err
    checkpoint = saved_at(4, request)
    assert run_command(request) == 0 and capsys.readouterr().err == ""
    assert [found for _, found in planned] == [None, None, checkpoint]
    assert [plan.phases[0].first_step for plan, _ in planned] == [0, 0, 4]
    saved_at(8, request)
    assert run_command(request) == 0 and "nothing to do: " in capsys.readouterr().out
    assert len(planned) == 3


def test_auto_prefers_its_own_checkpoints_to_those_that_are_loaded(
    request_of_tiny_run: RunRequest, planned: list[tuple[RunPlan, Path | None]], tmp_path: Path
) -> None:
    loaded = write_checkpoint(tmp_path / "other", tiny_run(), TrainingState(step=2, consumed_samples=8))
    request = changed(request_of_tiny_run, resume="auto", load=loaded)
    assert run_command(request) == 0
    own = saved_at(4, request)
    assert run_command(request) == 0
    assert [found for _, found in planned] == [loaded, own]


def test_options_that_exclude_each_other(
    request_of_tiny_run: RunRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = changed(request_of_tiny_run, resume=True, load=tmp_path)
    assert "--resume=auto with --load" in refusal(both, capsys)
    alone = changed(request_of_tiny_run, allowed_changes=["megastable.training.seed"])
    assert "--allow-change is about a checkpoint" in refusal(alone, capsys)
    unknown = changed(request_of_tiny_run, resume="auto", allowed_changes=["megastable.model.num_layers"])
    assert "--allow-change megastable.model.num_layers: the weights" in refusal(unknown, capsys)


def test_another_batch_is_planned_from_the_restored_state(
    request_of_tiny_run: RunRequest, planned: list[tuple[RunPlan, Path | None]]
) -> None:
    """Step 4 is at sample 20; the run of 8 steps goes on with 4 steps of 6 samples."""
    saved_at(4, request_of_tiny_run)
    overrides = ['megastable.batch_rampup={"final": 6}', "train_micro_batch_size_per_gpu=3"]
    assert run_command(changed(request_of_tiny_run, resume=True, overrides=overrides)) == 0
    ((plan, _),) = planned
    assert (plan.length.total_steps, plan.length.total_samples) == (8, 20 + 4 * 6)


def with_steps(request: RunRequest, steps: list[list[int]]) -> RunRequest:
    """Return the request to resume with another ramp, in micro-batches of two."""
    ramp = json.dumps({"steps": steps})
    overrides = [f"megastable.batch_rampup={ramp}", "train_micro_batch_size_per_gpu=2"]
    return changed(request, resume=True, overrides=overrides)


def test_batches_that_do_not_divide_are_refused_for_what_is_left_alone(
    request_of_tiny_run: RunRequest, planned: list[tuple[RunPlan, Path | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is at sample 20."""
    saved_at(4, request_of_tiny_run)
    assert run_command(with_steps(request_of_tiny_run, [[0, 7], [20, 8]])) == 0
    assert len(planned) == 1
    # A run from sample 0 would come by this one: it has steps at 0, 8, 16 and 24.
    met = with_steps(request_of_tiny_run, [[0, 8], [20, 9], [24, 16]])
    assert "global batch 9 (from sample 20)" in refusal(met, capsys)
    assert run_command(changed(met, resume=False, run_dir=Path("elsewhere"))) == 0


def test_other_ranks_name_themselves(
    request_of_tiny_run: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "5", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    text = refusal(changed(request_of_tiny_run, overrides=["megastable.pipeline.num_stages=2"]), capsys)
    assert "error on rank 3: " in text and "The world size 5" in text


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_a_rank_that_is_no_number_is_a_users_mistake(
    name: str, request_of_tiny_run: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "x")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    refusal(request_of_tiny_run, capsys)


@pytest.mark.parametrize("run_dir", ["file", "file/run"])
def test_a_run_folder_that_cannot_be_written_is_refused(
    run_dir: str, request_of_tiny_run: RunRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    for resume in (False, True):
        text = refusal(changed(request_of_tiny_run, run_dir=tmp_path / run_dir, resume=resume), capsys)
        assert f"--run-dir: '{tmp_path / run_dir}'" in text
    assert (tmp_path / "file").read_text() == "kept"


def set_launch(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    """Set what ``deepspeed --master_port`` sets for one of two processes."""
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["loopback", "all interfaces"])
def test_a_port_that_is_taken_is_refused(
    address: str, request_of_tiny_run: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((address, 0)) as taken:
        port = taken.getsockname()[1]
        set_launch(monkeypatch, 0, port)
        text = refusal(request_of_tiny_run, capsys)
        assert f"MASTER_PORT: rank 0 cannot listen at port {port} (Address already in use)" in text
    # Now it is free, and the run is refused for its stages.
    assert "world size 2" in refusal(
        changed(request_of_tiny_run, overrides=["megastable.pipeline.num_stages=3"]), capsys
    )


def test_other_ranks_do_not_take_the_port(
    request_of_tiny_run: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        set_launch(monkeypatch, 1, rank_0.getsockname()[1])
        assert "world size 2" in refusal(
            changed(request_of_tiny_run, overrides=["megastable.pipeline.num_stages=3"]), capsys
        )


class ReaderLeft(io.TextIOWrapper):
    """Stands for a pipe whose reader has left."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("kind", ["ascii", "closed", "none", "pipe"])
def test_an_error_that_cannot_be_printed_is_still_exit_code_2(
    kind: str, request_of_tiny_run: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    stream = {
        "ascii": io.TextIOWrapper(written, encoding="ascii"),
        "closed": io.TextIOWrapper(io.BytesIO()),
        "none": None,
        "pipe": ReaderLeft(io.BytesIO()),
    }[kind]
    if kind == "closed" and stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert run_command(changed(request_of_tiny_run, run_file=Path("größe.json"))) == 2
    if kind == "ascii":
        assert rb"gr\xf6\xdfe.json" in written.getvalue()


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> RunRequest:
    """Return what the launch asks for on a command line."""
    requests: list[RunRequest] = []

    def run_and_end(request: RunRequest) -> int:
        requests.append(request)
        return 0

    monkeypatch.setattr(entry, "run_command", run_and_end)
    script = runpy.run_path(str(Path(__file__).parents[3] / "launch" / "train.py"))
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert script["main"]() == 0
    return requests[0]


def test_the_command_line_says_where_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ("--deepspeed_config", "x.json")
    assert parsed(monkeypatch, *file) == RunRequest(Path("x.json"), overrides=[], allowed_changes=[])
    assert parsed(monkeypatch, *file, "--resume").resume is True
    assert parsed(monkeypatch, "--resume", *file).resume is True
    assert parsed(monkeypatch, *file, "--resume=auto").resume == "auto"
    assert parsed(monkeypatch, *file, "--resume", "--local_rank=1").resume is True
    allowed = parsed(monkeypatch, *file, "--load", "a", "--allow-change", "b", "--allow-change=c")
    assert (allowed.load, allowed.allowed_changes) == (Path("a"), ["b", "c"])


@pytest.mark.parametrize("what", ODD_NAMES)
def test_paths_of_the_command_line_may_have_any_name(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    name = ODD_NAMES[what]
    request = parsed(monkeypatch, f"--deepspeed_config={name}", f"--run-dir={name}", f"--load={name}")
    assert (request.run_file, request.run_dir, request.load) == (Path(name),) * 3


@pytest.mark.parametrize("what", ODD_NAMES)
def test_a_refusal_names_files_by_any_name_and_is_one_message(
    what: str, request_of_tiny_run: RunRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run file that is not there and one that has a fault, of a folder that holds a run, and of --load."""
    folder = tmp_path / ODD_NAMES[what]
    odd = folder / f"{ODD_NAMES[what]}.json"
    assert "cannot be read" in refusal(changed(request_of_tiny_run, run_file=odd), capsys)
    folder.mkdir()
    odd.write_text(json.dumps(run_dict(megastable__training__seed=-1)))
    assert "megastable.training.seed" in refusal(changed(request_of_tiny_run, run_file=odd), capsys)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    name = shown(ODD_NAMES[what], keep="\n")
    text = refusal(changed(request_of_tiny_run, run_dir=folder), capsys)
    assert "already holds a run" in text and name in text
    text = refusal(changed(request_of_tiny_run, load=folder), capsys)
    assert "is no whole checkpoint" in text and name in text


def test_a_name_that_begins_with_a_dash_says_how_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--deepspeed_config", "x.json", "--run-dir", "-one")
    assert (
        "expected one argument; one that begins with a dash is written with an equals sign" in capsys.readouterr().err
    )


def test_tensorboard_in_a_folder_that_it_cannot_name_is_refused(
    request_of_tiny_run: RunRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / ODD_NAMES["bytes of no encoding"]
    request = changed(request_of_tiny_run, run_dir=odd, overrides=["tensorboard.enabled=true"])
    assert "tensorboard.output_path" in refusal(request, capsys)
    assert not odd.exists()


def test_a_command_line_is_refused_once_and_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    script = runpy.run_path(str(Path(__file__).parents[3] / "launch" / "train.py"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--deepspeed_config", "x.json", "--run-dir", "my", "runs"])
    with pytest.raises(SystemExit) as caught:
        script["main"]()
    assert caught.value.code == 2 and waited == [entry.RANK_0_SPEAKS_FIRST_SECONDS]
    text = capsys.readouterr().err
    assert "unrecognized arguments: runs; a path with a blank has to be quoted" in text and "usage:" in text


SKIPPED = {"skipped_steps": {"consecutive_skips": 2}}


def saved_in_skips(step: int, request: RunRequest) -> Path:
    assert request.run_dir is not None
    folder = request.run_dir / "checkpoints" / f"step_{step:08d}"
    return write_checkpoint(folder, tiny_run(), TrainingState(step=step, consumed_samples=4 * step), monitors=SKIPPED)


def test_a_run_whose_last_steps_were_skipped_is_over_and_goes_on_before_them_once_it_is_longer(
    request_of_tiny_run: RunRequest, planned: list[tuple[RunPlan, Path | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    request = changed(request_of_tiny_run, resume=True)
    before = saved_at(4, request)
    last = saved_in_skips(8, request)
    assert run_command(request) == 0 and f"nothing to do: {last}" in capsys.readouterr().out
    longer = changed(request, overrides=("megastable.training.total_steps=20",))
    assert run_command(longer) == 0
    assert [found for _, found in planned] == [before]


def test_of_damaged_checkpoints_and_one_in_skips_that_one_is_gone_on_from(request_of_tiny_run: RunRequest) -> None:
    """Damage that only checksums show is found after the choice was made."""
    request = changed(request_of_tiny_run, resume=True)
    damaged = [saved_at(step, request) for step in (2, 3)]
    in_skips = saved_in_skips(4, request)
    assert request.run_dir is not None
    warnings: list[str] = []
    start = find_start(request, Launch.detect({}), RunFolder(request.run_dir), warnings.append)
    met = []
    while start.checkpoint != in_skips:
        met.append(start.checkpoint)
        start = start.older(["a file has another checksum"])
    assert met == damaged[::-1]
    assert f"{in_skips} is taken all the same" in warnings[-1]
    with pytest.raises(UserError, match="only damaged ones"):
        start.older(["this one has, too"])


@pytest.mark.parametrize("writer", WRITER_PACKAGES)
def test_a_writer_whose_package_is_not_there_is_refused_with_what_to_install(
    request_of_tiny_run: RunRequest, writer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_module, "find_spec", lambda package: None)
    text = refusal(changed(request_of_tiny_run, overrides=(f"{writer}.enabled=true",)), capsys)
    assert f"{writer}.enabled needs the package {WRITER_PACKAGES[writer]}: pip install" in text


def test_every_writer_of_a_run_file_names_its_package() -> None:
    """DeepSpeed's CSV files need none."""
    writers = {
        name
        for name, field in RunConfig.model_fields.items()
        if "enabled" in getattr(field.annotation, "model_fields", {})
    }
    assert writers - {"csv_monitor", "fp16", "bf16"} == WRITER_PACKAGES.keys()
