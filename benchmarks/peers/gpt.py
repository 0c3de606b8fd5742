"""The one model of all candidates: megastable's own layers, with the same weights, and the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import RunConfig, run_from_dict
from megastable.data import MicroBatch
from megastable.model.layers import gpt_layers
from megastable.model.loss import LossFunction, token_mean_loss
from megastable.model.products import is_emulated
from megastable.model.tensor_parallel import ColumnParallelLinear, OneProcess, RowParallelLinear

NUM_STAGES = 2
VOCAB_SIZE = 2048
HEAD_DIM = 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """What every candidate trains; the sizes of the model, and the number format of weights and gradients."""

    layers: int
    hidden: int
    seq_length: int
    micro_batch_size: int
    precision: str
    learning_rate: float

    def run(self, num_micro_batches: int = 1, fused: bool = True) -> RunConfig:
        """Build the run file of megastable. Clipping and decay are on; ZeRO stage 1 is the default.

        The head is not tied to the embedding, because torch's pipelining has no tied weights.
        """
        adamw = {"lr": self.learning_rate, "weight_decay": 0.1, "fused": fused}
        return run_from_dict(
            {
                "train_micro_batch_size_per_gpu": self.micro_batch_size,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": self.precision == "bf16"},
                "optimizer": {"type": "AdamW", "params": adamw},
                "megastable": {
                    "model": {
                        "num_layers": self.layers, "hidden_size": self.hidden, "seq_length": self.seq_length,
                        "num_attention_heads": max(1, self.hidden // HEAD_DIM), "vocab_size": VOCAB_SIZE,
                        "tie_embeddings": False,
                    },
                    "pipeline": {"num_stages": NUM_STAGES},
                    "batch_rampup": {"final": num_micro_batches * self.micro_batch_size},
                    "lr_schedule": {"type": "constant"},
                    "data": {"source": {"type": "stdlib"}},
                    "training": {"total_steps": 1000},
                },
            }
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        """Return the format of weights, activations and gradients."""
        return DTYPES[self.precision]


@dataclass(frozen=True)
class GlobalBatch:
    """The tokens of one step, the same on every rank: ids and labels (global batch, seq)."""

    ids: Tensor
    labels: Tensor
    micro_batch_size: int

    @property
    def num_micro_batches(self) -> int:
        """Count the micro-batches that the global batch is cut into."""
        return len(self.ids) // self.micro_batch_size

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches, with denominators that make their mean the token mean of the global batch."""
        denominator = torch.tensor(self.labels.numel() / self.num_micro_batches)
        pieces = zip(self.ids.split(self.micro_batch_size), self.labels.split(self.micro_batch_size), strict=True)
        for ids, labels in pieces:
            yield ids, (labels, denominator)


def draw_batch(settings: Settings, size: int, seed: int) -> GlobalBatch:
    """Draw ``size`` samples."""
    generator = torch.Generator().manual_seed(seed)
    # Squares of uniform numbers: frequent small ids give the model something to learn.
    tokens = (torch.rand(size, settings.seq_length + 1, generator=generator) ** 2 * VOCAB_SIZE).long()
    return GlobalBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), settings.micro_batch_size)


def loss_function() -> LossFunction:
    """Make megastable's own loss, which computes in fp32."""
    return token_mean_loss(VOCAB_SIZE, OneProcess())


def build_layers(settings: Settings, start: int, stop: int, splits_backward: bool = False) -> nn.Sequential:
    """Build layers ``start`` to ``stop`` of the flat list for plain torch, with the weights that megastable draws.

    Args:
        splits_backward: the schedule computes the gradients of inputs and of weights at different times. megastable's
            linear layers compute both in one autograd function, which such a schedule would run twice, so they get the
            same products as separate nodes.
    """
    run = settings.run()
    module = nn.Sequential(*(layer.build(run) for layer in gpt_layers(run, OneProcess())[start:stop]))
    for child in module.modules():
        if splits_backward and isinstance(child, ColumnParallelLinear | RowParallelLinear):
            separate = functools.partial(separate_linear, weight=child.weight, bias=child.bias)
            child.forward = separate  # type: ignore[method-assign]  # of this one module, not of its class
    return module.to(settings.dtype)


def separate_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply as a linear layer whose two gradients are two nodes; in fp32 where megastable's own products are."""
    if not is_emulated(x.device.type, x.dtype):
        return F.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
