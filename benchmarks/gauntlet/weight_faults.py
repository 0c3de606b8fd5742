"""Faults of what a rank holds: weights, gradients, moments, and copies that should be equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gauntlet.base import BF16, FAULT_AT, FP16, TOTAL_STEPS, TWO_REPLICAS
from gauntlet.scenario import Scenario
from torch import Tensor

if TYPE_CHECKING:
    from gauntlet.live import Live

QUERY_KEY_VALUE = "block_1.attention.query_key_value.weight"
NUM_HEADS = 2
OVERFLOW_FACTOR = 300.0
HIGHEST_EXPONENT_BIT = 30
GROWTH = 1.05
GROWTH_STEPS = 30
DRIFT_STD = 0.06
DRIFT_STEPS = 30
COLLAPSE_STEPS = 22
LAST_REPLICA_OF_STAGE_1 = 3
LAST_REPLICA_OF_STAGE_0 = 1


def attention_overflow(live: Live) -> None:
    """Make the queries and keys of one block so large that their products pass 65,504."""

    def scale() -> None:
        _scale_queries_and_keys(live.masters(QUERY_KEY_VALUE), OVERFLOW_FACTOR)
        live.follow_masters()

    live.before(FAULT_AT, FAULT_AT, scale)


def nan_weight(live: Live) -> None:
    """Let one weight of a block of stage 1 be NaN."""

    def set_nan() -> None:
        _set_first(live.masters("block_2.feed_forward.input.weight"), torch.nan)
        live.follow_masters()

    live.before(FAULT_AT, FAULT_AT, set_nan)


def inf_gradient(live: Live) -> None:
    """Let one gradient of the second replica of stage 1 be infinite in one step."""
    if live.rank != LAST_REPLICA_OF_STAGE_1:
        return

    def with_infinity(gradient: Tensor) -> Tensor:
        if not live.lasts(FAULT_AT, FAULT_AT):
            return gradient
        changed = gradient.clone()
        changed.view(-1)[0] = torch.inf
        return changed

    for parameter in live.parameters("block_3.feed_forward.input.weight").values():
        parameter.register_hook(with_infinity)


def scale_collapse(live: Live) -> None:
    """Let the gradient inside of one block overflow whatever the loss scale, for 22 steps."""

    def overflowing(gradient: Tensor) -> Tensor:
        return gradient * torch.inf if live.lasts(FAULT_AT, FAULT_AT + COLLAPSE_STEPS - 1) else gradient

    for parameter in live.parameters("block_2.attention.output.weight").values():
        parameter.register_hook(overflowing)


def drift(live: Live) -> None:
    """Add a little noise to the weights of one block before each of 30 steps."""
    generator = torch.Generator().manual_seed(1)

    def add_noise() -> None:
        for master in live.masters("block_2."):
            master += DRIFT_STD * torch.randn(master.shape, generator=generator)
        live.follow_masters()

    live.before(FAULT_AT, FAULT_AT + DRIFT_STEPS - 1, add_noise)


def logit_growth(live: Live) -> None:
    """Let the queries and keys of one block grow by a twentieth before each of 30 steps."""

    def grow() -> None:
        _scale_queries_and_keys(live.masters(QUERY_KEY_VALUE), GROWTH)
        live.follow_masters()

    first = FAULT_AT - GROWTH_STEPS
    live.before(first, first + GROWTH_STEPS - 1, grow)


def flipped_bit(live: Live) -> None:
    """Flip the highest bit of the exponent of a number of Adam's first moment: it is 2^128 times as large then."""

    def flip() -> None:
        for moment in live.moments("block_1.feed_forward.input.weight", "exp_avg"):
            moment.view(torch.int32)[7] ^= 1 << HIGHEST_EXPONENT_BIT

    live.before(FAULT_AT, FAULT_AT, flip)


def changed_replica(live: Live) -> None:
    """Let a memory cell of one replica's weights hold another value, whatever is written to it."""
    if live.rank == LAST_REPLICA_OF_STAGE_0:
        weights = live.weights("block_0.feed_forward.input.weight")
        live.after(FAULT_AT - 4, TOTAL_STEPS, lambda: _set_first(weights, 0.125))


def tied_drift(live: Live) -> None:
    """Change one weight of the head's copy of the embedding, on the last stage."""
    if live.rank == 1:
        live.before(FAULT_AT - 4, FAULT_AT - 4, lambda: _add_to_first(live.masters("embedding.")))


def _scale_queries_and_keys(weights: list[Tensor], factor: float) -> None:
    """Scale two thirds of the fused projection's rows; the rest of each head are the values'."""
    for weight in weights:
        weight.view(NUM_HEADS, 3, -1)[:, :2] *= factor


def _set_first(weights: list[Tensor], value: float) -> None:
    for weight in weights:
        weight.view(-1)[0] = value


def _add_to_first(weights: list[Tensor]) -> None:
    for weight in weights:
        weight.view(-1)[0] += 1e-3


MATH: dict[str, object] = {"megastable.model.attention": "math"}

SCENARIOS = (
    Scenario(
        "attention_overflow", "attention logits pass 65,504 in fp16", FAULT_AT, r"^(overflow|culprit|stop)",
        r"^culprit: .* of block_1\.attention\b", "in the run", inject=attention_overflow,
        changes={**FP16, **MATH},
    ),
    Scenario(
        "nan_weight", "NaN in one weight of stage 1", FAULT_AT, r"^(skip|culprit)",
        r"^culprit: the weight block_2\.feed_forward\.input\.weight .*stage 1", "in the run",
        inject=nan_weight,
    ),
    Scenario(
        "inf_gradient", "an infinite gradient on one replica", FAULT_AT, r"^(skip|culprit)",
        r"^culprit: .* of block_3\.feed_forward\b.*replica 1", "in the run",
        inject=inf_gradient, world_size=4, changes=TWO_REPLICAS,
    ),
    Scenario(
        "scale_collapse", "the loss scale collapses in fp16", FAULT_AT, r"^(overflow|culprit)",
        r"^culprit: .* of block_2\.attention\b",
        "in the run", inject=scale_collapse, changes=FP16,
    ),
    Scenario(
        "slow_divergence", "noise on one block, a little in each of 30 steps", FAULT_AT, r"^(divergence|spike)",
        r"^moved: .*weights of block_2 have moved most", "in the run", inject=drift,
    ),
    Scenario(
        "logit_growth", "attention logits of one block grow for 30 steps", FAULT_AT - GROWTH_STEPS,
        r"^warning: .*attention logit", r"^warning: .*block_1\b", "in the run", inject=logit_growth, changes=BF16,
    ),
    Scenario(
        "flipped_bit", "a flipped bit in a moment of Adam", FAULT_AT, r"^(warning: the update|spike|skip|culprit)",
        r"update of block_1 .*gone bad", "in the run", inject=flipped_bit,
    ),
    Scenario(
        "changed_replica", "one replica's weights changed", FAULT_AT - 4, r"^stop: weights that should be equal",
        r"replicas of block_0.feed_forward.input.weight differ", "by a resume", inject=changed_replica, world_size=4,
        changes=TWO_REPLICAS, exit_codes=(3,), compares=False,
    ),
    Scenario(
        "tied_drift", "tied copies drift apart", FAULT_AT - 4, r"^stop: weights that should be equal",
        r"tied copies of embedding.weight differ", "by a resume", inject=tied_drift, exit_codes=(3,),
        compares=False,
    ),
)  # fmt: skip
