"""Micro-batches as a pure function of the consumed position, equal for every split over replicas and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from megastable.core.batch_rampup import Batch
from megastable.core.sample_ranges import SampleRange, next_ranges
from megastable.data.blended import Order, Samples
from megastable.data.sample_order import SampleOrder

# Torch takes seconds to import, and preparing a corpus does not need it.
if TYPE_CHECKING:
    from torch import Tensor

EVALUATION_SEED = 0
"""Not the run's, so that evaluations of two runs see the same samples."""

MicroBatch: TypeAlias = "tuple[Tensor, tuple[Tensor, Tensor]]"
"""``(input_ids int64 [mbs, S], (labels int64 [mbs, S], loss_denominator float32 []))``."""


def training_micro_batches(
    dataset: Samples,
    order: Order,
    batch: Batch,
    position: int,
    replica: int,
    num_replicas: int,
    left_out: Sequence[SampleRange] = (),
) -> Iterator[MicroBatch]:
    """Iterate over one replica's share of one step: exactly ``batch.num_microbatches`` items.

    Args:
        position: in the order, from which the step takes its samples.
        left_out: ranges of positions that are passed over.

    The loss denominator is (valid tokens of the whole global batch) / (num_microbatches * num_replicas), so the plain
    mean over micro-batches and replicas of (summed token losses / denominator) is the global batch's token mean.

    Raises:
        ValueError: the batch does not multiply out for this number of replicas.
    """
    rows_per_round = batch.micro_batch_size * num_replicas
    if rows_per_round * batch.num_microbatches != batch.global_batch_size:
        raise ValueError(f"{batch} does not multiply out over {num_replicas} replicas")
    # All replicas compute the whole step's samples, which are few, and read only their own.
    samples = samples_at(order, next_ranges(position, batch.global_batch_size, left_out))
    return _share(dataset, samples, batch.micro_batch_size, replica, num_replicas)


def has_tokens_to_learn(dataset: Samples, order: Order, ranges: Sequence[SampleRange]) -> bool:
    """Tell whether any label of the samples at these positions of the order counts; the same on every rank."""
    return any(dataset.valid_tokens(sample) > 0 for sample in samples_at(order, ranges))


def samples_at(order: Order, ranges: Sequence[SampleRange]) -> list[int]:
    """Return the samples at these positions of the order."""
    positions = np.concatenate([np.arange(first, after) for first, after in ranges])  # (samples,)
    samples: list[int] = order(positions).tolist()
    return samples


def evaluation_micro_batches(
    dataset: Samples, micro_batch_size: int, max_samples: int, replica: int, num_replicas: int
) -> Iterator[MicroBatch]:
    """Iterate over one replica's share of ``min(len(dataset), max_samples)`` samples, the same ones at every call.

    They are spread over the text. Every replica gets ``num_evaluation_micro_batches``, all full: samples without a
    counting label fill them up. The denominator follows the rule of ``training_micro_batches``. An empty dataset gives
    nothing.
    """
    num_samples = min(len(dataset), max_samples)
    if num_samples == 0:
        return iter(())
    chosen = SampleOrder(len(dataset), EVALUATION_SEED)(np.arange(num_samples)).tolist()
    # Up to a whole micro-batch on every replica: under a pipeline all of them have to run equally many.
    num_padded = -num_samples % (micro_batch_size * num_replicas)
    return _share(dataset, [*chosen, *[None] * num_padded], micro_batch_size, replica, num_replicas)


def num_evaluation_micro_batches(dataset: Samples, micro_batch_size: int, max_samples: int, num_replicas: int) -> int:
    """Count the micro-batches that each replica has in an evaluation."""
    return -(-min(len(dataset), max_samples) // (micro_batch_size * num_replicas))


def _share(
    dataset: Samples, samples: Sequence[int | None], micro_batch_size: int, replica: int, num_replicas: int
) -> Iterator[MicroBatch]:
    """Deal ``samples`` (None: padding) to the replicas, a micro-batch each in turn, and read those of ``replica``."""
    import torch

    num_dealt = len(samples) // micro_batch_size
    # Of the whole batch, also of rows that other replicas read: the denominator is the same on all of them.
    valid_tokens = sum(dataset.valid_tokens(sample) for sample in samples if sample is not None)
    for dealt in range(replica, num_dealt, num_replicas):
        own = samples[dealt * micro_batch_size : (dealt + 1) * micro_batch_size]
        rows = [dataset.padding_sample() if sample is None else dataset[sample] for sample in own]
        input_ids = torch.from_numpy(np.stack([ids for ids, _ in rows]))  # (micro-batch, seq)
        labels = torch.from_numpy(np.stack([row_labels for _, row_labels in rows]))  # (micro-batch, seq)
        # A new tensor for each item: a caller that changes one in place must not change the others.
        yield input_ids, (labels, torch.tensor(valid_tokens / num_dealt, dtype=torch.float32))
