"""Every file of a checkpoint is damaged in turn: it is found, named, and left as it is; an older one is taken."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megastable.checkpoints.folder import folder_name, step_folders, step_of
from megastable.checkpoints.verify import verify
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.training.run_folder import RunFolder
from megastable.training.start import RunRequest, Start, find_start
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script

NEWEST, OLDER = 6, 4
FILES = ("manifest.json", "rank_00000.safetensors", "rank_00001.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""They do not change from step to step, and are looked at in tests/unit/checkpoints."""


def flip_a_bit(path: Path, at: float) -> None:
    """Flip a bit at this share of the file."""
    content = bytearray(path.read_bytes())
    bit = int(at * (8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_the_first_bit(path: Path) -> None:
    """Flip a bit of what says how long the header is."""
    flip_a_bit(path, 0.0)


def flip_any_bit(path: Path) -> None:
    """Flip a bit at a place that the name of the file decides."""
    flip_a_bit(path, random.Random(path.name).random())


def flip_the_last_bit(path: Path) -> None:
    """Flip the last bit of the last tensor."""
    flip_a_bit(path, 1.0)


def cut_short(path: Path) -> None:
    """Take the last two bytes away; a manifest ends with a line break, without which it is still whole."""
    os.truncate(path, path.stat().st_size - 2)


def empty(path: Path) -> None:
    """Take all bytes away."""
    os.truncate(path, 0)


def fill_with_zeros(path: Path) -> None:
    """Leave the size and no content, as a file system may after a power cut."""
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_another_step(path: Path) -> None:
    """Put the file of the older checkpoint in its place: whole, of the same size, and of another step."""
    shutil.copyfile(path.parent.with_name(folder_name(OLDER)) / path.name, path)


def replace_by_another_rank(path: Path) -> None:
    """Put the file of another rank in its place."""
    shutil.copyfile(path.parent / FILES[1 if path.name == FILES[2] else 2], path)


def replace_by_a_folder(path: Path) -> None:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    damage.__name__: damage
    for damage in (
        flip_the_first_bit, flip_any_bit, flip_the_last_bit, cut_short, empty, fill_with_zeros,
        replace_by_another_step, replace_by_another_rank, replace_by_a_folder, Path.unlink,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train eight steps on two stages, saved every two, and lose the last checkpoint; returns run file and folder."""
    folder = tmp_path_factory.mktemp("trained")
    run_file = write_run_file(folder, megastable__checkpoint={"save_interval": 2})
    finished = run_script(train_command([], run_file, folder / "run"), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output
    shutil.rmtree(folder / "run" / "checkpoints" / folder_name(8))
    newest = folder / "run" / "checkpoints" / folder_name(NEWEST)
    assert sorted(path.name for path in newest.iterdir()) == [*FILES, *TOKENIZER_FILES]
    return run_file, folder / "run"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Map everything below a folder to its bytes; folders to None."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def starts_after_damages(run_file: str, run_dir: str, num_stages: int, resumes: bool) -> list[dict[str, Any]]:
    """Damage every file of the newest checkpoint in every way, and find on each rank what the run would start from.

    Args:
        resumes: ``--resume`` and not ``--load``.
    """
    results = []
    for file in FILES:
        for damage in DAMAGES:
            damaged_dir = Path(f"{run_dir}_{damage}_{file}")
            overrides = [f"megastable.pipeline.num_stages={num_stages}"]
            request = RunRequest(Path(run_file), overrides, damaged_dir, resume=True)
            if not resumes:
                load = damaged_dir / "checkpoints" / folder_name(NEWEST)
                request = RunRequest(Path(run_file), overrides, damaged_dir.with_name("new"), load=load)
            results.append({"file": file, "damage": damage, **_start_of(request)})
    return results


def _start_of(request: RunRequest) -> dict[str, Any]:
    from megastable.training import build

    warnings: list[str] = []
    whole: Callable[[Start], Start] = vars(build)["_whole_start"]
    assert request.run_dir is not None
    try:
        start = whole(find_start(request, Launch.detect(os.environ), RunFolder(request.run_dir), warnings.append))
    except UserError as error:
        return {"error": str(error), "warnings": warnings}
    assert start.manifest is not None
    return {"checkpoint": str(start.checkpoint), "step": start.manifest.state.step, "warnings": warnings}


def damage_copies(run_dir: Path, copies: Path) -> dict[Path, dict[str, bytes | None]]:
    """Make a copy of the run folder for every damage of every file; returns what is in each."""
    made = {}
    for file in FILES:
        for name, damage in DAMAGES.items():
            copy = Path(f"{copies}_{name}_{file}")
            shutil.copytree(run_dir, copy)
            damage(copy / "checkpoints" / folder_name(NEWEST) / file)
            made[copy] = contents(copy)
    return made


@pytest.mark.parametrize(("world_size", "num_stages"), [(2, 2), (1, 1)])
def test_a_resume_passes_over_a_damaged_checkpoint_and_names_the_file(
    trained: tuple[Path, Path], tmp_path: Path, world_size: int, num_stages: int
) -> None:
    """On its own layout and on another, whose ranks share the files otherwise."""
    run_file, run_dir = trained
    before = damage_copies(run_dir, tmp_path / "run")
    by_rank = run_ranks(
        starts_after_damages, world_size,
        run_file=str(run_file), run_dir=str(tmp_path / "run"), num_stages=num_stages, resumes=True,
    )  # fmt: skip
    assert all(results == by_rank[0] for results in by_rank[1:])
    assert len(by_rank[0]) == len(FILES) * len(DAMAGES)
    for result in by_rank[0]:
        assert result.get("step") == OLDER, result
        (warning,) = (text for text in result["warnings"] if "changed since the checkpoint" not in text)
        assert folder_name(NEWEST) in warning and result["file"] in warning, result
    assert {copy: contents(copy) for copy in before} == before, "something was renamed, deleted or written"


def test_a_load_of_a_damaged_checkpoint_is_an_error_that_names_the_file(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = trained
    before = damage_copies(run_dir, tmp_path / "run")
    by_rank = run_ranks(
        starts_after_damages, 2,
        run_file=str(run_file), run_dir=str(tmp_path / "run"), num_stages=2, resumes=False,
    )  # fmt: skip
    for result in by_rank[0]:
        assert folder_name(NEWEST) in result["error"] and result["file"] in result["error"], result
    assert {copy: contents(copy) for copy in before} == before
    assert not (tmp_path / "new").exists()


def test_a_run_refuses_to_load_the_damaged_one_and_resumes_from_the_older_one_to_the_same_losses(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, run_dir = trained
    damaged = tmp_path / "run"
    shutil.copytree(run_dir, damaged)
    file = damaged / "checkpoints" / folder_name(NEWEST) / FILES[1]
    flip_any_bit(file)
    load = run_script(train_command([], run_file, tmp_path / "new", "--load", str(file.parent)), world_size=2)
    assert load.exit_codes[0] == 2 and "--load: " in load.outputs[0] and file.name in load.outputs[0], load.output
    assert "Traceback" not in load.output and not (tmp_path / "new" / "config.json").exists()

    finished = run_script(train_command([], run_file, damaged, "--resume"), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output
    assert finished.outputs[0].count(f"{file.name} has the checksum") == 1
    assert [step_of(folder) for folder in step_folders(damaged / "checkpoints")] == [8, 6, 4, 2]
    assert all(verify(folder) == [] for folder in step_folders(damaged / "checkpoints"))
    rows = [[(row["step"], row["loss"], row["lr"]) for row in metrics(folder)] for folder in (run_dir, damaged)]
    assert rows[0] == rows[1]
