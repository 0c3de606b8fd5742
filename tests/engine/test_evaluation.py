"""An evaluation is the token mean over its samples, on any layout, however they fill up the micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megastable.core.labels import IGNORED_LABEL
from megastable.data import TokenDataset, evaluation_micro_batches, num_evaluation_micro_batches
from tests.support.ranks import run_ranks
from tests.support.reference import train_reference
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

NUM_STEPS, MICRO_BATCH_SIZE, MOST_SAMPLES = 3, 2, 100
RUN = {"train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE, "megastable__batch_rampup": {"final": 8}}
TOKENS = np.random.default_rng(5).integers(
    0, 300, 16 * 12 + 6, dtype=np.uint16
)  # 13 samples, the last with 5 counted labels


def evaluations() -> dict[str, float]:
    """Return the validation loss after some steps, by stages and tensor ranks."""
    losses = {}
    for num_stages, tensor_size in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
        run = tiny_run(
            **RUN,
            megastable__pipeline__num_stages=num_stages,
            megastable__tensor_parallel={"size": tensor_size, "sequence_parallel": (num_stages, tensor_size) == (1, 2)},
        )
        plan, engine = build_engine(run)
        train(plan, engine, NUM_STEPS)
        dataset = TokenDataset(TOKENS, run.megastable.model.seq_length, eod_id=0, vocab_size=300, name="tokens")
        sizes = (MICRO_BATCH_SIZE, MOST_SAMPLES)
        replicas = plan.layout.data_parallel_size
        data = evaluation_micro_batches(dataset, *sizes, engine.replica, replicas)
        losses[f"{num_stages} x {tensor_size}"] = engine.evaluate(
            data, num_evaluation_micro_batches(dataset, *sizes, replicas)
        )
    return losses


def test_an_evaluation_equals_one_process() -> None:
    run = tiny_run(**RUN)
    model = train_reference(run, NUM_STEPS)[1].eval()
    dataset = TokenDataset(TOKENS, run.megastable.model.seq_length, eod_id=0, vocab_size=300, name="tokens")
    samples = [dataset[index] for index in range(13)]
    inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True))
    with torch.no_grad():
        logits = model(inputs)[..., : run.megastable.model.vocab_size]
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL).item()
    for losses in run_ranks(evaluations, world_size=4):
        assert len(losses) == 5
        assert losses == {name: pytest.approx(expected, rel=1e-5) for name in losses}
