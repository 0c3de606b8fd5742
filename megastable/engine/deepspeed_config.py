"""Turns a run file into the dictionary that DeepSpeed reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.config import RunConfig
from megastable.core.batch_rampup import Batch
from megastable.core.flops import BLOCK

MONITOR_SECTIONS = ("tensorboard", "wandb", "comet", "csv_monitor")
MONITOR_FOLDERS = ("tensorboard", "csv_monitor")
"""Those that write files; into the run folder, unless the run file names another."""


def deepspeed_config(run: RunConfig, batch: Batch, run_dir: Path, reduce_bucket_size: int) -> dict[str, Any]:
    """Return DeepSpeed's view of the run, for its first ``batch``.

    Optimizer, schedule and ramp are left out: the first is built here, and the others are applied before every step.

    Args:
        reduce_bucket_size: elements of the gradient buffer that ZeRO allocates every step. DeepSpeed's own default is
            500 million, 2 GB in fp32 even for a tiny model.
    """
    config = run.model_dump(mode="json", exclude_none=True)
    # These sections are DeepSpeed's own, and go to it as they are.
    passed = ("fp16", "bf16", "data_types", "communication_data_type", *MONITOR_SECTIONS)
    result: dict[str, Any] = {key: config[key] for key in passed if key in config}
    for section in MONITOR_FOLDERS:
        if section in result:
            folder = result[section].get("output_path") or str(run_dir / section)
            result[section]["output_path"] = folder
    result["gradient_clipping"] = run.clip_norm
    result["train_batch_size"] = batch.global_batch_size
    result["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    result["gradient_accumulation_steps"] = batch.num_microbatches
    result["zero_optimization"] = {**config["zero_optimization"], "reduce_bucket_size": reduce_bucket_size}
    result["pipeline"] = {
        "activation_checkpoint_interval": int(BLOCK in run.megastable.pipeline.recomputed_kinds),
        # The reentrant form runs a recomputed segment without a graph first, and again with one in the backward pass:
        # compiled blocks would have two forms, and an embedding inside a segment would lose its gradient.
        "use_reentrant": False,
        # With tensor ranks these are on by default, and trade sends for gathers. One of them alone fails or hangs.
        "pipe_partitioned": False,
        "grad_partitioned": False,
    }
    if run.data_types.grad_accum_dtype == "fp32":
        # Otherwise DeepSpeed rounds the fp32 sums to 16 bits on their way between replicas.
        result.setdefault("communication_data_type", "fp32")
    return result
