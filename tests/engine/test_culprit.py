"""The first culprit of a step that went wrong, in whole runs: what was put in from outside is what is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.training import loop
from tests.support.launches import metrics, train_command, untimed, write_run_file
from tests.support.scripts import FinishedScript, run_script

NUM_STEPS = 8
FAULT_AT = 4
BATCH = 8
WORLD_SIZE = 4

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 with fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}, "megastable__training__fp16_on_cpu": True},
}


def at_step(step: int, act: Callable[[Any], None], lasting: bool = False) -> None:
    """Call ``act`` with the live engine before the passes of a step, and of those after where it lasts."""
    engine_class = vars(loop)["TrainingEngine"]
    original = engine_class.train_batch
    count = 0

    def train_batch(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == step or (lasting and count > step):
            act(self)
        return original(self, *arguments)

    engine_class.train_batch = train_batch


def block_of(engine: Any, name: str) -> Any:
    """Return a layer of this rank's stage; None where another stage has it."""
    module = engine.deepspeed.module
    index = module.layer_names.index(name) - module.first_layer
    return module.forward_funcs[index] if 0 <= index < len(module.forward_funcs) else None


def weight_gets_nan(step: int, layer: str) -> None:
    """Set one element of a weight, on every replica of its stage."""

    def act(engine: Any) -> None:
        block = block_of(engine, layer)
        if block is not None:
            block.feed_forward.output.weight.data[0, 0] = math.nan

    at_step(step, act)


def gradient_gets_inf(step: int, layer: str, replica: int, micro_batch: int, times: int) -> None:
    """Let the gradient of a weight be infinite in one micro-batch of one replica, as often as asked."""

    def act(engine: Any) -> None:
        block = block_of(engine, layer)
        if block is None or engine.replica != replica:
            return
        count = 0
        per_step = engine.deepspeed.gradient_accumulation_steps()

        def hook(gradient: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if (count - 1) % per_step == micro_batch and count <= times * per_step:
                return torch.full_like(gradient, math.inf)
            return gradient

        block.attention.output.weight.register_hook(hook)

    at_step(step, act)


def activation_overflows(step: int, layer: str) -> None:
    """Let the output of a layer inside of a block be beyond any format in one step, and in its replay."""

    def act(engine: Any) -> None:
        block = block_of(engine, layer)
        if block is not None:
            block.feed_forward.input.register_forward_hook(lambda module, inputs, output: output * 1e38 * 1e38)

    at_step(step, act)


def feed(position: int, label: int | None) -> None:
    """Replace the labels of the sample at a position of the order: by an id, or at random."""
    original = vars(loop)["training_micro_batches"]

    def changed(dataset: Any, order: Any, batch: Any, first: int, replica: int, *rest: Any) -> Iterator[Any]:
        dealt = (position - first) // batch.micro_batch_size
        of_replica, number = dealt % rest[0], dealt // rest[0]
        for index, (ids, (labels, denominator)) in enumerate(original(dataset, order, batch, first, replica, *rest)):
            if first <= position < first + batch.global_batch_size and (replica, index) == (of_replica, number):
                row = labels[(position - first) % batch.micro_batch_size]
                random = torch.randint(0, 256, row.shape, generator=torch.Generator().manual_seed(1))
                row.copy_(random if label is None else torch.full_like(row, label))
            yield ids, (labels, denominator)

    setattr(loop, "training_micro_batches", changed)  # noqa: B010  # loop does not export it


def run(tmp_path: Path, first: Callable[..., None] | None, changes: dict[str, Any], world_size: int = WORLD_SIZE,
        **arguments: Any) -> FinishedScript:  # fmt: skip
    file = write_run_file(
        tmp_path,
        **{
            "megastable__training": {"total_steps": NUM_STEPS, "seed": 7},
            "megastable__batch_rampup": {"final": BATCH},
            "megastable__model__dropout": 0.1,
            **changes,
        },
    )
    finished = run_script(train_command([], file, tmp_path / "run"), world_size, first=first, **arguments)
    assert "Traceback" not in finished.output, finished.output
    return finished


def culprits(tmp_path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "culprit"]


PIPELINE: dict[str, Any] = {"megastable__pipeline": {"num_stages": 2}}
TENSOR: dict[str, Any] = {
    "megastable__pipeline": {"num_stages": 2},
    "megastable__tensor_parallel": {"size": 2, "sequence_parallel": True},
}
IN_CHUNKS = {"megastable__training__loss_chunk_tokens": 8}
RECOMPUTED = {"megastable__pipeline": {"num_stages": 2, "activation_checkpointing": ["block"]}} | IN_CHUNKS
HALVES = {"megastable__pipeline": {"num_stages": 2, "activation_checkpointing": ["attention", "feed_forward"]}}
LAYOUTS = {
    "2 stages x 2 replicas": PIPELINE,
    "2 stages x tensor 2": TENSOR,
    "blocks recomputed, loss in chunks": RECOMPUTED,
    "halves recomputed": HALVES,
}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("2 stages x 2 replicas", "fp32"), pytest.param("2 stages x tensor 2", "fp16", marks=pytest.mark.slow)],
)
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, layout: str, precision: str) -> None:
    finished = run(tmp_path, weight_gets_nan, PRECISIONS[precision] | LAYOUTS[layout], step=FAULT_AT, layer="block_3")
    (culprit,) = culprits(tmp_path)
    assert culprit["step"] == FAULT_AT and culprit["data"]["stage"] == 1
    assert "the weight block_3.feed_forward.output.weight is itself not finite: 1 of " in culprit["text"]
    assert culprit["text"] in finished.output


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:]])
def test_the_first_module_whose_output_is_not_finite_is_named(tmp_path: Path, layout: str) -> None:
    run(tmp_path, activation_overflows, LAYOUTS[layout], step=FAULT_AT, layer="block_1")
    (culprit,) = culprits(tmp_path)
    data = culprit["data"]
    assert (data["origin"], data["layer"], data["module"], data["tensor"]) == (
        "forward", "block_1", "feed_forward.input", "output",
    )  # fmt: skip
    assert data["stage"] == 0 and data["micro_batch"] == 0 and len(data["samples"]) == 1


