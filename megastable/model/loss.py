"""The loss: a token mean over the global batch, assembled from micro-batches and shares of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from megastable.core.labels import IGNORED_LABEL
from megastable.model.ends import HeadInput
from megastable.model.tensor_parallel import TensorGroup

LossFunction = Callable[[Tensor | HeadInput, tuple[Tensor, Tensor]], Tensor]


def token_mean_loss(
    vocab_size: int, tensor: TensorGroup, z_loss: float = 0.0, chunk_tokens: int | None = None
) -> LossFunction:
    """Make the cross-entropy in fp32 over the first ``vocab_size`` logits; what pads the vocabulary never reaches it.

    The returned function takes logits (batch, seq, the rank's share of the padded vocabulary) and ``(labels,
    denominator)``: labels (batch, seq), and the counted tokens of the global batch divided by its number of
    micro-batches over all replicas. It gives the micro-batch's summed token losses over that denominator, so that the
    engine's plain mean over micro-batches and replicas is the token mean of the global batch, however its counted
    tokens are spread.

    Args:
        z_loss: weight of the squared log-normaliser of every counted token (PaLM, Chowdhery et al., arXiv 2204.02311,
            section 5). Its gradient is added; the value stays the plain cross-entropy, so that it can be compared with
            an evaluation and with ln(vocabulary).
        chunk_tokens: with a head that hands on a ``HeadInput``, the logits of so many tokens of a micro-batch are made
            at a time, and once more in the backward pass.
    """

    def total_of(logits: Tensor, labels: Tensor) -> Tensor:
        return token_losses(logits, labels, vocab_size, tensor, z_loss).sum()

    def loss(output: Tensor | HeadInput, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, denominator = targets
        if chunk_tokens is None:
            assert isinstance(output, Tensor)
            total = total_of(output, labels)
        else:
            assert isinstance(output, HeadInput)
            total = _total_by_chunks(output, labels, tensor, chunk_tokens, total_of)
        # A global batch that counts no token would be 0 / 0; over the least number its loss and its gradient are 0.
        return total / denominator.clamp(min=torch.finfo(torch.float32).tiny)

    return loss


def _total_by_chunks(
    output: HeadInput,
    labels: Tensor,
    tensor: TensorGroup,
    chunk_tokens: int,
    total_of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Sum ``total_of`` over chunks, whose logits are not kept but made again in the backward pass.

    Under sequence parallelism a chunk has tokens from every rank's slice, which the head gathers, slice after slice.
    """
    slices = tensor.size if tensor.sequence_parallel else 1
    own = max(1, chunk_tokens // slices)
    # Samples are joined to one long sequence, so that a chunk may span them.
    hidden = output.hidden.flatten(0, 1).unsqueeze(0)  # (1, batch * slice, hidden)
    by_slice = labels.unflatten(1, (slices, -1)).movedim(1, 0).flatten(1)  # (slices, batch * slice)

    def total_of_chunk(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return total_of(output.logits_of(hidden, weight), labels)

    totals = []
    for part, part_labels in zip(hidden.split(own, dim=1), by_slice.split(own, dim=1), strict=True):
        arguments = (part, output.weight, part_labels.flatten().unsqueeze(0))  # labels: (1, slices * own)
        # The random state is not kept: neither head nor loss draws anything.
        totals.append(checkpoint(total_of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.stack(totals).sum()


def token_losses(logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup, z_loss: float = 0.0) -> Tensor:
    """Compute the cross-entropy of every token, (batch, seq) in fp32; 0 where the label is ignored.

    Ranks send each other three numbers a token; the logits stay where they are.

    Args:
        logits: (batch, seq, share of the padded vocabulary).
        labels: (batch, seq), of the whole vocabulary.
        z_loss: as in ``token_mean_loss``.
    """
    result: Tensor = _VocabularyCrossEntropy.apply(logits, labels, vocab_size, tensor, z_loss)
    return result


class _VocabularyCrossEntropy(Function):
    """The cross-entropy of a vocabulary that is split over the ranks.

    Three numbers a token travel between them: its largest logit, its sum of exponentials, its label's logit.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tensor: TensorGroup, z_loss: float
    ) -> Tensor:
        share = logits.shape[-1]
        start = tensor.rank * share
        # One fp32 copy, (batch, seq, share), is worked on in place: logits are the largest tensors of a step.
        shifted = logits.to(torch.float32, copy=True)
        shifted[..., max(0, vocab_size - start) :] = -torch.inf  # the padding of the vocabulary
        largest = shifted.amax(dim=-1)  # (batch, seq)
        tensor.all_reduce_max(largest)
        shifted -= largest.unsqueeze(-1)  # no exponential overflows

        # The label's logit is on one rank; the others add 0 to it.
        position = labels - start
        held = (labels != IGNORED_LABEL) & (position >= 0) & (position < share)  # (batch, seq)
        position = position.masked_fill(~held, 0).unsqueeze(-1)  # (batch, seq, 1)
        label_logit = shifted.gather(-1, position).squeeze(-1).masked_fill(~held, 0.0)  # (batch, seq)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), label_logit])  # (2, batch, seq): one message
        tensor.start_all_reduce(sums).wait()
        normalizer, label_logit = sums

        probabilities = exponentials.div_(normalizer.unsqueeze(-1))
        log_normalizer = normalizer.log() + largest
        ctx.save_for_backward(probabilities, position, held, labels, log_normalizer)
        ctx.dtype = logits.dtype
        ctx.z_loss = z_loss
        return (normalizer.log() - label_logit).masked_fill(labels == IGNORED_LABEL, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, position, held, labels, log_normalizer = ctx.saved_tensors
        of_token = gradients[0].masked_fill(labels == IGNORED_LABEL, 0.0).unsqueeze(-1)  # (batch, seq, 1)
        # The cross-entropy gives p - 1 at the label and p elsewhere. The z-loss, z * log_normalizer^2, adds
        # 2 z log_normalizer p everywhere.
        gradient = probabilities * (of_token * (1.0 + 2.0 * ctx.z_loss * log_normalizer.unsqueeze(-1)))
        gradient.scatter_add_(-1, position, -of_token.masked_fill(~held.unsqueeze(-1), 0.0))
        return gradient.to(ctx.dtype), None, None, None, None
