"""Drawing the weights: the same numbers under any layout."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from megastable.config import RunConfig
from megastable.core.init_std import INIT_SCHEMES, residual_output_std
from megastable.model.ends import VocabularyEmbedding
from megastable.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, Shard


def draw_weights(module: nn.Module, layer_index: int, run: RunConfig) -> None:
    """Draw all weights of one layer of the flat list, in place.

    Every weight has its own random stream, seeded by (seed, global layer index, parameter name), and is drawn in full
    before a tensor rank keeps its part, one weight at a time. So the numbers do not depend on the layout, nor on which
    process builds the layer and in which order. Matrices are normal with the scheme's std, the two projections into the
    residual stream with the smaller one, biases 0, norms 1.
    """
    init, num_layers = run.megastable.init, run.megastable.model.num_layers
    std = INIT_SCHEMES[init.scheme](run.megastable.model.hidden_size, init.std)
    residual_std = residual_output_std(std, num_layers) if init.residual_scaling else std
    for name, child in module.named_modules():
        if not isinstance(child, ColumnParallelLinear | RowParallelLinear | VocabularyEmbedding | nn.Embedding):
            continue
        writes_residual = isinstance(child, RowParallelLinear)
        generator = torch.Generator().manual_seed(weight_seed(run.megastable.training.seed, layer_index, name))
        shard: Shard | None = getattr(child, "shard", None)
        full = torch.empty(shard.full_shape if shard else child.weight.shape)
        full.normal_(0.0, residual_std if writes_residual else std, generator=generator)
        with torch.no_grad():
            child.weight.copy_(shard.of(full) if shard else full)


def weight_seed(seed: int, layer_index: int, name: str) -> int:
    """A 63-bit seed that depends on all three; stable across processes, machines and Python versions."""
    digest = hashlib.blake2b(f"{seed}/{layer_index}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
