"""Packing with reset on all kinds of layout: documents stay apart on every stage, a step is that of each alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from megastable.config import RunConfig
from megastable.core.batch_rampup import Batch
from megastable.core.labels import IGNORED_LABEL
from megastable.data import MicroBatch
from megastable.engine.training_engine import TrainingEngine
from megastable.model.ends import VocabularyEmbedding, tied_logits
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess
from megastable.planning.run_plan import RunPlan
from tests.support.launches import metrics, train_command, write_run_file
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script
from tests.support.tiny_run import tiny_run

END = 0
SEQ_LENGTH = 16
SAMPLES = [  # four micro-batches, each with its documents elsewhere
    [3, 4, 5, END, 6, 7, 8, 9, 2, END, 4, 5, 6, 7, 8, 9],
    [END, 4, 5, 6, 7, 8, 9, 2, END, END, 4, 5, 6, 7, 8, 9],
    [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12, 13, 14, 15, 16, END],
    [5, END, 6, 5, END, 6, 5, END, 6, 5, END, 6, 5, END, 6, 5],
]
EDITED = 5
"""Place of a token of the second document of the first sample."""
SECOND = slice(3, 9)
"""The places of that document."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "3 stages": (3, {"megastable__pipeline": {"num_stages": 3}}),
    "3 stages, blocks computed again": (
        3,
        {"megastable__pipeline": {"num_stages": 3, "activation_checkpointing": True}},
    ),
    "2 stages, tensor 2, slices, halves computed again": (
        4,
        {
            "megastable__pipeline": {"num_stages": 2, "activation_checkpointing": ["attention", "feed_forward"]},
            "megastable__tensor_parallel": {"size": 2, "sequence_parallel": True},
        },
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"megastable__model__num_key_value_heads": 2},
    "learned": {"megastable__model__position_embedding": "learned", "megastable__model__attention": "math"},
    "alibi": {"megastable__model__position_embedding": "alibi", "megastable__training__loss_chunk_tokens": 8},
}
STEP = {"megastable__batch_rampup": {"steps": [[0, 4]]}, "gradient_clipping": 0.0}


def run_of(model: str, layout: dict[str, Any]) -> RunConfig:
    return tiny_run(**STEP, **MODELS[model], **layout)


def engine_of(run: RunConfig, end_of_document: int | None) -> TrainingEngine:
    plan = RunPlan.of(run, torch.distributed.get_world_size())
    return TrainingEngine(run, plan.layout, plan.ramp, Path("."), end_of_document=end_of_document)


def micro_batches(samples: list[list[int]], counted: slice) -> Iterator[MicroBatch]:
    """One sample each, of which the tokens at ``counted`` predict the next one."""
    denominator = torch.tensor(1.0)
    for tokens in samples:
        ids = torch.tensor([tokens])
        labels = torch.full_like(ids, IGNORED_LABEL)
        following = torch.roll(ids, -1, dims=1)
        labels[:, counted] = following[:, counted]
        yield ids, (labels, denominator)


def losses_of_documents(layout: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The losses of the documents before, at and after the edited one, before and after the edit, by packing."""
    edited = [[*SAMPLES[0][:EDITED], 1, *SAMPLES[0][EDITED + 1 :]], *SAMPLES[1:]]
    # The last token of a document predicts that the next begins, whatever is in it.
    parts = [slice(0, SECOND.start), SECOND, slice(SECOND.stop, SEQ_LENGTH - 1)]
    found = {}
    for name, end in (("reset", END), ("continuous", None)):
        engine = engine_of(run_of("rotary", layout), end)
        engine.rampup_hook.apply(Batch(4, 1, 4))
        losses = []
        for samples in (SAMPLES[:1], edited[:1]):
            for part in parts:
                data = micro_batches(samples, part) if engine.needs_data else None
                losses.append(engine.evaluate(data, 1))
        found[name] = [losses[:3], losses[3:]]
    return found


def test_a_document_that_is_edited_leaves_its_neighbours_loss_on_three_stages() -> None:
    world, layout = LAYOUTS["3 stages"]
    for found in run_ranks(losses_of_documents, world, layout=layout):
        before, after = found["reset"]
        assert before[0] == after[0]
        assert before[2] == after[2]
        assert before[1] != after[1]
        before, after = found["continuous"]
        assert before[2] != after[2], "nothing would be seen of a leak"


def step_of(model: str, layout: dict[str, Any]) -> list[float]:
    """Loss and gradient norm of a step over all samples, then those of a second one."""
    run = run_of(model, layout)
    engine = engine_of(run, END)
    engine.rampup_hook.apply(Batch(4, 1, 4))
    found = []
    for _ in range(2):
        data = micro_batches(SAMPLES, slice(0, SEQ_LENGTH - 1)) if engine.needs_data else None
        result = engine.train_batch(data, learning_rate=0.01)
        found += [result.loss, result.grad_norm]
    return found


def plain_step(model: str) -> tuple[float, float]:
    """Loss and gradient norm of the first step, every document in a model call of its own."""
    run = run_of(model, {})
    layers = gpt_layers(run, OneProcess())
    built = [layer.build(run) for layer in layers[:-1]]
    embedding = built[0]
    assert isinstance(embedding, VocabularyEmbedding)
    total = torch.zeros(())
    for ids, (labels, denominator) in micro_batches(SAMPLES, slice(0, SEQ_LENGTH - 1)):
        begins = sorted({0, *(place for place, token in enumerate(ids[0].tolist()) if token == END)})
        for start, stop in zip(begins, [*begins[1:], SEQ_LENGTH], strict=True):
            x = ids[:, start:stop]
            for layer in built:
                x = layer(x)
            logits = tied_logits(embedding, x)[0, :, : run.megastable.model.vocab_size]
            total = total + torch.nn.functional.cross_entropy(
                logits, labels[0, start:stop], ignore_index=IGNORED_LABEL, reduction="sum"
            ) / (denominator * len(SAMPLES))
    total.backward()
    gradients = [parameter.grad for layer in built for parameter in layer.parameters() if parameter.grad is not None]
    return float(total.detach()), float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_every_document_alone(layout: str) -> None:
    world, changes = LAYOUTS[layout]
    for model in MODELS:
        expected = plain_step(model)
        by_rank = run_ranks(step_of, world, model=model, layout=changes)
        for found in by_rank:
            assert found[:2] == pytest.approx(list(expected), rel=1e-5), (layout, model)
            assert found == by_rank[0]


def test_a_run_file_that_asks_for_reset_trains_and_evaluates_with_it_on_three_stages(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, megastable__training={"total_steps": 1, "eval_interval": 1, "seed": 7})
    losses = {}
    for packing in ("continuous", "reset"):
        flags = ("--set", "megastable.pipeline.num_stages=3", "--set", f"megastable.data.packing={packing}")
        finished = run_script(train_command([], run_file, tmp_path / packing, *flags), world_size=3)
        assert finished.exit_codes == [0, 0, 0], finished.output
        said = "packing: attention and positions begin anew with every document, at token 256" in finished.outputs[0]
        assert said == (packing == "reset")
        (row,) = metrics(tmp_path / packing)
        losses[packing] = row["loss"], row["eval_loss"]
    # Of the same samples and weights; the document before matters little to a fresh model.
    for one_text, apart in zip(losses["continuous"], losses["reset"], strict=True):
        assert one_text != apart
        assert one_text == pytest.approx(apart, rel=0.02)
