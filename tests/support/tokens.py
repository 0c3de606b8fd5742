"""A made-up corpus: token samples, some with few counted labels, that need no files."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megastable.core.batch_rampup import Batch
from megastable.core.labels import IGNORED_LABEL


def sample(index: int, seq_length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Make ids and labels (seq,) of sample ``index``; every third sample counts only its first ``index % 7 + 1``."""
    generator = torch.Generator().manual_seed(1000 + index)
    # Squares of uniform numbers: frequent small ids give the model something to learn.
    tokens = (torch.rand(seq_length + 1, generator=generator) ** 2 * vocab_size).long()
    ids, labels = tokens[:-1], tokens[1:].clone()
    if index % 3 == 0:
        labels[index % 7 + 1 :] = IGNORED_LABEL
    return ids, labels


def global_batch(first: int, size: int, seq_length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Stack the samples ``first`` to ``first + size`` to ids and labels, (size, seq) each."""
    pairs = [sample(first + offset, seq_length, vocab_size) for offset in range(size)]
    return torch.stack([ids for ids, _ in pairs]), torch.stack([labels for _, labels in pairs])


def micro_batches(
    batch: Batch, first: int, replica: int, num_replicas: int, seq_length: int, vocab_size: int
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Yield one replica's micro-batches of the global batch that starts at sample ``first``."""
    ids, labels = global_batch(first, batch.global_batch_size, seq_length, vocab_size)
    denominator = (labels != IGNORED_LABEL).sum().float() / (batch.num_microbatches * num_replicas)
    for index in range(batch.num_microbatches):
        begin = (index * num_replicas + replica) * batch.micro_batch_size
        rows = slice(begin, begin + batch.micro_batch_size)
        yield ids[rows], (labels[rows], denominator)