def test_a_gradient_is_named_with_its_replica_and_micro_batch(tmp_path: Path) -> None:
    run(tmp_path, gradient_gets_inf, PIPELINE, step=FAULT_AT, layer="block_2", replica=1, micro_batch=2, times=2)
    (culprit,) = culprits(tmp_path)
    data = culprit["data"]
    assert (data["origin"], data["layer"], data["module"]) == ("backward", "block_2", "attention.output.weight")
    assert (data["replica"], data["micro_batch"]) == (1, 2)
    # It was not there any more in the step after, and training went on.
    assert [row["step"] for row in metrics(tmp_path / "run") if row["skipped"]] == [FAULT_AT]


def test_what_does_not_come_back_is_said_to_be_so(tmp_path: Path) -> None:
    run(tmp_path, gradient_gets_inf, PIPELINE, step=FAULT_AT, layer="block_2", replica=1, micro_batch=2, times=1)
    (culprit,) = culprits(tmp_path)
    assert culprit["data"] == {"origin": "transient", "weights": ["block_2.attention.output.weight"]}
    assert "every value was finite" in culprit["text"]


def test_an_id_that_the_vocabulary_lacks_is_named_with_its_sample(tmp_path: Path) -> None:
    position = (FAULT_AT - 1) * BATCH + 5
    run(tmp_path, feed, PIPELINE, position=position, label=301)
    (culprit,) = culprits(tmp_path)
    data = culprit["data"]
    # The sixth sample of eight: the third micro-batch of the second replica.
    assert (data["origin"], data["layer"], data["replica"], data["micro_batch"]) == ("data", "labels", 1, 2)
    assert len(data["samples"]) == 1


def gradient_is_huge(step: int, layer: str) -> None:
    """Let the gradient of a weight be finite in every micro-batch, and their sum beyond fp32."""

    def act(engine: Any) -> None:
        block = block_of(engine, layer)
        if block is not None:
            block.attention.output.weight.register_hook(lambda gradient: torch.full_like(gradient, 2e38))

    at_step(step, act)


