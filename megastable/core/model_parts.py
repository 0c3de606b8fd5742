"""The parts that a GPT can be made of, as far as numbers follow from them.

A run file names one kind of each. The rules of a run file, the operations, the number of weights and the memory of the
backward pass all read the record of that kind here; ``megastable.model`` has a registry of the same names that holds
the modules. To add a kind: a record and a line in its registry here, a module and a line in its registry there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SWIGLU_SIZE_MULTIPLE = 64
"""The default inner width of SwiGLU is a multiple of this, so that its matrices fill the tiles of a GPU's kernels."""


@dataclass(frozen=True)
class FeedForwardKind:
    """A kind of feed-forward layer: matrices into an inner width, one matrix out of it, biases on all or none of them.

    Attributes:
        input_projections: matrices of hidden size x inner width into the layer; a gate is one more.
        kept_per_width: elements that the layer keeps of a token for its backward pass, for each unit of inner width.
        default_inner_size: hidden size -> the inner width of a run file that gives none.
    """

    input_projections: int
    kept_per_width: int
    default_inner_size: Callable[[int], int]


@dataclass(frozen=True)
class NormKind:
    """A kind of norm. All of them have a scale as wide as what they norm.

    Attributes:
        has_bias: there is a bias of the same width beside the scale.
        fused_on_cpu: one kernel does it on a CPU, which keeps the input for the backward pass and nothing else as wide;
            separate operations keep the normed values as well.
        fused_on_gpu: the same on a GPU.
    """

    has_bias: bool
    fused_on_cpu: bool = True
    fused_on_gpu: bool = True

    @property
    def num_vectors(self) -> int:
        """Count the vectors of its width that a norm learns."""
        return 2 if self.has_bias else 1

    def keeps_normed_values(self, on_cpu: bool) -> bool:
        """Tell whether the normed values are kept beside the input for the backward pass."""
        if on_cpu:
            return not self.fused_on_cpu
        return not self.fused_on_gpu


@dataclass(frozen=True)
class PositionKind:
    """How a token learns its position.

    Attributes:
        has_table: a learned vector of hidden size for each of ``seq_length`` positions is added to the embedding.
        bias_per_head: each head adds a matrix of its own, seq_length x seq_length, to the attention scores.
        needs_even_head_dim: channels of a head are turned in pairs.
    """

    has_table: bool = False
    bias_per_head: bool = False
    needs_even_head_dim: bool = False


@dataclass(frozen=True)
class AttentionKind:
    """An attention backend.

    Attributes:
        keeps_weights: the attention weights, seq_length for each token and head, are kept for the backward pass.
        allows_logit_cap: a run file may ask for a cap of the logits, which ``CAPPED_ATTENTION`` then computes.
    """

    keeps_weights: bool
    allows_logit_cap: bool


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _gelu_inner_size(hidden_size: int) -> int:
    return 4 * hidden_size


def _swiglu_inner_size(hidden_size: int) -> int:
    # Three matrices of 8/3 the width have as many weights as two of four times the width.
    eight_thirds = -(-8 * hidden_size // 3)
    return _round_up(eight_thirds, SWIGLU_SIZE_MULTIPLE)


FEED_FORWARD_KINDS: dict[str, FeedForwardKind] = {
    # Kept are the projection, which GELU's derivative needs, and GELU's result, which is the output matrix's input.
    "gelu": FeedForwardKind(input_projections=1, kept_per_width=2, default_inner_size=_gelu_inner_size),
    "gelu_exact": FeedForwardKind(input_projections=1, kept_per_width=2, default_inner_size=_gelu_inner_size),
    # Kept are gate and linear path, the gate after SiLU, and the product of both paths.
    "swiglu": FeedForwardKind(input_projections=2, kept_per_width=4, default_inner_size=_swiglu_inner_size),
}
"""Name in a run file -> kind of feed-forward layer; the modules are in ``model.block``."""

NORM_KINDS: dict[str, NormKind] = {
    "layernorm": NormKind(has_bias=True),
    # torch has a fused RMSNorm for GPUs alone.
    "rmsnorm": NormKind(has_bias=False, fused_on_cpu=False),
}
"""Name in a run file -> kind of norm; the modules are in ``model.residual_stream``."""

POSITION_KINDS: dict[str, PositionKind] = {
    "learned": PositionKind(has_table=True),
    "rotary": PositionKind(needs_even_head_dim=True),
    "alibi": PositionKind(bias_per_head=True),
}
"""Name in a run file -> kind of position embedding; what each of them builds is in ``model.positions``."""

ATTENTION_KINDS: dict[str, AttentionKind] = {
    "auto": AttentionKind(keeps_weights=False, allows_logit_cap=True),
    # The fused kernel has no place for a cap between the product and the softmax.
    "sdpa": AttentionKind(keeps_weights=False, allows_logit_cap=False),
    "math": AttentionKind(keeps_weights=True, allows_logit_cap=True),
}
"""Name in a run file -> attention backend; the functions are in ``model.attention``."""

CAPPED_ATTENTION = "math"
"""The backend that computes attention with a cap of its logits, whichever backend the run file names."""


def executed_attention(name: str, logit_cap: float | None) -> AttentionKind:
    """Return the backend that a model runs whose run file names ``name``."""
    if logit_cap is not None:
        return ATTENTION_KINDS[CAPPED_ATTENTION]
    return ATTENTION_KINDS[name]


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model beside its sizes; its feed-forward layer stands in ``core.flops.ModelShape``."""

    positions: PositionKind
    norm: NormKind
    attention: AttentionKind
    tie_embeddings: bool
    embedding_norm: bool
    """A norm follows the embedding, as in BLOOM."""
    qk_norm: bool
    """A norm over each head's queries and keys."""
    linear_biases: bool
    """Every linear layer of a block has a bias."""
    parallel_residual: bool
    """Both halves of a block have the same input."""
