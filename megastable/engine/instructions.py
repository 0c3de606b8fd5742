"""The one table of what this rank executes in a step and in an evaluation, and those functions of it that are ours.

DeepSpeed's schedules say in which order a stage executes its instructions; what an instruction does is looked up in the
map ``_INSTRUCTION_MAP`` of the engine. ``instruction_table`` builds that map whole, one row for every kind of
instruction, ``install_instructions`` assigns it, and ``executed_instead`` alone replaces it, for a while. What a row
executes is composed there, in the order in which it has to run, so that nothing depends on who wrapped whom first.

The table is data: it says nothing of the order of instructions. An executor with orders of its own takes the same rows,
and for a kind that DeepSpeed does not have, such as half of a backward pass, one row more.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from megastable.engine.progress import Progress

Kind = type[schedule.PipeInstruction]
Execute = Callable[..., None]
"""Takes the engine, then the keywords of the instruction: ``buffer_id``, or nothing."""


@dataclass(frozen=True)
class Instruction:
    """A row of the table.

    Attributes:
        kind: the class by which a schedule names the instruction.
        upstream: DeepSpeed's own function; None for a kind that DeepSpeed does not have.
        ours: what is executed; ``upstream`` itself where nothing is changed.
        why: the reason, in a few words; ``departures`` has the whole story of what is changed.
    """

    kind: type[schedule.PipeInstruction]
    upstream: Execute | None
    ours: Execute
    why: str


class BusyTime:
    """Adds up, while ``enabled``, the seconds of this rank's passes, which shows who keeps the others waiting.

    The device is waited for before and after a timed pass, so this slows down the steps in which it is enabled.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.seconds = 0.0

    def clear(self) -> None:
        """Forget the last step."""
        self.seconds = 0.0

    def timed(self, execute: Execute) -> Execute:
        """Return ``execute`` with its time added to ``seconds`` while this object is enabled."""

        def timed(engine: PipelineEngine, buffer_id: int) -> None:
            if not self.enabled:
                execute(engine, buffer_id)
                return
            get_accelerator().synchronize()
            started = time.perf_counter()
            execute(engine, buffer_id)
            get_accelerator().synchronize()
            self.seconds += time.perf_counter() - started

        return timed


def instruction_table(
    partial: list[nn.Parameter], busy: BusyTime, forward: Execute | None = None
) -> tuple[Instruction, ...]:
    """Build the table of one rank.

    Args:
        partial: the parameters whose gradient on a tensor rank is only a part, see ``tensor_group.partial_parameters``.
        busy: measures the forward and backward passes.
        forward: what a forward pass executes; None for ``forward_pass``.
    """
    stock = PipelineEngine
    return (
        Instruction(
            schedule.LoadMicroBatch, stock._exec_load_micro_batch, stock._exec_load_micro_batch, why="as DeepSpeed does"
        ),
        Instruction(
            schedule.RecvActivation, stock._exec_recv_activations, receive_activation,
            why="an activation is received where it stays, not copied twice",
        ),
        Instruction(
            schedule.ForwardPass, stock._exec_forward_pass, busy.timed(forward or forward_pass),
            why="the input is not copied and logits do not outlive their loss; timed in a watched step",
        ),
        Instruction(
            schedule.SendActivation, stock._exec_send_activations, stock._exec_send_activations, why="as DeepSpeed does"
        ),
        Instruction(schedule.RecvGrad, stock._exec_recv_grads, stock._exec_recv_grads, why="as DeepSpeed does"),
        Instruction(
            schedule.BackwardPass, stock._exec_backward_pass, busy.timed(stock._exec_backward_pass),
            why="timed in a watched step",
        ),
        Instruction(schedule.SendGrad, stock._exec_send_grads, stock._exec_send_grads, why="as DeepSpeed does"),
        # Both sums have to be there before the replicas are averaged. They are of different parameters, but each is a
        # collective, so all ranks have to take them in the same order.
        Instruction(
            schedule.ReduceTiedGrads, stock._exec_reduce_tied_grads,
            in_turn(partial_gradients_summed(partial), reduce_tied_gradients),
            why="partial gradients are summed over tensor ranks, tied ones wherever this precision accumulates them",
        ),
        Instruction(
            schedule.ReduceGrads, stock._exec_reduce_grads, reduce_gradients,
            why="left out on one replica, where it would only copy",
        ),
        Instruction(
            schedule.OptimizerStep, stock._exec_optimizer_step, stock._exec_optimizer_step,
            why="as DeepSpeed does; the optimizer.step that it calls is that of weight_update",
        ),
    )  # fmt: skip


def install_instructions(engine: PipelineEngine, table: Sequence[Instruction]) -> None:
    """Make ``table`` the map of this engine; DeepSpeed's class keeps its own.

    Raises:
        ValueError: the table does not name every instruction of DeepSpeed's map once, with DeepSpeed's function, or
            names a function of DeepSpeed's for another instruction. Every instruction at fault is named.
    """
    stock = type(engine)._INSTRUCTION_MAP
    rows = Counter(row.kind for row in table)
    faults = [f"{kind.__name__} is missing" for kind in stock if kind not in rows]
    faults += [f"{kind.__name__} stands there {count} times" for kind, count in rows.items() if count > 1]
    faults += [
        f"{row.kind.__name__} is not executed by {getattr(row.upstream, '__qualname__', 'nothing')} in DeepSpeed"
        for row in table
        if stock.get(row.kind) is not row.upstream
    ]
    if faults:
        raise ValueError(f"the table of instructions and DeepSpeed's map differ: {'; '.join(faults)}")
    engine._INSTRUCTION_MAP = {row.kind: row.ours for row in table}


