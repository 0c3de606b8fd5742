"""What benchmarks of the engine have in common: a small run, and random tokens for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megastable.config import RunConfig, run_from_dict
from megastable.core.batch_rampup import Batch
from megastable.planning.run_plan import RunPlan


def small_run(arguments: argparse.Namespace, batch: int, **sections: Any) -> RunConfig:
    """A run in fp32 with micro-batches of 2, of the model that ``arguments`` describe.

    Args:
        arguments: layers, hidden and seq_length.
        batch: samples a step.
        sections: further sections of "megastable", such as its layout.
    """
    return run_from_dict(
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "megastable": {
                "model": {
                    "num_layers": arguments.layers, "hidden_size": arguments.hidden, "seq_length": arguments.seq_length,
                    "num_attention_heads": arguments.hidden // 64, "vocab_size": 2048,
                },
                "batch_rampup": {"final": batch},
                "data": {"source": {"type": "stdlib"}},
                "training": {"total_steps": 1000},
                **sections,
            },
        }
    )  # fmt: skip


def random_micro_batches(plan: RunPlan, batch: Batch | None = None) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """One step's worth of random tokens, for ``batch`` or the first of the plan."""
    batch, size = batch or plan.ramp.at(0), plan.run.megastable.model
    for _ in range(batch.num_microbatches):
        ids = torch.randint(0, size.vocab_size, (batch.micro_batch_size, size.seq_length))
        yield ids, (ids, torch.tensor(float(ids.numel())))
