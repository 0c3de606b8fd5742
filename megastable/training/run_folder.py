"""Keeps the folder of a run: its config, metrics and checkpoints; and finds what a run may start from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megastable.config import PipelineConfig, RunConfig
from megastable.config.run_config import differences, run_as_dict
from megastable.config.stages import StageCut
from megastable.core.checkpoint_folder import Manifest, newest_complete, read_manifest, step_folders
from megastable.core.errors import RunFolderError, UserError
from megastable.core.records import Event, TrainingState
from megastable.core.run_paths import RunPaths
from megastable.planning.run_plan import RunPlan

FIXED_KEYS = (
    "megastable.model",
    "megastable.pipeline.num_stages",
    "megastable.tensor_parallel",
    "megastable.init",
    "megastable.data.source",
    "megastable.data.tokenizer",
    "megastable.data.validation_fraction",
    "megastable.training.seed",
    "fp16.enabled",
    "bf16.enabled",
    "data_types",
)
"""What a checkpoint's weights, optimizer and data position mean depends on these; another value is another run."""
FREE_KEYS = ("megastable.model.compile",)
"""Keys inside a fixed section that only say how the same numbers are computed."""
PARTITION = "megastable.pipeline.partition"


class RunFolder(RunPaths):
    """Writes the files of one run and refuses to overwrite another's; only rank 0 calls what writes."""

    def check_unused(self) -> None:
        """Refuse to write a new run over an old one.

        Raises:
            RunFolderError: the folder holds a run.
        """
        if step_folders(self.checkpoints):
            raise RunFolderError(
                f"{self.path} already holds a run. Continue it with --resume, or write to another folder with "
                "--run-dir PATH"
            )
        # An empty file is of a run that ended before its first step: nothing is lost with it.
        if self.metrics.exists() and self.metrics.stat().st_size > 0:
            raise RunFolderError(
                f"{self.path} already holds a run, which saved no checkpoint. Remove the folder, or write to another "
                "one with --run-dir PATH"
            )

    def write_config(self, run: RunConfig) -> None:
        """Write ``config.json``: the run file with defaults filled in and every ``--set`` applied."""
        self.path.mkdir(parents=True, exist_ok=True)
        # By another name first: whoever watches the folder never reads half a file.
        written = self.config.with_suffix(".tmp")
        written.write_text(json.dumps(run_as_dict(run), indent=2) + "\n", encoding="utf-8")
        os.replace(written, self.config)

    def drop_lines_after(self, step: int) -> None:
        """Move the lines of later steps to ``*.superseded.jsonl``: a resumed run writes them again."""
        for path in (self.metrics, self.events):
            if path.exists():
                _drop_lines_after(path, step)


def _drop_lines_after(path: Path, step: int) -> None:
    kept: list[str] = []
    superseded: list[str] = []
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        lines = kept if _is_step_up_to(line, step) else superseded
        lines.append(f"{line}\n")
    # A kill may cut the last line short, or take its newline alone; the next line would be joined to it.
    lacks_newline = text != "" and not text.endswith("\n")
    if superseded or lacks_newline:
        with open(path.with_suffix(".superseded.jsonl"), "a", encoding="utf-8") as file:
            file.writelines(superseded)
        written = path.with_suffix(".tmp")
        written.write_text("".join(kept), encoding="utf-8")
        os.replace(written, path)


def checkpoint_to_resume(folder: RunFolder, warn: Callable[[str], None]) -> Path:
    """Find the newest complete checkpoint of the run folder.

    Raises:
        UserError: no checkpoint in it is complete.
    """
    found = newest_complete(folder.checkpoints, warn)
    if found is None:
        raise UserError(f"--resume: there is no complete checkpoint in {folder.checkpoints}")
    return found