def test_a_sum_that_overflows_is_not_taken_for_a_fault_that_has_gone(tmp_path: Path) -> None:
    run(tmp_path, gradient_is_huge, PIPELINE, step=FAULT_AT, layer="block_2")
    (culprit,) = culprits(tmp_path)
    data = culprit["data"]
    assert (data["origin"], data["layer"], data["module"]) == ("backward", "block_2", "attention.output.weight")
    assert data["tensor"] == "gradient summed over the micro-batches" and data["micro_batch"] is None
    assert "every gradient of a micro-batch is finite" in culprit["text"]


SPIKING: dict[str, Any] = {
    "megastable__training": {"total_steps": 38, "seed": 7},
    "megastable__stability": {"guard": "skip", "window_steps": 16, "spike_deviations": 5},
}


@pytest.mark.parametrize(
    "layout", ["2 stages x 2 replicas", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYOUTS)[1:])]
)
def test_the_sample_of_a_spike_has_the_largest_loss_of_its_own(tmp_path: Path, layout: str) -> None:
    changes = SPIKING | {"train_micro_batch_size_per_gpu": 2}
    finished = run(tmp_path, feed, changes | LAYOUTS[layout], position=36 * BATCH + 3, label=None)
    assert set(finished.exit_codes) == {0}, finished.output
    (culprit,) = culprits(tmp_path)
    ranked = culprit["data"]["samples"]
    assert culprit["step"] == 37 and len(ranked) == BATCH
    assert ranked[0]["loss"] > 1.3 * ranked[1]["loss"]
    losses = [entry["loss"] for entry in ranked]
    assert losses == sorted(losses, reverse=True)
    assert f"rank: sample {ranked[0]['sample']:,} with {losses[0]:.4f}" in culprit["text"]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("2 stages x 2 replicas", "fp32"),
        pytest.param("2 stages x 2 replicas", "bf16", marks=pytest.mark.slow),
        pytest.param("2 stages x tensor 2", "fp16", marks=pytest.mark.slow),
        pytest.param("blocks recomputed, loss in chunks", "bf16 with fp32 sums", marks=pytest.mark.slow),
        pytest.param("halves recomputed", "fp32", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_if_nobody_had_searched(tmp_path: Path, layout: str, precision: str) -> None:
    rows = {}
    for name, first in (("searched", feed_and_search), ("not", feed_and_do_not_search)):
        changes = PRECISIONS[precision] | LAYOUTS[layout]
        finished = run(tmp_path / name, first, changes, position=(FAULT_AT - 1) * BATCH + 5)
        assert set(finished.exit_codes) == {0}, finished.output
        assert len(culprits(tmp_path / name)) == (name == "searched")
        rows[name] = untimed(metrics(tmp_path / name / "run"))
    assert rows["searched"][FAULT_AT - 1]["skipped"] and not rows["searched"][FAULT_AT]["skipped"]
    assert rows["searched"] == rows["not"]


def feed_and_search(position: int) -> None:
    """Give a step a loss that is not finite."""
    feed(position, label=301)


def feed_and_do_not_search(position: int) -> None:
    """Give a step a loss that is not finite, whose culprit nobody looks for."""
    feed(position, label=301)
    vars(loop)["CulpritSearch"].events = lambda *_: []


def feed_a_spike_and_a_break(position: int) -> None:
    """Give a step random labels, and the two after it a loss that is not finite."""
    feed(position, label=None)
    feed(position + BATCH, label=301)
    feed(position + 2 * BATCH, label=301)


@pytest.mark.slow
def test_a_break_right_after_a_spike_is_searched_too_and_each_once_in_a_row(tmp_path: Path) -> None:
    changes = SPIKING | {"megastable__stability": {"window_steps": 16, "spike_deviations": 5}}
    run(tmp_path, feed_a_spike_and_a_break, changes | PIPELINE, position=35 * BATCH + 3)
    assert [(event["step"], event["data"]["origin"]) for event in culprits(tmp_path)] == [(36, "samples"), (37, "data")]
