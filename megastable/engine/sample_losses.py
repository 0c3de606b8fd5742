"""The loss of each sample of a global batch, from an evaluation in which every sample is a micro-batch of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from megastable.core.batch_rampup import Batch
from megastable.core.labels import IGNORED_LABEL
from megastable.data import MicroBatch


def one_by_one(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Cut micro-batches into their samples, each with the number of its own labels that count as denominator.

    A sample without any, such as a prompt alone, has a loss of 0.
    """
    for ids, (labels, _) in micro_batches:
        for own_ids, own_labels in zip(ids.split(1), labels.split(1), strict=True):  # (1, seq) each
            yield own_ids, (own_labels, (own_labels != IGNORED_LABEL).sum().clamp(min=1).to(torch.float32))


def gathered_losses(engine: PipelineEngine, batch: Batch) -> list[float]:
    """Collect the losses of the evaluation that has just ended, in the order of the global batch; collective.

    Args:
        batch: how the samples lay in micro-batches before they were cut.
    """
    losses = torch.zeros(batch.global_batch_size, device=engine.device)
    if engine.is_last_stage() and engine.grid.get_tensor_model_parallel_rank() == 0:
        own = torch.stack([loss.float() for loss in engine.fwd_outputs]).view(-1, batch.micro_batch_size)
        # Micro-batches are dealt to the replicas in turn.
        dealt = losses.view(-1, engine.dp_world_size, batch.micro_batch_size)
        dealt[:, engine.grid.get_data_parallel_id()] = own
    dist.all_reduce(losses)
    return losses.tolist()
