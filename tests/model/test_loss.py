"""The token mean over the whole global batch, and a padded vocabulary that never reaches it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megastable.core.labels import IGNORED_LABEL
from megastable.model.loss import token_mean_loss
from megastable.model.tensor_parallel import OneProcess
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

SEQ_LENGTH, VOCAB_SIZE, PADDED_VOCAB_SIZE = 128, 20, 32
COUNTED_TOKENS = [11, 101, 0, 40]  # per sample


def logits_and_labels(counted_tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Random samples; in each, so many labels count, at scattered places."""
    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(len(counted_tokens), SEQ_LENGTH, PADDED_VOCAB_SIZE, generator=generator)
    labels = torch.full((len(counted_tokens), SEQ_LENGTH), IGNORED_LABEL)
    for row, counted in enumerate(counted_tokens):
        places = torch.randperm(SEQ_LENGTH, generator=generator)[:counted]
        labels[row, places] = torch.randint(VOCAB_SIZE, (counted,), generator=generator)
    return logits, labels


def sum_of_losses(logits: Tensor, labels: Tensor) -> float:
    """One token after the other, in fp64."""
    total = 0.0
    for scores, label in zip(logits[..., :VOCAB_SIZE].flatten(0, 1).double(), labels.flatten(), strict=True):
        if label != IGNORED_LABEL:
            total += (scores.logsumexp(0) - scores[label]).item()
    return total


def mean_of_micro_batches(logits: Tensor, labels: Tensor, split: list[list[int]]) -> Tensor:
    """What the engine does with the loss: a plain mean over the micro-batches of all replicas."""
    denominator = (labels != IGNORED_LABEL).sum().float() / len(split)
    loss = token_mean_loss(VOCAB_SIZE, OneProcess())
    return torch.stack([loss(logits[rows], (labels[rows], denominator)) for rows in split]).mean()


def test_short_and_long_samples_count_by_their_tokens() -> None:
    logits, labels = logits_and_labels([11, 101])
    expected = sum_of_losses(logits, labels) / 112
    for split in ([[0, 1]], [[1, 0]], [[0], [1]], [[1], [0]]):
        assert mean_of_micro_batches(logits, labels, split).item() == pytest.approx(expected, rel=1e-6)
    mean_of_means = (sum_of_losses(logits[:1], labels[:1]) / 11 + sum_of_losses(logits[1:], labels[1:]) / 101) / 2
    assert abs(mean_of_means - expected) > 0.01, "the wrong way gives the same here"


def test_loss_and_gradient_are_equal_for_every_split_into_micro_batches() -> None:
    logits, labels = logits_and_labels(COUNTED_TOKENS)
    logits.requires_grad_()
    expected = F.cross_entropy(logits[..., :VOCAB_SIZE].flatten(0, 1), labels.flatten())
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    assert expected.item() == pytest.approx(sum_of_losses(logits.detach(), labels) / sum(COUNTED_TOKENS), rel=1e-6)
    for order in itertools.permutations(range(4)):
        for size in (1, 2, 4):
            split = [list(order[start : start + size]) for start in range(0, 4, size)]
            found = mean_of_micro_batches(logits, labels, split)
            (gradient,) = torch.autograd.grad(found, logits)
            assert found.item() == pytest.approx(expected.item(), rel=1e-6)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-9)


def test_a_micro_batch_without_counted_labels_gives_0() -> None:
    logits, labels = logits_and_labels([0, 0])
    logits.requires_grad_()
    loss = token_mean_loss(VOCAB_SIZE, OneProcess())(logits, (labels, torch.tensor(56.0)))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_16_bit_logits_is_computed_in_fp32(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels([101, 101])
    logits = (100 * logits).to(dtype)
    loss = token_mean_loss(VOCAB_SIZE, OneProcess())(logits, (labels, torch.tensor(1e-3)))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(sum_of_losses(logits, labels) / 1e-3, rel=1e-5)
    assert loss.item() > 65504


@pytest.mark.parametrize("tied", [True, False])
def test_padded_rows_reach_neither_the_loss_nor_a_gradient(tied: bool) -> None:
    run = tiny_run(megastable__model__tie_embeddings=tied, megastable__model__vocab_padding_multiple=64)
    size = run.megastable.model
    assert (size.vocab_size, size.padded_vocab_size) == (300, 320)
    generator = torch.Generator().manual_seed(22)
    ids, labels = (torch.randint(size.vocab_size, (2, size.seq_length), generator=generator) for _ in range(2))
    results = []
    for filling in (0.0, 1.0, -1e4):
        model = ReferenceModel(run)
        tables = [weight for weight in model.parameters() if weight.shape == (320, size.hidden_size)]
        assert len(tables) == (1 if tied else 2)
        with torch.no_grad():
            for table in tables:
                table[size.vocab_size :] = filling
        loss = token_mean_loss(size.vocab_size, OneProcess())(model(ids), (labels, torch.tensor(float(labels.numel()))))
        loss.backward()
        for table in tables:
            assert table.grad is not None
            assert (table.grad[size.vocab_size :] == 0).all()
            assert (table.grad[: size.vocab_size] != 0).any()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)


def test_padding_does_not_change_the_loss() -> None:
    losses = []
    for multiple in (1, 128):
        run = tiny_run(megastable__model__vocab_padding_multiple=multiple)
        size, model = run.megastable.model, ReferenceModel(run)
        table = dict(model.named_parameters())["embedding.weight"]
        with torch.no_grad():
            table[:300] = torch.randn(300, size.hidden_size, generator=torch.Generator().manual_seed(23))
        labels = torch.arange(size.seq_length).unsqueeze(0)
        logits = model(labels)
        assert logits.shape[-1] == {1: 300, 128: 384}[multiple]
        losses.append(token_mean_loss(300, OneProcess())(logits, (labels, torch.tensor(16.0))).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_global_batch_that_counts_nothing_has_loss_and_gradient_zero() -> None:
    logits = torch.randn(1, 4, 16, requires_grad=True)
    loss = token_mean_loss(10, OneProcess())(logits, (torch.full((1, 4), IGNORED_LABEL), torch.tensor(0.0)))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()
