"""The run that every scenario disturbs: a tiny GPT on made-up words, guarded as a user would guard it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

TOTAL_STEPS = 120
BATCH = 8
FAULT_AT = 80
"""The step at which most faults are injected: late enough for every window, OLMo-core's of 64 steps included."""
SAVE_INTERVAL = 20
RUN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
    "megastable": {
        "model": {
            "num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 64, "vocab_size": 257,
        },
        "pipeline": {"num_stages": 2},
        "batch_rampup": {"final": BATCH},
        "lr_schedule": {"type": "cosine", "warmup": 80, "min_lr": 0.0003},
        "data": {
            "source": {"type": "synthetic", "num_documents": 1000}, "tokenizer": {"type": "bytes"},
            "validation_fraction": 0.1,
        },
        "training": {"total_steps": TOTAL_STEPS, "seed": 7, "eval_interval": TOTAL_STEPS, "eval_samples": 256},
        "stability": {
            "guard": "rollback", "window_steps": 32, "snapshot_interval": 10, "divergence_margin": 0.15,
            "divergence_steps": 10,
        },
        "monitors": {"interval": 5, "consistency_interval": 10},
        "checkpoint": {"save_interval": SAVE_INTERVAL},
    },
}  # fmt: skip
TWO_REPLICAS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
"""Four processes, of which each replica has as many micro-batches as the one replica of two processes."""
FP16: dict[str, Any] = {
    "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 100},
    "megastable.training.fp16_on_cpu": True,
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}

Changes = dict[str, Any]
"""Path of a key of the run file, with dots, to its value."""


def run_file(folder: Path, cache: Path, changes: Changes) -> Path:
    """Write the run with ``changes`` into ``folder``, and return the file.

    Args:
        cache: of the tokens, which all runs share.
    """
    values = copy.deepcopy(RUN)
    for path, value in {"megastable.data.cache_dir": str(cache), **changes}.items():
        *parents, key = path.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.json"
    file.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return file
