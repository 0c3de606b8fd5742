"""The memory that `megastable plan` counts beside what a step's tensors really take, on the CPU.

Run it with `torchrun --standalone --nproc_per_node 1 benchmarks/memory.py` (2 for the cases of two processes). Every
storage that a step makes is counted from its making to its end; the second step is measured, when all state is there.
"""

from __future__ import annotations

import argparse
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from small_runs import LEARNING_RATE, build_engine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megastable.config import run_from_dict
from megastable.core.launch import Launch
from megastable.core.scripts import Parser, run_script
from megastable.engine.process_group import connected
from megastable.planning.memory import stage_memory
from megastable.planning.run_plan import RunPlan

BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
WIDE = {"num_layers": 2, "hidden_size": 512, "seq_length": 64, "vocab_size": 8192}
LONG = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "seq_length": 512, "vocab_size": 16384}


def recomputed(kinds: bool | list[str]) -> dict[str, Any]:
    """Make the section of a run that recomputes such halves of its blocks."""
    return {"pipeline": {"activation_checkpointing": kinds}}


CHUNKS = {"training": {"total_steps": 10, "loss_chunk_tokens": 32}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}, {}),
    "fp32, wide": (WIDE, {}, {}),
    "fp32, swiglu, 2 kv heads, rmsnorm": (
        {"activation": "swiglu", "num_key_value_heads": 2, "norm": "rmsnorm", "qk_norm": True}, {}, {},
    ),
    "fp32, alibi, dropout": ({"position_embedding": "alibi", "dropout": 0.1, "embedding_norm": True}, {}, {}),
    "bf16": ({}, BF16, {}),
    "bf16, math": ({"attention": "math"}, BF16, {}),
    "bf16, fp32 sums": ({}, FP32_SUMS, {}),
    "bf16, fp32 sums, recomputed": ({}, FP32_SUMS, recomputed(True)),
    "fp32, recomputed attention": ({}, {}, recomputed(["attention"])),
    "fp32, recomputed feed-forward": ({}, {}, recomputed(["feed_forward"])),
    "fp32, recomputed halves": ({}, {}, recomputed(["attention", "feed_forward"])),
    "fp32, wide, loss in chunks": (WIDE, {}, CHUNKS),
    "fp32, wide, untied, capped, loss in chunks": (
        {**WIDE, "tie_embeddings": False, "output_logit_cap": 30.0}, {}, CHUNKS,
    ),
    "bf16, fp32 sums, long, loss in chunks": (LONG, FP32_SUMS, CHUNKS),
    "bf16, fp32 sums, long": (LONG, FP32_SUMS, {}),
}  # fmt: skip
"""Name -> changes of the model, of DeepSpeed's keys and of sections of "megastable"."""


class LiveStorages(TorchDispatchMode):
    """Adds up the storages that are alive, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._bytes: dict[int, int] = {}
        # What lives already: weights, optimizer states and buffers. Exact types, because isinstance asks every object
        # for its class, for which a lazy proxy imports what it stands for.
        for thing in gc.get_objects():
            if type(thing) in (Tensor, torch.nn.Parameter):
                self.count(thing)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "cpu" and key not in self._bytes and storage.nbytes():
            self._bytes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._subtract, key)

    def _subtract(self, key: int) -> None:
        self.now -= self._bytes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result


def case_plan(name: str, num_stages: int, world_size: int) -> RunPlan:
    """Plan the run of a case: four micro-batches of two samples on every replica."""
    model, keys, sections = CASES[name]
    sizes = {"num_layers": 4, "hidden_size": 256, "seq_length": 256, "num_attention_heads": 4, "vocab_size": 2048}
    run = run_from_dict(
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            **keys,
            "megastable": {
                "model": {**sizes, **model},
                "pipeline": {"num_stages": num_stages, **sections.get("pipeline", {})},
                "batch_rampup": {"final": 8 * world_size // num_stages},
                "data": {"source": {"type": "stdlib"}},
                "training": sections.get("training", {"total_steps": 10}),
            },
        }
    )
    return RunPlan.of(run, world_size)


def measured_bytes(plan: RunPlan) -> tuple[int, int]:
    """Return the peak of the second step's live storages on this rank, and the rank's stage."""
    engine = build_engine(plan)
    batch = plan.ramp.at(0)
    model = plan.run.megastable.model

    def micro_batches() -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]] | None:
        if not engine.needs_data:
            return None
        ids = torch.randint(0, model.vocab_size, (batch.micro_batch_size, model.seq_length))
        return iter([(ids, (ids, torch.tensor(float(ids.numel()))))] * batch.num_microbatches)

    engine.rampup_hook.before_step(0)
    engine.train_batch(micro_batches(), LEARNING_RATE)
    gc.collect()
    with LiveStorages() as live:
        engine.train_batch(micro_batches(), LEARNING_RATE)
    return live.peak, engine.stage


def main() -> None:
    """Measure one case, so that nothing of another is left, and print a line a rank."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="fp32")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages; the other processes are replicas")
    arguments = parser.parse_args()
    launch = Launch.detect(os.environ)
    with connected(launch):
        plan = case_plan(arguments.case, arguments.stages, launch.world_size)
        measured, stage = measured_bytes(plan)
        counted = stage_memory(plan, on_cpu=True)[stage].total
        print(
            f"| {arguments.case} | {plan.layout.describe(launch.rank)} | {measured / 2**20:.1f} | "
            f"{counted / 2**20:.1f} | {counted / measured:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
