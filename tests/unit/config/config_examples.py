"""Run files to start from, and small tools over them."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megastable.config import ConfigError, Fault, run_from_dict

RUN_FILES = Path(__file__).parents[3] / "ds_configs"
SCHEMA_FILE = RUN_FILES / "run_file.schema.json"
SHIPPED = sorted(set(RUN_FILES.glob("*.json")) - {SCHEMA_FILE})

MINIMAL: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "megastable": {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "seq_length": 64,
            "vocab_size": 1024,
        },
        "batch_rampup": {"final": 32},
        "data": {"source": {"type": "stdlib"}},
        "training": {"total_samples": 1000},
    },
}

FULL: dict[str, Any] = {
    "$schema": "./run_file.schema.json",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "communication_data_type": "fp32",
    "optimizer": {
        "type": "Adam",
        "params": {
            "lr": 1e-3,
            "betas": [0.8, 0.99],
            "eps": 1e-9,
            "weight_decay": 0,
            "adam_w_mode": False,
            "fused": False,
        },
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 1,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    },
    "bf16": {"enabled": False, "immediate_grad_update": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 2000,
    },
    "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "job"},
    "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
    "comet": {
        "enabled": True,
        "samples_log_interval": 5,
        "project": "p",
        "workspace": "w",
        "api_key": "k",
        "experiment_name": "n",
        "experiment_key": "e",
        "online": False,
        "mode": "create",
    },
    "csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "job"},
    "megastable": {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "ffn_hidden_size": 300,
            "seq_length": 64,
            "vocab_size": 1000,
            "vocab_padding_multiple": 64,
            "position_embedding": "learned",
            "rotary_base": 5000,
            "norm": "rmsnorm",
            "norm_eps": 1e-6,
            "activation": "swiglu",
            "embedding_norm": True,
            "tie_embeddings": False,
            "dropout": 0.1,
            "attention": "math",
        },
        "pipeline": {"num_stages": 2, "activation_checkpointing": True, "partition": [3, 1]},
        "batch_rampup": {
            "start": 8,
            "increment": 8,
            "final": 32,
            "ramp_samples": 100,
            "micro_batch_size_steps": [[16, 4], [32, 8]],
        },
        "lr_schedule": {
            "type": "warmup_stable_decay",
            "warmup": 10,
            "stable": {"tokens": 32000},
            "decay": {"tokens": 64000},
            "min_lr": 1e-5,
            "batch_scaling": "sqrt",
        },
        "init": {"scheme": "fixed", "std": 0.01, "residual_scaling": False},
        "data": {
            "source": {"type": "hf", "path": "p", "name": "n", "split": "s", "text_column": "c"},
            "tokenizer": {"type": "bpe", "vocab_size": 500},
            "validation_fraction": 0.1,
            "cache_dir": "cache",
        },
        "training": {
            "total_steps": 100,
            "seed": 1,
            "eval_interval": 10,
            "eval_samples": 20,
            "world_size": 4,
            "fp16_on_cpu": True,
        },
        "checkpoint": {"save_interval": 5, "keep_last": 3, "keep_every": 50, "keep_best": 2, "on_failure": "stop"},
        "logging": {"interval": 1},
    },
}
"""Every section and nearly every key, none at its default."""


def faults_of(raw: dict[str, Any], overrides: Sequence[str] = (), world_size: int | None = None) -> tuple[Fault, ...]:
    """The faults of a run; none when it is legal."""
    try:
        run_from_dict(raw, overrides, world_size=world_size)
    except ConfigError as error:
        return error.faults
    return ()


def with_value(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``raw`` with the key at the dotted path set, its sections made where there are none."""
    changed = copy.deepcopy(raw)
    *parents, key = path.split(".")
    section = changed
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return changed


def key_paths(raw: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys of ``raw``, sections included."""
    for key, value in raw.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from key_paths(value, f"{prefix}{key}.")


def value_at(raw: dict[str, Any], path: str) -> Any:
    """The value at the dotted path."""
    value: Any = raw
    for key in path.split("."):
        value = value[key]
    return value


def written(folder: Path, raw: object) -> Path:
    """``raw`` as a run file in ``folder``; text is written as it is."""
    path = folder / "run.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path