def checkpoint_to_load(path: Path) -> Path:
    """Check the checkpoint folder that ``--load`` names, and return its absolute path.

    Raises:
        UserError: it is no complete checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"--load: {path} is not a folder; name a checkpoint like runs/x/checkpoints/step_00000010")
    for checkpoints in (RunPaths(path).checkpoints, path):
        if step_folders(checkpoints):
            newest = newest_complete(checkpoints, warn=lambda text: None)
            found = "none in it is complete" if newest is None else f"the newest complete one is {newest}"
            raise UserError(f"--load: {path} holds checkpoints and is none; name one of them: {found}")
    read_manifest(path)  # raises where a file is missing or cut short
    return path.resolve()


def check_continues(manifest: Manifest, run: RunConfig, world_size: int, warn: Callable[[str], None]) -> None:
    """Check that ``run`` on ``world_size`` processes continues the checkpoint, and warn of what else has changed.

    Raises:
        UserError: the layout or a key on which the checkpoint's meaning depends differs; all of them are named.
    """
    faults = []
    if manifest.world_size != world_size:
        faults.append(
            f"  the checkpoint is of {_layout_of(manifest.run, manifest.world_size)}, "
            f"this launch of {_layout_of(run_as_dict(run), world_size)}"
        )
    faults += _other_cut(manifest.run, run)
    for key, old, new in differences(manifest.run, run_as_dict(run)):
        if key not in FREE_KEYS and _is_fixed(key):
            faults.append(f"  {key}: {old!r} in the checkpoint, {new!r} now")
    for key, old, new in _free_changes(manifest, run):
        warn(_change(key, old, new))
    if faults:
        raise UserError("This run cannot continue the checkpoint:\n" + "\n".join(faults))


def events_of_resume(folder: RunFolder, checkpoint: Path, run: RunConfig, state: TrainingState) -> Iterator[Event]:
    """Yield the event that ``run`` goes on from ``checkpoint``, one for every key that has changed since, and one for
    every newer checkpoint that was passed over.
    """

    def event(kind: str, text: str, **data: Any) -> Event:
        return Event(state.step, state.consumed_samples, kind, text, data)

    yield event("resume", f"goes on from {checkpoint} at step {state.step}", checkpoint=str(checkpoint))
    for key, old, new in _free_changes(read_manifest(checkpoint), run):
        yield event("changed", _change(key, old, new), key=key, old=old, new=new)
    if checkpoint.parent == folder.checkpoints:  # one of another folder was named by --load, whatever is newer there
        for newer in step_folders(folder.checkpoints):
            if int(newer.name.removeprefix("step_")) > state.step:
                yield event("passed_over", f"{newer} is newer but not complete", checkpoint=str(newer))


def nothing_left(checkpoint: Path, plan: RunPlan) -> str | None:
    """Say that the run has taken all its steps before the checkpoint was written; None where steps are left."""
    step = read_manifest(checkpoint).state["step"]
    if step < plan.length.total_steps:
        return None
    length = "total_steps" if plan.run.megastable.training.total_steps is not None else "total_samples"
    return (
        f"nothing to do: {checkpoint} is at step {step:,}, and the run has {plan.length.total_steps:,} steps. Nothing "
        f"was changed; to train on, raise megastable.training.{length}"
    )


def _free_changes(manifest: Manifest, run: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value of what may change between a checkpoint and the run that continues it."""
    for key, old, new in differences(manifest.run, run_as_dict(run)):
        if key in FREE_KEYS or not _is_fixed(key):
            yield key, old, new


def _change(key: str, old: Any, new: Any) -> str:
    return f"changed since the checkpoint: {key} was {old!r}, is {new!r}"


def _is_fixed(key: str) -> bool:
    """Tell whether ``key`` is fixed, lies in a fixed section, or is a section around a fixed key.

    The last is what ``differences`` names where one of the two runs lacks the section as a whole.
    """
    for fixed in FIXED_KEYS:
        lies_inside = key == fixed or key.startswith(f"{fixed}.")
        lies_around = fixed.startswith(f"{key}.")
        if lies_inside or lies_around:
            return True
    return False


def _other_cut(old: dict[str, Any], run: RunConfig) -> Iterator[str]:
    """Yield a fault where the stages of the checkpoint hold other layers than those of ``run``.

    Comparing the keys would not do: two of them may give the same cut, and ``balanced`` gives another one where blocks
    are recomputed. Another number of stages is left to the comparison of keys.
    """
    sections = run.megastable
    pipeline = old.get("megastable", {}).get("pipeline", {})
    if sections.pipeline.num_stages == 1 and pipeline.get("num_stages", 1) == 1:
        return
    if "partition" not in pipeline:
        # What the default was then is not known here.
        yield f"  {PARTITION}: not in the checkpoint, which is of an older version"
        return
    try:
        # Through JSON text, in which a list may stand for a tuple: the sections are strict about types.
        before = PipelineConfig.model_validate_json(json.dumps(pipeline))
    except ValidationError:
        yield f"  {PARTITION}: the checkpoint's pipeline section is of another version"
        return
    if before.num_stages != sections.pipeline.num_stages:
        return
    # Both for the model of now; another model is a fault by itself.
    was = StageCut.of(sections.model, before, sections.tensor_parallel)
    now = StageCut.of(sections.model, sections.pipeline, sections.tensor_parallel)
    if was.bounds != now.bounds:
        yield (
            f"  {PARTITION}: the stages hold {' | '.join(was.descriptions)} in the checkpoint, "
            f"{' | '.join(now.descriptions)} now; write {[stage.num_blocks for stage in was.stages]} to keep them"
        )


def _layout_of(run: dict[str, Any], world_size: int) -> str:
    # A checkpoint's run may be of a version that did not have the key.
    sections = run.get("megastable", {})
    stages = sections.get("pipeline", {}).get("num_stages", 1)
    tensor = sections.get("tensor_parallel", {}).get("size", 1)
    replicas = world_size // (stages * tensor)
    return f"{world_size} processes ({stages} stages x {replicas} replicas x {tensor} tensor ranks)"


def _is_step_up_to(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError):  # a line that a kill cut short
        return False
