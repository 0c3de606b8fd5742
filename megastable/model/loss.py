"""The loss: a token mean over the whole global batch, assembled from micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from megastable.core.labels import IGNORED_LABEL

LossFunction = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


def token_mean_loss(vocab_size: int) -> LossFunction:
    """Cross-entropy in fp32 over the first ``vocab_size`` logits; what pads the vocabulary never reaches it.

    The returned function takes logits (batch, seq, padded vocabulary) and ``(labels, denominator)``: labels (batch,
    seq), and the counted tokens of the global batch divided by its number of micro-batches over all replicas. It gives
    the micro-batch's summed token losses over that denominator, so that the engine's plain mean over micro-batches and
    replicas is the token mean of the global batch, however its counted tokens are spread.
    """

    def loss(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, denominator = targets
        counted = logits[..., :vocab_size].float().flatten(0, 1)
        total = F.cross_entropy(counted, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        return total / denominator.clamp(min=torch.finfo(torch.float32).tiny)  # a batch that counts nothing gives 0

    return loss
