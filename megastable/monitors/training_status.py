"""Sums up how a model is doing, as one would by hand: for any torch model, between backward and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# The room of monitors is imported by what has to start without torch, so torch is loaded where tensors are computed.
if TYPE_CHECKING:
    from torch import Tensor, nn

NUM_WORST = 5


@dataclass(frozen=True)
class TrainingStatus:
    """Holds norms of a model's gradients and parameters; ``str()`` makes a small table of it."""

    mean_grad_norm: float
    """Over the parameters that have a gradient; 0 where none has."""
    max_grad_norm: float
    parameter_norm: float
    """Of all parameters together."""
    mean_parameter_norm: float
    max_parameter_norm: float
    num_without_gradient: int
    worst: list[tuple[str, float]]
    """Up to five parameters with the largest gradient norms, those that are not finite first."""

    def __str__(self) -> str:
        lines = [
            f"gradient norm   mean {self.mean_grad_norm:.4g}  max {self.max_grad_norm:.4g}",
            f"parameter norm  mean {self.mean_parameter_norm:.4g}  max {self.max_parameter_norm:.4g}  "
            f"all together {self.parameter_norm:.4g}",
        ]
        if self.num_without_gradient:
            lines.append(f"{self.num_without_gradient} without a gradient")
        lines.append("largest gradients:")
        lines += [f"  {norm:<12.4g}{name}" for name, norm in self.worst]
        return "\n".join(lines)


def training_status(model: nn.Module) -> TrainingStatus:
    """Compute mean and largest gradient norms and parameter norms of ``model``, and find its worst five gradients."""
    import torch
    from torch.nn.parameter import UninitializedParameter

    with torch.no_grad():
        # A lazy layer that has not seen an input has no values yet.
        parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not isinstance(parameter, UninitializedParameter)
        }
        norms = _norms(list(parameters.values()))
        with_gradient = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        grad_norms = _norms(list(with_gradient.values()))
        # A NaN compares as neither larger nor smaller: infinity stands for both, so that they come first.
        order = grad_norms.nan_to_num(nan=torch.inf, posinf=torch.inf).argsort(descending=True)[:NUM_WORST].tolist()
        names = list(with_gradient)
        mean_grad_norm, max_grad_norm = _mean_and_largest(grad_norms)
        mean_parameter_norm, max_parameter_norm = _mean_and_largest(norms)
        return TrainingStatus(
            mean_grad_norm=mean_grad_norm,
            max_grad_norm=max_grad_norm,
            parameter_norm=float(norms.square().sum().sqrt()),
            mean_parameter_norm=mean_parameter_norm,
            max_parameter_norm=max_parameter_norm,
            num_without_gradient=len(parameters) - len(with_gradient),
            worst=[(names[index], float(grad_norms[index])) for index in order],
        )


def _norms(tensors: list[Tensor]) -> Tensor:
    """Compute the 2-norm of every tensor in fp64, (tensors,).

    The zeros that a sparse tensor leaves out add nothing, and of complex values the magnitudes count.
    """
    import torch

    # Coalescing adds up entries of the same place, as the optimizer will.
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    return torch.tensor([float(torch.linalg.vector_norm(tensor.abs().double())) for tensor in dense]).double()


def _mean_and_largest(norms: Tensor) -> tuple[float, float]:
    if len(norms) == 0:  # before the first backward pass no parameter has a gradient, and torch's mean would be NaN
        return 0.0, 0.0
    return float(norms.mean()), float(norms.max())
