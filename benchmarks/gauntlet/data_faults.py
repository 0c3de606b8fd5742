"""Faults of the data: what a rank reads at some positions is not what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gauntlet.base import BATCH, FAULT_AT, RUN
from gauntlet.scenario import Scenario
from torch import Tensor

from megastable.data.sample_order import SampleOrder

if TYPE_CHECKING:
    from gauntlet.live import Live

FIRST = (FAULT_AT - 1) * BATCH
"""Position of the first sample of the faulty step."""
NUM_BYTES = 256
REPEATED_BYTE = 101
REPEATED_STEPS = 20

Read = Callable[[int], Iterator[Any]]


def _with_tokens(read: Read, position: int, make: Callable[[Tensor, int], Tensor]) -> Iterator[Any]:
    """Yield the micro-batches of a step with other tokens, (micro-batch, seq + 1), alike on first and last stage."""
    for number, (ids, (labels, denominator)) in enumerate(read(position)):
        tokens = make(torch.cat([ids, labels[:, -1:]], dim=1), position + number)
        yield tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), denominator)


def garbage(live: Live) -> None:
    """Replace the tokens of one global batch by random ones."""

    def draw(tokens: Tensor, seed: int) -> Tensor:
        return torch.randint(0, NUM_BYTES, tokens.shape, generator=torch.Generator().manual_seed(seed))

    live.replace_data(FIRST, FIRST + BATCH, lambda read, position: _with_tokens(read, position, draw))


def one_token(live: Live) -> None:
    """Replace all tokens of one global batch by the same one."""

    def repeat(tokens: Tensor, seed: int) -> Tensor:
        return torch.full_like(tokens, REPEATED_BYTE)

    live.replace_data(FIRST, FIRST + BATCH, lambda read, position: _with_tokens(read, position, repeat))


def same_batch(live: Live) -> None:
    """Read the batch of one step again and again, for 20 steps."""
    live.replace_data(FIRST, FIRST + REPEATED_STEPS * BATCH, lambda read, position: read(FIRST))


TRAINING_SAMPLES = 10_738
"""Of the base run's text."""
FAULTY = SampleOrder(TRAINING_SAMPLES, RUN["megastable"]["training"]["seed"])(np.arange(FIRST, FIRST + BATCH))
"""The samples of the faulty step, (batch,)."""
ONE_OF_THEM = rf"^culprit: .*rank: sample ({'|'.join(f'{sample:,}' for sample in FAULTY.tolist())}) with"

SCENARIOS = (
    Scenario(
        "garbage_batch", "one batch of random tokens", FAULT_AT, r"^spike: the loss", ONE_OF_THEM, "in the run",
        inject=garbage,
    ),
    Scenario(
        "repeated_token", "one batch of a single repeated token", FAULT_AT, r"^spike: the loss", ONE_OF_THEM,
        "in the run", inject=one_token,
    ),
    Scenario(
        "same_data_twice", "the same batch read 20 times", FAULT_AT, r"^(fall|repeat): the loss",
        r"^(fall|repeat): .* read again",
        "in the run", inject=same_batch,
    ),
)  # fmt: skip
