"""The random generators of one rank: seeding them, and carrying them through a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from megastable.engine.tensor_group import SPLIT_STREAM


def seed_rank(seed: int, stage: int, replica: int, tensor: int) -> None:
    """Give every pair of stage and replica its own dropout masks, and each tensor rank a second stream.

    The second one is for what is split over tensor ranks. They share the first one, and so drop the same elements where
    they hold the same. Weights are drawn from neither; every layer has a seed.
    """
    split = get_cuda_rng_tracker()
    split.reset()
    split.add(SPLIT_STREAM, _combined_seed(seed, stage, replica, 1 + tensor))
    combined = _combined_seed(seed, stage, replica, 0)
    random.seed(combined)
    np.random.seed(combined)
    torch.manual_seed(combined)
    get_accelerator().manual_seed_all(combined)


def _combined_seed(*parts: int) -> int:
    """Mix the parts so that neighbouring stages, replicas and seeds have unrelated streams."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])


def save_random_state(folder: Path, rank: int) -> None:
    """Write this rank's generators into the checkpoint ``folder``."""
    # As lists and tensors, which can be read again with weights_only, that is without running code from the file.
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "split": get_cuda_rng_tracker().get_states()[SPLIT_STREAM],
        "device": None if _on_cpu() else get_accelerator().get_rng_state(),
    }
    torch.save(state, _path(folder, rank))


def load_random_state(folder: Path, rank: int) -> None:
    """Set this rank's generators to the state that ``save_random_state`` wrote."""
    state: dict[str, Any] = torch.load(_path(folder, rank), weights_only=True)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states({SPLIT_STREAM: state["split"]})
    if state["device"] is not None and not _on_cpu():
        get_accelerator().set_rng_state(state["device"])


def _on_cpu() -> bool:
    return str(get_accelerator().device_name()) == "cpu"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"random_state_rank_{rank:05d}.pt"
