"""The head and the loss for some tokens at a time: the same numbers, and never more logits than a chunk has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megastable.core.labels import IGNORED_LABEL
from megastable.model.ends import HeadInput, LogitCap
from megastable.model.loss import token_mean_loss
from megastable.model.tensor_parallel import OneProcess
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

HEADS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"megastable__model__tie_embeddings": False},
    "tied, capped": {"megastable__model__output_logit_cap": 0.05},
    "untied, capped": {"megastable__model__tie_embeddings": False, "megastable__model__output_logit_cap": 0.05},
}
TOKENS = 3 * 16
on_each_head = pytest.mark.parametrize("head", HEADS)


def ids_and_labels() -> tuple[Tensor, Tensor]:
    """Three samples, one of them with ignored labels."""
    generator = torch.Generator().manual_seed(41)
    ids, labels = (torch.randint(300, (3, 16), generator=generator) for _ in range(2))
    labels[1, 3:] = IGNORED_LABEL
    return ids, labels


def model_and_loss(chunk_tokens: int | None, z_loss: float = 0.0, **changes: Any) -> tuple[ReferenceModel, Any]:
    """The tiny model with its head as the engine has it, and the loss that goes with it."""
    run = tiny_run(**changes, megastable__training__loss_chunk_tokens=chunk_tokens)
    return ReferenceModel(run), token_mean_loss(300, OneProcess(), z_loss, chunk_tokens)


def gradients_of(model: ReferenceModel) -> list[Tensor]:
    """Of every parameter, all of which have one."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return gradients


def loss_and_gradients(
    chunk_tokens: int | None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    z_loss: float = 0.0,
    **changes: Any,
) -> tuple[float, list[Tensor]]:
    """Of one micro-batch."""
    model, loss_of = model_and_loss(chunk_tokens, z_loss, **changes)
    ids, labels = ids_and_labels()
    loss = loss_of(model.to(dtype)(ids), (labels, torch.tensor(35.0)))
    (loss * scale).backward()
    return loss.item(), gradients_of(model)


@on_each_head
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS - 1, 1000])
def test_loss_and_gradients_are_those_of_all_logits_at_once(head: str, z_loss: float, chunk_tokens: int) -> None:
    whole, gradients = loss_and_gradients(None, z_loss=z_loss, **HEADS[head])
    found, found_gradients = loss_and_gradients(chunk_tokens, z_loss=z_loss, **HEADS[head])
    assert found == pytest.approx(whole, rel=1e-6)
    exact = torch.cat([gradient.flatten() for gradient in gradients])
    assert (
        torch.cat([gradient.flatten() for gradient in found_gradients]) - exact
    ).norm() < 2e-6 * exact.norm()  # so many roundings more


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_a_scaled_loss_keeps_its_small_gradients(dtype: torch.dtype) -> None:
    """Gradients are made in the backward pass, from the scaled loss, so that they do not underflow before."""
    scale = 2.0**12
    _, expected = loss_and_gradients(None, torch.float32)
    _, found = loss_and_gradients(7, dtype, scale)
    for gradient, exact in zip(found, expected, strict=True):
        error = (gradient.float() / scale - exact).norm() / exact.norm()
        assert error < 0.05


def test_a_micro_batch_without_counted_labels_gives_0() -> None:
    model, loss_of = model_and_loss(5)
    ids, labels = ids_and_labels()
    loss = loss_of(model(ids), (torch.full_like(labels, IGNORED_LABEL), torch.tensor(35.0)))
    loss.backward()
    assert loss.item() == 0.0 and not any(gradient.any() for gradient in gradients_of(model))


@on_each_head
def test_an_evaluation_gives_the_same(head: str) -> None:
    ids, labels = ids_and_labels()
    losses = []
    for chunk_tokens in (None, 5):
        model, loss_of = model_and_loss(chunk_tokens, **HEADS[head])
        with torch.no_grad():
            losses.append(loss_of(model.eval()(ids), (labels, torch.tensor(35.0))).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that an operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@on_each_head
def test_no_tensor_has_more_elements_than_the_logits_of_a_chunk(head: str) -> None:
    """48 tokens and a vocabulary of 2000: the logits of 40 tokens are more than any weight (32 x 2000)."""
    sizes = {"megastable__model__vocab_size": 2000, "megastable__model__vocab_padding_multiple": 1}
    largest = {}
    for chunk_tokens in (None, 40):
        run = tiny_run(**HEADS[head], **sizes, megastable__training__loss_chunk_tokens=chunk_tokens)
        model, loss_of = ReferenceModel(run), token_mean_loss(2000, OneProcess(), 0.1, chunk_tokens)
        ids, labels = ids_and_labels()
        with LargestTensor() as seen:
            loss_of(model(ids), (labels, torch.tensor(35.0))).backward()
        largest[chunk_tokens] = seen.elements
    assert largest == {None: TOKENS * 2000, 40: 40 * 2000}


@on_each_head
def test_monitors_see_every_logit_before_the_cap(head: str) -> None:
    largest = []
    for chunk_tokens in (None, 5):
        model, loss_of = model_and_loss(chunk_tokens, **HEADS[head])
        seen: list[float] = []
        for module in model.modules():
            if isinstance(module, LogitCap):
                module.register_forward_hook(
                    lambda _, inputs, output, seen=seen: seen.append(inputs[0].detach().abs().max())
                )
        ids, labels = ids_and_labels()
        loss_of(model(ids), (labels, torch.tensor(35.0)))
        largest.append(float(max(seen)))
    assert largest[0] == pytest.approx(largest[1], rel=1e-6)
    assert largest[0] > 0.05  # above the cap


@on_each_head
def test_the_output_has_a_gradient_before_the_weight_of_the_head(head: str) -> None:
    """DeepSpeed prepares when the first gradient reaches an output; what a weight accumulated before would be lost."""
    model, loss_of = model_and_loss(5, **HEADS[head])
    ids, labels = ids_and_labels()
    output = model(ids)
    assert isinstance(output, HeadInput)
    order: list[str] = []
    for part in output:
        if isinstance(part, Tensor) and part.grad_fn is not None:
            part.register_hook(lambda gradient: order.append("output"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: order.append("weight"))
    loss_of(output, (labels, torch.tensor(35.0))).backward()
    assert order[0] == "output"


def test_no_chunk_leaves_its_logits_behind() -> None:
    """A forward pass keeps less by all of the logits than without chunks: 48 tokens, 2000 logits each."""
    sizes = {"megastable__model__vocab_size": 2000, "megastable__model__num_layers": 1}
    kept = {}
    for chunk_tokens in (None, 16):
        run = tiny_run(**sizes, megastable__training__loss_chunk_tokens=chunk_tokens)
        model, loss_of = ReferenceModel(run), token_mean_loss(2000, OneProcess(), 0.1, chunk_tokens)
        ids, labels = ids_and_labels()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model(ids), (labels, torch.tensor(35.0)))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept[chunk_tokens] = sum(size for pointer, size in saved.items() if pointer not in weights)
        del loss
    assert kept[16] <= kept[None] - TOKENS * 2000 < kept[None]
