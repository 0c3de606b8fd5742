"""What training should do, in plain torch on one process: no pipeline, no micro-batches, no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import PipelineConfig, RunConfig, TensorParallelConfig
from megastable.core.labels import IGNORED_LABEL
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess, TensorGroup
from megastable.planning.run_plan import RunPlan
from tests.support.tokens import global_batch


class ReferenceModel(nn.Module):
    """The flat list of layers, called one after the other in one process."""

    def __init__(self, run: RunConfig, tensor: TensorGroup | None = None) -> None:
        super().__init__()
        self.modules_by_key: dict[str, nn.Module] = {}
        self.forwards = []
        for index, layer in enumerate(gpt_layers(run, tensor or OneProcess())):
            key = layer.tied_key or str(index)
            if key not in self.modules_by_key:
                self.modules_by_key[key] = layer.build(run)
                self.add_module(key, self.modules_by_key[key])
            module = self.modules_by_key[key]
            self.forwards.append((layer.forward, module))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Compute logits (batch, seq, padded vocabulary) from token ids (batch, seq)."""
        x: Any = token_ids
        for forward, module in self.forwards:
            x = module(x) if forward is None else forward(module, x)
        return x


@dataclass
class ReferenceStep:
    """Loss and unclipped gradient norm of a step."""

    loss: float
    grad_norm: float


def train_reference(run: RunConfig, num_steps: int) -> tuple[list[ReferenceStep], ReferenceModel]:
    """Train in fp32 on whole global batches."""
    run = run.model_copy(update={"megastable": _plain(run)})
    plan = RunPlan.of(run, world_size=1)
    model = ReferenceModel(run)
    optimizer = reference_optimizer(model, run)
    size, steps, consumed = run.megastable.model, [], 0
    for _ in range(num_steps):
        batch = plan.ramp.at(consumed)
        ids, labels = global_batch(consumed, batch.global_batch_size, size.seq_length, size.vocab_size)
        logits = model(ids)[..., : size.vocab_size]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # a mean over the counted labels
        optimizer.zero_grad()
        with_z_loss(loss, logits, labels, run).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate(consumed, batch)
        optimizer.step()
        steps.append(ReferenceStep(loss.item(), norm.item()))
        consumed += batch.global_batch_size
    return steps, model


def with_z_loss(loss: Tensor, logits: Tensor, labels: Tensor, run: RunConfig) -> Tensor:
    """Add the z-loss where the run has one: the gradient is that of the sum."""
    if not run.megastable.training.z_loss:
        return loss
    normaliser = logits.logsumexp(-1)[labels != IGNORED_LABEL]
    return loss + run.megastable.training.z_loss * (normaliser**2).mean()


def reference_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """Build an AdamW that decays matrices only."""
    params = run.optimizer.params
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": params.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=params.lr, betas=params.betas, eps=params.eps,
    )  # fmt: skip


def _plain(run: RunConfig) -> object:
    """Return the settings with one stage, one tensor rank, all logits at once, and nothing computed again."""
    training = run.megastable.training.model_copy(update={"loss_chunk_tokens": None})
    sections = {"pipeline": PipelineConfig(), "tensor_parallel": TensorParallelConfig(), "training": training}
    return run.megastable.model_copy(update=sections)
