"""Faults of the run file: what no trainer can mend, and has to say before the first step."""

from __future__ import annotations

import signal

from gauntlet.base import BATCH, TOTAL_STEPS
from gauntlet.scenario import Scenario

HOT_LEARNING_RATE = 0.03
JUMP = 16
JUMP_AT = 110
"""Late, since every step after it is as long as 16."""


def review(key: str) -> str:
    """Return what a line of the review that is printed at the start looks like for a key."""
    return rf"review: warning {key.replace('.', chr(92) + '.')}: "


def _scenario(name: str, fault: str, key: str, changes: dict[str, object]) -> Scenario:
    return Scenario(name, fault, 0, review(key), review(key), "by the user", faulty_changes=changes, exit_codes=(0, 3))


SCENARIOS = (
    _scenario(
        "hot_init", "std of fresh weights 5 times too large at a hot learning rate", "megastable.init.std",
        {"megastable.init": {"scheme": "fixed", "std": 0.5}, "optimizer.params.lr": 0.01},
    ),
    _scenario(
        "hot_lr", "learning rate ten times too high", "optimizer.params.lr",
        {"optimizer.params.lr": HOT_LEARNING_RATE},
    ),
    _scenario(
        "no_warmup", "no warmup", "megastable.lr_schedule.warmup", {"megastable.lr_schedule.warmup": 0},
    ),
    _scenario(
        "batch_jump", "the global batch jumps by 16 times", "megastable.batch_rampup.steps",
        {
            "megastable.batch_rampup": {"steps": [[0, BATCH], [JUMP_AT * BATCH, JUMP * BATCH]]},
        },
    ),
    Scenario(
        "changed_schedule", "a resume with a changed schedule", TOTAL_STEPS // 2,
        r"^changed: .*megastable\.lr_schedule", r"megastable\.lr_schedule\.type was 'cosine', is 'constant'",
        "by the user", signal=signal.SIGTERM, exit_codes=(75,), compares=False, resumes_on_changes=True,
        faulty_changes={"megastable.lr_schedule": {"type": "constant", "warmup": 80}},
    ),
)  # fmt: skip
