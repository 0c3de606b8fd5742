"""Moments at which a rank is killed: at the start, in a step, and between the parts of a save."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from faults.samples import begun_steps

from megastable.checkpoints.folder import DELETING_SUFFIX, PARTIAL_SUFFIX, folder_name, kind_of, step_folders
from megastable.checkpoints.manifest import MANIFEST_NAME

SHARE_OF_STARTS: Final = 0.1
SHARE_OF_SAVES: Final = 0.5
"""More than the third that is to die inside a save, since a save may be over before its killer has come."""
LONGEST_START_SECONDS: Final = 4.0
LONGEST_STEP_SECONDS: Final = 0.2
LONGEST_SAVE_SECONDS: Final = 0.02

PARTS_OF_A_SAVE: Final[Mapping[str, Callable[[Path], bool]]] = {
    "its folder is made": lambda final: _partial(final).exists(),
    "a rank's file is begun": lambda final: any(_partial(final).glob("rank_*")),
    "its manifest is begun": lambda final: (_partial(final) / MANIFEST_NAME).exists(),
    "it is published": lambda final: final.exists(),
    "an older one is deleted": lambda final: any(final.parent.glob(f"*{DELETING_SUFFIX}")),
}
"""What the disk shows of a save, from its beginning to its end."""


@dataclass(frozen=True)
class Moment:
    """A moment in the life of a run: some time after something has come true."""

    name: str
    has_come: Callable[[], bool]
    delay_seconds: float


def choose_moment(
    rng: random.Random, consumed_samples: dict[int, int], first_step: int, save_steps: list[int],
    checkpoints: Path, start_folder: Path,
) -> Moment:  # fmt: skip
    """Choose at random when a start of the run is to die.

    Args:
        consumed_samples: of every step of the run, before it.
        first_step: of this start.
        save_steps: at which this start saves.
        checkpoints: the folder of the run's checkpoints.
        start_folder: where the ranks of this start record what they read.
    """
    kind = rng.random()
    if kind < SHARE_OF_STARTS:
        return Moment("at the start", lambda: True, rng.uniform(0, LONGEST_START_SECONDS))
    if kind < SHARE_OF_STARTS + SHARE_OF_SAVES and save_steps:
        step = rng.choice(save_steps)
        part = rng.choice(list(PARTS_OF_A_SAVE))
        has_come = partial(PARTS_OF_A_SAVE[part], checkpoints / folder_name(step))
        delay = rng.choice([0.0, rng.uniform(0, LONGEST_SAVE_SECONDS)])
        return Moment(f"in the save of step {step}, once {part}", has_come, delay)
    step = rng.choice([step for step in consumed_samples if step >= first_step])
    before = consumed_samples[step]
    has_begun = partial(_has_begun, start_folder, before)
    return Moment(f"in step {step}", has_begun, rng.uniform(0, LONGEST_STEP_SECONDS))


def left_by_a_save(checkpoints: Path, keep_last: int) -> list[str]:
    """List what a save that did not come to its end has left; nothing where the kill came outside of a save."""
    unfinished = [path for path in checkpoints.glob("step_*") if kind_of(path) in ("partial", "superseded", "deleting")]
    # A save ends when it has deleted the older ones that are not to be kept.
    too_many = step_folders(checkpoints)[keep_last:]
    return sorted(path.name for path in (*unfinished, *too_many))


def _partial(final: Path) -> Path:
    return final.with_name(final.name + PARTIAL_SUFFIX)


def _has_begun(start_folder: Path, consumed_samples: int) -> bool:
    return consumed_samples in begun_steps(start_folder)
