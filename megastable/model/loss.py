"""The loss: a token mean over the global batch, assembled from micro-batches and shares of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megastable.core.labels import IGNORED_LABEL
from megastable.model.tensor_parallel import TensorGroup

LossFunction = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


def token_mean_loss(vocab_size: int, tensor: TensorGroup, z_loss: float = 0.0) -> LossFunction:
    """Cross-entropy in fp32 over the first ``vocab_size`` logits; what pads the vocabulary never reaches it.

    The returned function takes logits (batch, seq, the rank's share of the padded vocabulary) and ``(labels,
    denominator)``: labels (batch, seq), and the counted tokens of the global batch divided by its number of
    micro-batches over all replicas. It gives the micro-batch's summed token losses over that denominator, so that the
    engine's plain mean over micro-batches and replicas is the token mean of the global batch, however its counted
    tokens are spread.

    Args:
        z_loss: weight of the squared log-normaliser of every counted token (PaLM, Chowdhery et al., arXiv 2204.02311,
            section 5). Its gradient is added; the value stays the plain cross-entropy, so that it can be compared with
            an evaluation and with ln(vocabulary).
    """

    def loss(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, denominator = targets
        total: Tensor = token_losses(logits, labels, vocab_size, tensor, z_loss).sum()
        return total / denominator.clamp(min=torch.finfo(torch.float32).tiny)  # a batch that counts nothing gives 0

    return loss


def token_losses(logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup, z_loss: float = 0.0) -> Tensor:
    """Cross-entropy of every token, (batch, seq) in fp32; 0 where the label is ignored. The logits stay where they are.

    Args:
        logits: (batch, seq, share of the padded vocabulary).
        labels: (batch, seq), of the whole vocabulary.
        z_loss: as in ``token_mean_loss``.
    """
    result: Tensor = _VocabularyCrossEntropy.apply(logits, labels, vocab_size, tensor, z_loss)
    return result


class _VocabularyCrossEntropy(Function):
    """Three numbers a token travel between the ranks: its largest logit, its sum of exponentials, its label's logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup, z_loss: float
    ) -> Tensor:
        share = logits.shape[-1]
        start = tensor.rank * share
        shifted = logits.to(torch.float32, copy=True)
        shifted[..., max(0, vocab_size - start) :] = -torch.inf
        largest = shifted.amax(dim=-1)
        tensor.all_reduce_max(largest)
        shifted -= largest.unsqueeze(-1)

        position = labels - start
        held = (labels != IGNORED_LABEL) & (position >= 0) & (position < share)
        position = position.masked_fill(~held, 0).unsqueeze(-1)
        label_logit = shifted.gather(-1, position).squeeze(-1).masked_fill(~held, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), label_logit])
        tensor.start_all_reduce(sums).wait()
        normalizer, label_logit = sums

        probabilities = exponentials.div_(normalizer.unsqueeze(-1))
        log_normalizer = normalizer.log() + largest
        ctx.save_for_backward(probabilities, position, held, labels, log_normalizer)
        ctx.dtype, ctx.z_loss = logits.dtype, z_loss
        return (normalizer.log() - label_logit).masked_fill(labels == IGNORED_LABEL, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, position, held, labels, log_normalizer = ctx.saved_tensors
        of_token = gradients[0].masked_fill(labels == IGNORED_LABEL, 0.0).unsqueeze(-1)
        gradient = probabilities * (of_token * (1.0 + 2.0 * ctx.z_loss * log_normalizer.unsqueeze(-1)))
        gradient.scatter_add_(-1, position, -of_token.masked_fill(~held.unsqueeze(-1), 0.0))
        return gradient.to(ctx.dtype), None, None, None, None
