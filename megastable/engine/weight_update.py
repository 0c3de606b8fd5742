"""One optimizer step on the state of DeepSpeed's ZeRO-1 optimizers, with no more passes over it than it needs.

DeepSpeed's own ``step`` searches for bad values, copies the gradients to fp64 for their norm, flattens them, widens
them and scales them, in a pass each, and communicates seven times. Here the gradients are widened into place, one norm
serves both clipping and the search for bad values, and there is one sum over all ranks. What is kept between steps
stays where DeepSpeed has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.core.clipping import clip_coefficient
from megastable.engine.flat_partitions import FlatPartition

NORM_CHUNK = 1024
"""Elements whose squares are summed in fp32 before fp64 takes over.

A sum of n squares in fp32 may be off by n roundings of 2^-24 each: by 6e-5 of itself for 1024 in the worst case, and by
far less in practice. Over a whole partition of 10^8 elements there is no such bound, and fp64 throughout is much
slower.
"""


class Gradients(Protocol):
    """The place where an optimizer keeps the sums of a step's gradients."""

    def collect(self) -> list[Tensor]:
        """Return this rank's share of every parameter group: flat, in fp32, reduced over the replicas, still scaled."""
        ...

    def clear(self) -> None:
        """Make room for the gradients of the next step."""
        ...

    def discard(self) -> None:
        """Forget what passes have accumulated since the last step, before any of it is reduced or collected."""
        ...


class SeparateGradients:
    """The gradients of a ``DeepSpeedZeroOptimizer``: a tensor for each parameter, in the format of the accumulation.

    Args:
        reduced: whether the replicas have averaged them. DeepSpeed then leaves this rank's share in
            ``averaged_gradients``, cut at the borders of the share; otherwise each parameter still has its own.
    """

    def __init__(self, optimizer: Any, reduced: bool) -> None:
        self._optimizer = optimizer
        self._reduced = reduced

    def collect(self) -> list[Tensor]:
        """Widen each group into one flat tensor, and free what it was made of."""
        return [self._widened(group) for group in range(len(self._optimizer.bit16_groups))]

    def _widened(self, group: int) -> Tensor:
        optimizer = self._optimizer
        flat = torch.empty_like(optimizer.single_partition_of_fp32_groups[group])  # (elements of the share,)
        gradients = self._gradients_of(group)
        sizes = [gradient.numel() for gradient in gradients]
        # Shares are padded to equal length over the replicas. The padding has to be zero: it enters no norm, but Adam
        # updates it, and what stood in the memory before may not be finite.
        *places, padding = flat.split([*sizes, flat.numel() - sum(sizes)])
        torch._foreach_copy_(places, [gradient.flatten() for gradient in gradients])
        padding.zero_()
        # Freed group by group, so that the 16-bit and the fp32 gradients of the whole model never exist together.
        optimizer.averaged_gradients[group] = None
        for parameter in optimizer.bit16_groups[group]:
            parameter.grad = parameter.grad_accum = None
        return flat

    def _gradients_of(self, group: int) -> list[Tensor]:
        """List the gradients in this rank's share; a parameter that took no part has one of zeros."""
        if self._reduced:
            return list(self._optimizer.averaged_gradients[group])
        gradients = []
        for parameter in self._optimizer.params_in_partition[group]:
            gradient = self._optimizer.get_param_gradient_attribute(parameter)
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
        return gradients

    def clear(self) -> None:
        """Do nothing: ``collect`` has freed them."""

    def discard(self) -> None:
        """Free the gradient of every parameter."""
        for group in self._optimizer.bit16_groups:
            for parameter in group:
                parameter.grad = parameter.grad_accum = None


