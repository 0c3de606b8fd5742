"""Halves of a block computed again: the same numbers to the bit, and less kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.core.flops import HALVES, RECOMPUTED_KINDS
from megastable.model.attention import SelfAttention
from megastable.model.block import GeluFeedForward
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

LAYER_OF_HALF = {"attention": SelfAttention, "feed_forward": GeluFeedForward}
CHOICES: list[list[str]] = [[half] for half in HALVES] + [list(HALVES)]


def model_of(kinds: list[str] | bool, **changes: Any) -> ReferenceModel:
    return ReferenceModel(tiny_run(**changes, megastable__pipeline__activation_checkpointing=kinds))


def output_and_gradients(model: ReferenceModel) -> list[Tensor]:
    """With dropout drawn from a fixed seed."""
    torch.manual_seed(5)
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(43))
    output = model(ids)
    torch.rand(7)  # the stream goes on between the passes
    output.square().mean().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters()), torch.rand(3)]


def test_every_kind_but_the_block_is_a_half() -> None:
    assert list(RECOMPUTED_KINDS) == ["block", *HALVES] and LAYER_OF_HALF.keys() == set(HALVES)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("kinds", CHOICES)
def test_gradients_are_equal_to_the_bit_with_dropout(kinds: list[str], parallel: bool) -> None:
    changes = {"megastable__model__dropout": 0.3, "megastable__model__parallel_residual": parallel}
    kept, again = (output_and_gradients(model_of(k, **changes)) for k in (False, kinds))
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    without_dropout = output_and_gradients(model_of(False))
    assert not torch.equal(kept[0], without_dropout[0]), "nothing was dropped"


@pytest.mark.parametrize("kinds", CHOICES)
def test_only_the_chosen_halves_run_twice(kinds: list[str]) -> None:
    model = model_of(kinds)
    runs = dict.fromkeys(HALVES, 0)
    for half, layer in LAYER_OF_HALF.items():
        for module in model.modules():
            if isinstance(module, layer):
                # Before, not after: a recomputation ends as soon as it has what the backward pass needs.
                module.register_forward_pre_hook(lambda *_, half=half: runs.update({half: runs[half] + 1}))
    output_and_gradients(model)
    assert runs == {half: 4 * (2 if half in kinds else 1) for half in HALVES}
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.long))
    assert runs == {half: 4 * (3 if half in kinds else 2) for half in HALVES}


def kept_elements(kinds: list[str] | bool) -> int:
    """Of all that a forward pass saved, parameters left out."""
    model = model_of(kinds)
    storages = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.zeros(2, 16, dtype=torch.long))
    del output
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_each_half_saves_memory() -> None:
    nothing = kept_elements(False)
    attention, feed_forward, both = (kept_elements(kinds) for kinds in CHOICES)
    assert both < min(attention, feed_forward) and max(attention, feed_forward) < nothing
