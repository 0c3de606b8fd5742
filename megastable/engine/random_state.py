"""The random generators of one rank: seeding them, and carrying them through a checkpoint."""

from __future__ import annotations

import random

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import Tensor

from megastable.engine.tensor_group import SPLIT_STREAM


def seed_rank(seed: int, stage: int, replica: int, tensor: int, step: int | None = None) -> None:
    """Give every pair of stage and replica its own dropout masks, and each tensor rank a second stream.

    The second one is for what is split over tensor ranks. They share the first one, and so drop the same elements where
    they hold the same. Weights are drawn from neither; every layer has a seed.

    Args:
        step: where a run goes on whose streams are not known; they are new ones, and not those of its first steps.
    """
    later = () if step is None else (step,)
    split = get_cuda_rng_tracker()
    split.reset()
    split.add(SPLIT_STREAM, _combined_seed(seed, stage, replica, 1 + tensor, *later))
    combined = _combined_seed(seed, stage, replica, 0, *later)
    random.seed(combined)
    np.random.seed(combined)
    torch.manual_seed(combined)
    get_accelerator().manual_seed_all(combined)


def _combined_seed(*parts: int) -> int:
    """Mix the parts so that neighbouring stages, replicas and seeds have unrelated streams."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])


def random_state() -> dict[str, Tensor]:
    """Return the state of this rank's torch generators, each a tensor of bytes.

    Nothing here draws from Python's or numpy's, which are seeded for whoever does.
    """
    state = {"torch": torch.get_rng_state(), "split": get_cuda_rng_tracker().get_states()[SPLIT_STREAM].clone()}
    if not _on_cpu():
        state["device"] = get_accelerator().get_rng_state()
    return state


def is_random_state(state: dict[str, Tensor]) -> bool:
    """Tell whether ``state`` can be one of this rank: one of another kind of device, or of another torch, cannot."""
    own = random_state()
    return own.keys() == state.keys() and all(
        state[name].dtype == own[name].dtype and state[name].shape == own[name].shape for name in own
    )


def set_random_state(state: dict[str, Tensor]) -> None:
    """Set this rank's generators to what ``random_state`` returned."""
    # Copied, since what is read from a file is gone with it.
    torch.set_rng_state(state["torch"].clone())
    get_cuda_rng_tracker().set_states({SPLIT_STREAM: state["split"].clone()})
    if "device" in state:
        get_accelerator().set_rng_state(state["device"].clone())


def _on_cpu() -> bool:
    return str(get_accelerator().device_name()) == "cpu"
