"""The state of the model that training changes: fp32 masters, Adam's moments, the scaler's position, random generators.

All of it is a handful of flat tensors and numbers. A snapshot is a copy of them, from which a run goes back to the step
it was taken at, or which is written to a checkpoint while the run goes on. The 16-bit weights follow from the masters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megastable.engine.checkpoint_tensors import MASTER, MOMENTS
from megastable.engine.flat_partitions import FlatPartition
from megastable.engine.random_state import random_state, set_random_state

SCALER_POSITION = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic loss scaler of DeepSpeed's changes; the rest are settings."""


@dataclass(frozen=True)
class Snapshot:
    """A copy, in host memory, of all that training changes on this rank.

    Attributes:
        flats: for each parameter group a flat fp32 tensor, (elements of the share,), of every kind in ``KINDS``.
        optimizer_steps: the updates that Adam has applied.
        loss_scaler: the position of a dynamic loss scaler; None without one.
        random: the state of this rank's random generators, by name.
    """

    flats: list[dict[str, Tensor]]
    optimizer_steps: int
    loss_scaler: dict[str, Any] | None
    random: dict[str, Tensor]


class ModelState:
    """Reads and sets the state of the model on this rank.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer around one of torch's Adams.
        partitions: this rank's share of its parameter groups.
    """

    def __init__(self, optimizer: Any, partitions: list[FlatPartition]) -> None:
        self._optimizer = optimizer
        self.partitions = partitions

    def make_moments(self) -> None:
        """Allocate Adam's moments, which torch makes at the first step only: a load or a snapshot may come before."""
        for partition, group in zip(self.partitions, self._optimizer.optimizer.param_groups, strict=True):
            state = self._optimizer.optimizer.state[partition.master]
            # Where torch itself makes it: with the weights for the fused kernel, on the host for the others.
            device = partition.master.device if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(partition.master)

    def flats(self) -> list[dict[str, Tensor]]:
        """Return the live tensors of every parameter group, by kind."""
        return [
            {MASTER: partition.master.detach(), **{moment: self._adam(partition)[moment] for moment in MOMENTS}}
            for partition in self.partitions
        ]

    @property
    def optimizer_steps(self) -> int:
        """Return the number of updates that Adam has applied."""
        return int(self._adam(self.partitions[0])["step"])

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        """Return the position of the loss scaler; None where the scale is fixed."""
        scaler = self._dynamic_scaler()
        return None if scaler is None else {name: getattr(scaler, name) for name in SCALER_POSITION}

    def as_it_is(self) -> Snapshot:
        """Return the state without a copy: the next step changes it."""
        return Snapshot(self.flats(), self.optimizer_steps, self.loss_scaler, random_state())

    def snapshot(self, reused: Snapshot | None = None) -> Snapshot:
        """Copy the state to host memory.

        Args:
            reused: an earlier snapshot that is not needed any more, into whose tensors the flat ones are copied.
        """
        live = self.flats()
        flats = [_host_tensors_like(group) for group in live] if reused is None else reused.flats
        for copies, group in zip(flats, live, strict=True):
            for kind, tensor in group.items():
                copies[kind].copy_(tensor, non_blocking=True)
        if self.partitions[0].master.is_cuda:
            torch.cuda.synchronize()
        return Snapshot(flats, self.optimizer_steps, self.loss_scaler, random_state())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, to the bit; collective, and between two steps only."""
        for group, copies in zip(self.flats(), snapshot.flats, strict=True):
            for kind, tensor in group.items():
                tensor.copy_(copies[kind])
        self.set_counts(snapshot.optimizer_steps, snapshot.loss_scaler)
        set_random_state(snapshot.random)
        self.weights_follow_masters()

    def set_counts(self, optimizer_steps: int, loss_scaler: dict[str, Any] | None) -> None:
        """Set what the optimizer counts, and the position of the scaler where both it and the run have one."""
        for partition in self.partitions:
            self._adam(partition)["step"].fill_(optimizer_steps)
        scaler = self._dynamic_scaler()
        if scaler is None or loss_scaler is None:
            return
        for name in SCALER_POSITION:
            setattr(scaler, name, loss_scaler[name])

    @contextlib.contextmanager
    def at_loss_scale(self, scale: float) -> Iterator[None]:
        """Compute with another loss scale for a while, where it is dynamic."""
        scaler = self._dynamic_scaler()
        if scaler is None:
            yield
            return
        present = scaler.cur_scale
        scaler.cur_scale = scale
        try:
            yield
        finally:
            scaler.cur_scale = present

    def weights_follow_masters(self) -> None:
        """Round the masters to the weights that are computed with, on all replicas; collective."""
        with torch.no_grad():
            self._optimizer.update_lp_params()

    def _adam(self, partition: FlatPartition) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.optimizer.state[partition.master]
        return state

    def _dynamic_scaler(self) -> Any:
        scaler = getattr(self._optimizer, "loss_scaler", None)  # BF16_Optimizer has none
        return scaler if scaler is not None and scaler.dynamic else None


def _host_tensors_like(group: dict[str, Tensor]) -> dict[str, Tensor]:
    # A GPU copies to pinned memory several times faster.
    return {
        kind: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for kind, tensor in group.items()
    }