@contextlib.contextmanager
def executed_instead(
    engine: PipelineEngine, changed: Callable[[Mapping[Kind, Execute]], Mapping[Kind, Execute]]
) -> Iterator[None]:
    """Let the engine execute other functions for some kinds of instructions for a while.

    Args:
        changed: returns them, given what is executed otherwise.
    """
    table = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {**table, **changed(table)}
    try:
        yield
    finally:
        engine._INSTRUCTION_MAP = table


def marking_progress(table: Sequence[Instruction], progress: Progress) -> tuple[Instruction, ...]:
    """Return ``table`` with every instruction noted as progress before it is executed."""

    def marking(row: Instruction) -> Execute:
        def execute(engine: PipelineEngine, **keywords: int) -> None:
            progress.mark(row.kind.__name__)
            row.ours(engine, **keywords)

        return execute

    return tuple(replace(row, ours=marking(row)) for row in table)


def in_turn(*parts: Execute) -> Execute:
    """Return a function that executes ``parts`` one after the other."""

    def execute(engine: PipelineEngine) -> None:
        for part in parts:
            part(engine)

    return execute


# Activations


def receive_activation(engine: PipelineEngine, buffer_id: int) -> None:
    """Receive the activation of a micro-batch, (batch, seq, hidden), into a tensor that becomes the stage's input."""
    if engine.pipe_recv_buf is None:
        # The sender announces shape and format before the first activation, and again after a change of shape.
        # DeepSpeed keeps them as a buffer to receive into; a tensor on the meta device remembers them without memory.
        engine.pipe_recv_buf = engine._recv_tensor_meta(engine.prev_stage).to("meta")
    received = torch.empty_like(engine.pipe_recv_buf, device=engine.device)
    p2p.recv(received, engine.prev_stage)
    # The backward pass leaves the gradient for the stage before in ``grad`` of this leaf.
    engine.pipe_buffers["inputs"][buffer_id] = received.requires_grad_()


def forward_pass(engine: PipelineEngine, buffer_id: int) -> None:
    """Run the stage on a micro-batch and keep its output; the last stage computes the loss and keeps nothing else.

    What passes between our layers is a single tensor that no layer writes into, so the input need not be copied.
    """
    # The forward of DeepSpeedEngine: that of PipelineEngine only refuses to be called.
    outputs = super(PipelineEngine, engine).forward(engine.pipe_buffers["inputs"][buffer_id])
    if not engine.is_last_stage():
        engine.pipe_buffers["outputs"][buffer_id] = outputs  # (batch, seq, hidden), until its backward pass
        return
    # The backward pass of the last stage starts from ``engine.loss``. Logits in a buffer would live on until another
    # micro-batch takes the buffer; here they are freed with the graph of the loss.
    engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id])
    loss = engine.loss.detach()
    engine.fwd_outputs.append(loss)  # read by an evaluation
    engine.total_loss = loss.clone() if engine.total_loss is None else engine.total_loss + loss


# Sums of gradients over other ranks


def partial_gradients_summed(parameters: list[nn.Parameter]) -> Execute:
    """Return a function that sums the gradients of ``parameters`` over the tensor ranks; it does nothing without any.

    Each tensor rank saw only its slice of the sequence, or its heads; without the sum their copies of a whole parameter
    would drift apart without an error.
    """

    def execute(engine: PipelineEngine) -> None:
        found = [accumulated_gradient(parameter) for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            return
        # They are many and small, so they travel as one tensor.
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=engine.grid.get_slice_parallel_group())
        sums = together.split([gradient.numel() for gradient in gradients])
        for gradient, summed in zip(gradients, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))

    return execute


def reduce_tied_gradients(engine: PipelineEngine) -> None:
    """Sum the gradients of tied weights over the stages that hold a copy."""
    for weight, group in engine.module.get_tied_weights_and_groups():
        gradient = accumulated_gradient(weight)
        if gradient is not None:
            dist.all_reduce(gradient, group=group)


def reduce_gradients(engine: PipelineEngine) -> None:
    """Average the gradients over the replicas, where there are several."""
    if has_several_replicas(engine):
        PipelineEngine._exec_reduce_grads(engine)


def has_several_replicas(engine: PipelineEngine) -> bool:
    """Tell whether gradients are reduced over replicas; of a single one they stay where the backward pass put them."""
    return bool(engine.dp_world_size > 1)


def accumulated_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient summed over the micro-batches so far, or None for a parameter that took no part.

    Where it is depends on the precision: BF16_Optimizer keeps it in ``_hp_grad``, ZeRO's optimizer in ``grad_accum`` if
    it accumulates in another format than that of the weights, and otherwise it is the parameter's ``grad``.
    """
    for name in ("_hp_grad", "grad_accum", "grad"):
        gradient: Tensor | None = getattr(parameter, name, None)
        if gradient is not None:
            return gradient
    return None