class FlatSums:
    """The gradients of a ``BF16_Optimizer``: one flat fp32 tensor a group, to which every backward pass adds."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def collect(self) -> list[Tensor]:
        """Return the tensors themselves, which have the right form already."""
        return list(self._optimizer.fp32_groups_gradient_flat_partition)

    def clear(self) -> None:
        """Set the sums to zero, and free the 16-bit gradients that they were made of."""
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)

    def discard(self) -> None:
        """Set the sums to zero, too."""
        self.clear()


@dataclass(frozen=True)
class Totals:
    """Holds what all ranks together know of a step before its update."""

    squares: float
    """Sum of squares of the gradients, each parameter counted once; still scaled."""
    gradients_finite: bool
    """Whether every copy of every gradient is finite."""
    losses: float
    """Sum of what all ranks of the last stage have summed over their micro-batches."""
    asked_to_stop: bool
    """Whether a rank had been asked to stop."""
    asked_to_save: bool


class WeightUpdate:
    """The update of the weights that replaces DeepSpeed's ``optimizer.step``.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer, around one of torch's.
        partitions: where its master weights lie on this rank.
        reduced: whether gradients have been reduced over several replicas before a step.
        loss: returns the summed loss of this rank's micro-batches; None on all stages but the last.
        asked_to_stop: tells whether this rank has been asked to stop.

    Attributes:
        asked_to_stop: whether any rank had been at the last step; the same on every rank.
        veto: asked before every update that could be applied, with what all losses sum up to and the gradient norm;
            True skips it. It has to answer the same on every rank.
        vetoed: whether it did at the last step.
        asks_to_save: whether this rank asks all for a save after the step.
        asked_to_save: whether any rank did at the last step; the same on every rank.
        not_finite: names of the parameters whose gradient, in this rank's share, was not finite at the last step.
    """

    def __init__(
        self,
        optimizer: Any,
        partitions: list[FlatPartition],
        reduced: bool,
        loss: Callable[[], Tensor | None],
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self._optimizer = optimizer
        self._loss = loss
        self._asked_to_stop = asked_to_stop
        self.asked_to_stop = False
        self.veto: Callable[[float, float], bool] = lambda losses, norm: False
        self.vetoed = False
        self.asks_to_save = False
        self.asked_to_save = False
        self.not_finite: list[str] = []
        self._partitions = partitions
        self._gradients: Gradients = SeparateGradients(optimizer, reduced)
        if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer
            self._gradients = FlatSums(optimizer)

    def replace_step(self) -> None:
        """Make DeepSpeed's engine, which calls ``optimizer.step``, call ``step`` below."""
        self._optimizer.step = self.step

    def discard_gradients(self) -> None:
        """Forget the gradients that were accumulated since the last step, as if their passes had not been."""
        self._gradients.discard()

    @torch.no_grad()
    def step(self) -> None:
        """Clip and apply the gradients, or skip them on all ranks where one of them is not finite; collective.

        They are skipped, too, where the loss is not finite: an id that the vocabulary lacks gives such a loss, and
        gradients that look sound; and where ``veto`` says so.
        """
        optimizer = self._optimizer
        gradients = self._gradients.collect()
        scale = float(getattr(optimizer, "loss_scale", 1.0))  # BF16_Optimizer has none
        totals = self._totals(gradients)
        norm = math.sqrt(totals.squares) / scale if totals.gradients_finite else math.inf
        self.not_finite = [] if totals.gradients_finite else self._not_finite(gradients)
        self.asked_to_stop = totals.asked_to_stop
        self.asked_to_save = totals.asked_to_save
        is_sound = totals.gradients_finite and math.isfinite(totals.losses)
        self.vetoed = is_sound and self.veto(totals.losses, norm)
        # The engine reads both after this call: the norm for its users, the other to count skipped steps.
        optimizer._global_grad_norm = norm
        optimizer.overflow = not is_sound or self.vetoed
        if not optimizer.overflow:
            # Unscaling and clipping are one factor, so they cost one pass together, and none where it is 1.
            self._apply(gradients, clip_coefficient(norm, optimizer.clip_grad) / scale)
        self._gradients.clear()
        # A loss is not scaled: one which alone is not finite says nothing of the scale. Neither does a veto.
        says_of_scale = not totals.gradients_finite or (is_sound and not self.vetoed)
        if hasattr(optimizer, "loss_scaler") and says_of_scale:
            # Only now: these gradients were made with the scale as it was. DeepSpeed updates it before it unscales, so
            # that a step at which the scale doubles applies half of its gradient.
            optimizer._update_scale(not totals.gradients_finite)

    def _totals(self, gradients: list[Tensor]) -> Totals:
        """Sum the squares of the gradients over the model, and find on all ranks what is not finite; collective.

        Tied copies and whole parameters on tensor ranks are counted on one rank only, but a bad value may be in any
        copy. Their squares travel as a second number, of which only finiteness is of interest. The third are the losses
        of the last stage. The others count the ranks that have been asked to stop or to save: a
        collective of its own for that would cost every step as much as this one.
        """
        counted: list[Tensor] = []
        copies: list[Tensor] = []
        for partition, flat in zip(self._partitions, gradients, strict=True):
            counted += [_squares(flat[start:stop]) for start, stop in partition.counted]
            copies += [_squares(flat[start:stop]) for start, stop in partition.copies]
        # A rank may have nothing of a kind, and an empty list cannot be stacked.
        zero = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        loss = self._loss()
        own_loss = zero if loss is None else loss.to(zero)
        sums = torch.stack(
            [
                torch.stack([zero, *counted]).sum(),
                torch.stack([zero, *copies]).sum(),
                own_loss.sum(),
                torch.full_like(zero, self._asked_to_stop()),
                torch.full_like(zero, self.asks_to_save),
            ]
        )  # (5,)
        # inf and nan survive a sum, so every rank comes to the same decision.
        dist.all_reduce(sums)
        squares, of_copies, of_losses, num_asked_to_stop, num_asking_to_save = sums.tolist()
        return Totals(
            squares,
            gradients_finite=math.isfinite(squares) and math.isfinite(of_copies),
            losses=of_losses,
            asked_to_stop=num_asked_to_stop > 0,
            asked_to_save=num_asking_to_save > 0,
        )

    def _not_finite(self, gradients: list[Tensor]) -> list[str]:
        return [
            held.name
            for partition, flat in zip(self._partitions, gradients, strict=True)
            for held in partition.held
            if not flat[slice(*held.span)].isfinite().all()
        ]

    def _apply(self, gradients: list[Tensor], factor: float) -> None:
        """Update the masters with the gradients times ``factor``, then the 16-bit weights on all replicas."""
        for partition, flat in zip(self._partitions, gradients, strict=True):
            partition.master.grad = flat if factor == 1.0 else flat.mul_(factor)
        self._optimizer.optimizer.step()
        for partition in self._partitions:
            partition.master.grad = None
        self._optimizer.update_lp_params()


def _squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor as an fp64 scalar, at the speed of fp32."""
    whole = flat.numel() // NORM_CHUNK * NORM_CHUNK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_CHUNK), dim=1)  # (chunks,)
    rest = torch.linalg.vector_norm(flat[whole:])
    return norms.double().square().sum() + rest.double().square()
