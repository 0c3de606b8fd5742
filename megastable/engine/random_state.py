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
    """Return the state of this rank's generators as tensors of numbers."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    position = numpy_state["state"]["pos"]
    return {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        # One number, or none where no half of a pair is left over.
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([position, *numpy_state["state"]["key"].tolist()], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["has_gauss"], numpy_state["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        "split": get_cuda_rng_tracker().get_states()[SPLIT_STREAM].clone(),
        "device": torch.tensor([], dtype=torch.uint8) if _on_cpu() else get_accelerator().get_rng_state(),
    }


def set_random_state(state: dict[str, Tensor]) -> None:
    """Set this rank's generators to what ``random_state`` returned."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, *keys = state["numpy"].tolist()
    has_gauss, numpy_gauss = state["numpy_gauss"].tolist()
    inner = {"key": np.array(keys, dtype=np.uint32), "pos": position}
    np.random.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": int(has_gauss), "gauss": numpy_gauss})
    torch.set_rng_state(state["torch"].clone())
    get_cuda_rng_tracker().set_states({SPLIT_STREAM: state["split"].clone()})
    # A checkpoint of a CPU has none of a device.
    if len(state["device"]) > 0 and not _on_cpu():
        get_accelerator().set_rng_state(state["device"].clone())


def _on_cpu() -> bool:
    return str(get_accelerator().device_name()) == "cpu"
