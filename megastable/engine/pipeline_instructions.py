"""Receiving and passing forward as DeepSpeed does, without the copies that it makes on the way.

DeepSpeed receives into one buffer, copies it to keep it, and copies that to compute with; the last stage keeps the
logits of two micro-batches until others take their place. What passes between our layers is a single tensor that no
layer writes into, so each activation is received where it stays, and logits are gone with the loss.
"""

from __future__ import annotations

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine


def move_activations_once(engine: PipelineEngine) -> None:
    """Replace the two instructions of this engine."""
    engine._INSTRUCTION_MAP = {
        **engine._INSTRUCTION_MAP,
        schedule.RecvActivation: receive_activation,
        schedule.ForwardPass: forward_pass,
    }


def receive_activation(engine: PipelineEngine, buffer_id: int) -> None:
    """Receive into a tensor of its own."""
    if engine.pipe_recv_buf is None:  # the sender tells the shape once, and again when it has changed
        engine.pipe_recv_buf = engine._recv_tensor_meta(engine.prev_stage).to("meta")
    received = torch.empty_like(engine.pipe_recv_buf, device=engine.device)
    p2p.recv(received, engine.prev_stage)
    engine.pipe_buffers["inputs"][buffer_id] = received.requires_grad_()


def forward_pass(engine: PipelineEngine, buffer_id: int) -> None:
    """Run the stage on a micro-batch; on the last stage also the loss."""
    outputs = super(PipelineEngine, engine).forward(engine.pipe_buffers["inputs"][buffer_id])
    if not engine.module.training:
        checkpointing.reset()
    if not engine.is_last_stage():
        engine.pipe_buffers["outputs"][buffer_id] = outputs
        return
    engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id])
    loss = engine.loss.detach()
    engine.fwd_outputs.append(loss)
    engine.total_loss = loss.clone() if engine.total_loss is None else engine.total_loss + loss
