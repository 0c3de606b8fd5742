"""What benchmarks of the engine have in common: the options of a small run, its engine, and steps on random tokens."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.config import RunConfig, run_from_dict
from megastable.core.batch_rampup import Batch
from megastable.core.scripts import Parser
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan

LEARNING_RATE = 1e-4
HEAD_DIM = 64


def model_parser(description: str | None, hidden: int, seq_length: int, num_ranks: int = 1) -> Parser:
    """Make a parser with the options from which ``small_run`` builds its model.

    Args:
        hidden: default of the hidden size.
        seq_length: default of the tokens a sample.
        num_ranks: tensor ranks over which the heads are split.
    """
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"hidden size, a multiple of {num_ranks * HEAD_DIM}")
    parser.add_argument("--seq-length", type=int, default=seq_length, help="tokens a sample")
    return parser


def small_run(arguments: argparse.Namespace, batch: int, **sections: Any) -> RunConfig:
    """Build a run in fp32 with micro-batches of 2, of the model that ``arguments`` describe.

    Args:
        arguments: layers, hidden and seq_length.
        batch: samples a step.
        sections: further sections of "megastable", such as its layout.
    """
    return run_from_dict(
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "megastable": {
                "model": {
                    "num_layers": arguments.layers, "hidden_size": arguments.hidden, "seq_length": arguments.seq_length,
                    "num_attention_heads": arguments.hidden // HEAD_DIM, "vocab_size": 2048,
                },
                "batch_rampup": {"final": batch},
                "data": {"source": {"type": "stdlib"}},
                "training": {"total_steps": 1000},
                **sections,
            },
        }
    )  # fmt: skip


def build_engine(plan: RunPlan) -> TrainingEngine:
    """Build the engine of a planned run; collective."""
    # The folder is for DeepSpeed's writers, which no benchmark turns on.
    return TrainingEngine(plan.run, plan.layout, plan.ramp, Path(tempfile.gettempdir()))


def random_micro_batches(plan: RunPlan, batch: Batch | None = None) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Yield the micro-batches of one step on random tokens, for ``batch`` or the first of the plan."""
    batch = batch or plan.ramp.at(0)
    model = plan.run.megastable.model
    for _ in range(batch.num_microbatches):
        ids = torch.randint(0, model.vocab_size, (batch.micro_batch_size, model.seq_length))
        # The ids stand in for their own labels, each of which counts: what is learned does not matter here.
        yield ids, (ids, torch.tensor(float(ids.numel())))


def timed_step(engine: TrainingEngine, plan: RunPlan, watch: bool = False) -> float:
    """Take a step of the plan's first batch on random tokens, and return its seconds on this rank."""
    engine.rampup_hook.before_step(0)
    started = time.perf_counter()
    engine.train_batch(random_micro_batches(plan), LEARNING_RATE, watch=watch)
    return time.perf_counter() - started
