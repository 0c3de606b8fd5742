"""The norms that sum up a model, whatever model it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megastable.monitors import training_status


def test_training_status_of_any_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, float(number))
        if number < 4:
            parameter.grad = torch.full_like(parameter, 2.0 - number)
    status = training_status(model)
    sizes = [12, 4, 8, 2, 4, 2]
    norms = [number * size**0.5 for number, size in enumerate(sizes)]
    gradients = [abs(2.0 - number) * size**0.5 for number, size in enumerate(sizes[:4])]
    assert status.parameter_norm == pytest.approx(math.sqrt(sum(norm**2 for norm in norms)))
    assert status.mean_parameter_norm == pytest.approx(sum(norms) / 6)
    assert status.max_parameter_norm == pytest.approx(max(norms))
    assert status.mean_grad_norm == pytest.approx(sum(gradients) / 4)
    assert status.max_grad_norm == pytest.approx(max(gradients))
    assert [name for name, _ in status.worst] == ["0.weight", "0.bias", "1.bias", "1.weight"]
    assert status.num_without_gradient == 2 and "2 without a gradient" in str(status)

    broken = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    broken[0][0, 0] = math.nan
    broken[3][0] = math.inf
    assert {name for name, _ in training_status(model).worst[:2]} == {"0.weight", "1.bias"}


def test_training_status_before_any_backward() -> None:
    status = training_status(nn.Linear(2, 2))
    assert (status.mean_grad_norm, status.max_grad_norm, status.worst) == (0.0, 0.0, [])


def test_training_status_of_models_that_are_not_plain() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert training_status(embedding).max_grad_norm == pytest.approx((4 + 4 + 1 + 1) ** 0.5)
    odd = nn.Module()
    odd.complex = nn.Parameter(torch.tensor([3 + 4j]))
    odd.whole = nn.Parameter(torch.tensor([12], dtype=torch.int8), requires_grad=False)
    odd.later = nn.LazyLinear(3)
    assert training_status(odd).parameter_norm == pytest.approx(13.0)
