"""A run small enough for a test, as a run file's dictionary and as a RunConfig."""

from __future__ import annotations

import copy
from typing import Any

from megastable.config import RunConfig, run_from_dict

TINY_RUN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "megastable": {
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": 16,
            "vocab_size": 300,
            "vocab_padding_multiple": 16,
        },
        "pipeline": {"num_stages": 1},
        "batch_rampup": {"start": 4, "increment": 4, "final": 12, "samples_per_increment": 12},
        "lr_schedule": {"type": "cosine", "warmup": 8, "min_lr": 0.001},
        "data": {"source": {"type": "stdlib"}, "tokenizer": {"type": "bytes"}},
        "training": {"total_steps": 8, "seed": 7},
    },
}


def run_dict(**changes: Any) -> dict[str, Any]:
    """Return ``TINY_RUN`` with values replaced; keys are paths with ``__`` for dots: ``megastable__model__dropout``."""
    values = copy.deepcopy(TINY_RUN)
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return values


def tiny_run(**changes: Any) -> RunConfig:
    """Return the same as a RunConfig."""
    return run_from_dict(run_dict(**changes))
