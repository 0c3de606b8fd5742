"""Draws the weights, the same numbers under any layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from megastable.config import RunConfig
from megastable.core.init_std import INIT_SCHEMES, MatrixSize, residual_output_std
from megastable.model.ends import OutputHead, VocabularyEmbedding
from megastable.model.pieces import cut
from megastable.model.tensor_parallel import RowParallelLinear, SplitLayer


def draw_weights(module: nn.Module, layer_index: int, run: RunConfig) -> None:
    """Draw all weights of one layer of the flat list, in place.

    Every weight has its own random stream, seeded by (seed, global layer index, parameter name), and is drawn in full
    before a tensor rank keeps its part, one weight at a time. So the numbers do not depend on the layout, nor on which
    process builds the layer and in which order. Matrices are normal with the scheme's std, the two projections into the
    residual stream with the smaller one, biases 0, norms 1.
    """
    for name, child in drawn_modules(module):
        generator = torch.Generator().manual_seed(weight_seed(run.megastable.training.seed, layer_index, name))
        full = torch.empty(full_shape(child)).normal_(0.0, formula_std(module, child, run), generator=generator)
        with torch.no_grad():
            if isinstance(child, nn.Embedding):  # whole on every tensor rank
                child.weight.copy_(full)
            else:
                child.weight.copy_(cut(full, child.shard))


DrawnModule = SplitLayer | nn.Embedding


def drawn_modules(layer: nn.Module) -> Iterator[tuple[str, DrawnModule]]:
    """Yield the modules of a layer whose weight is a drawn matrix, by name."""
    for name, child in layer.named_modules():
        if isinstance(child, DrawnModule):
            yield name, child


def full_shape(module: DrawnModule) -> tuple[int, ...]:
    """Return (out, in) of the whole matrix, over all tensor ranks."""
    if isinstance(module, nn.Embedding):
        return tuple(module.weight.shape)
    return module.shard.full_shape


def formula_std(layer: nn.Module, module: DrawnModule, run: RunConfig) -> float:
    """Compute the std with which the matrix of ``module``, a part of ``layer``, is drawn."""
    init = run.megastable.init
    model = run.megastable.model
    if isinstance(module, VocabularyEmbedding) and init.embedding_std is not None:
        return init.embedding_std
    if isinstance(layer, OutputHead) and init.head_std is not None:
        return init.head_std
    fan_out, fan_in = full_shape(module)
    std = INIT_SCHEMES[init.scheme](MatrixSize(fan_in, fan_out, model.hidden_size), init.std)
    # The row-parallel layers are the outputs of the two halves, which are added to the residual stream.
    if init.residual_scaling and isinstance(module, RowParallelLinear):
        return residual_output_std(std, model.num_layers)
    return std


def measured_moments(module: DrawnModule) -> tuple[int, float, float]:
    """Return number, sum and sum of squares of this rank's part of the matrix; over the ranks they add up."""
    weight = module.weight.detach()
    norm = torch.linalg.vector_norm(weight, dtype=torch.float64)
    # Rows that pad the vocabulary are zero and were not drawn.
    drawn = weight.numel() if isinstance(module, nn.Embedding) else module.shard.num_elements
    return drawn, float(weight.sum(dtype=torch.float64)), float(norm) ** 2


def weight_seed(seed: int, layer_index: int, name: str) -> int:
    """Derive a 63-bit seed from all three, the same on every process, machine and Python version."""
    # Python's own hash of a text differs from process to process.
    digest = hashlib.blake2b(f"{seed}/{layer_index}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are signed
