"""How a token learns its position: the kinds of position embedding, their rotations and their attention biases.

A kind is one object, which is built once per process and shared by all blocks. Rotations and biases are no buffers of a
module: a model that is cast to 16 bits would round its buffers, and rotations are not to be rounded. (The fused
attention kernel takes the bias in the format of its inputs: bf16 rounds an ALiBi penalty to 8 bits, which falls where
it is large.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megastable.config import ModelConfig
from megastable.model.documents import Documents, DocumentScope
from megastable.model.tensor_parallel import TensorGroup


class PositionEmbedding:
    """The places of the model where a kind of position embedding can act; a kind overrides those where it does.

    Attributes:
        bias: what every block adds to its attention scores. A kind without a bias of its own has the causal mask alone.
        documents: those of the packed micro-batch that is read, at which positions and attention begin anew.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        self.bias = AttentionBias()
        self.documents = DocumentScope()

    def attention_bias(self) -> AttentionBias | DocumentBias:
        """Return what a block adds to the scores of the micro-batch that is read."""
        documents = self.documents.current
        return self.bias if documents is None else DocumentBias(self.bias, documents)

    def make_table(self) -> nn.Embedding | None:
        """Allocate the vectors that are added to the embeddings, (seq_length, hidden), if the kind has any."""
        return None

    def rotate(self, x: Tensor) -> Tensor:
        """Turn queries or keys (batch, heads, seq, head_dim) by their positions, if the kind does."""
        return x


class LearnedPositions(PositionEmbedding):
    """A learned vector for every position, added to the embedding, as in GPT-2."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        self._seq_length = config.seq_length
        self._hidden_size = config.hidden_size

    def make_table(self) -> nn.Embedding:
        """Allocate one vector a position, (seq_length, hidden)."""
        return nn.Embedding(self._seq_length, self._hidden_size)


class RotaryPositions(PositionEmbedding):
    """Queries and keys are turned by angles that grow with the position, so that scores depend on distances.

    Only the first channels of a head are turned where the run file asks for a share of them, as in GPT-NeoX.
    """

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        self._size = config.rotary_size
        self._table = RotaryTable(self._size, config.rotary_base)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn queries or keys (batch, heads, seq, head_dim) by their positions."""
        documents = self.documents.current
        if self._size == x.shape[-1]:
            return self._table.rotate(x, documents)
        turned, left = x.tensor_split([self._size], dim=-1)
        return torch.cat((self._table.rotate(turned, documents), left), dim=-1)


class AlibiPositions(PositionEmbedding):
    """Attention scores are lowered by the distance between query and key, times a slope of each head."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__(config, tensor)
        # The slopes are those of all heads, of which a tensor rank has a consecutive share.
        by_rank = alibi_slopes(config.num_attention_heads).view(tensor.size, -1)
        self.bias = AttentionBias(by_rank[tensor.rank])


POSITION_EMBEDDINGS: dict[str, Callable[[ModelConfig, TensorGroup], PositionEmbedding]] = {
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
    "alibi": AlibiPositions,
}
"""Name in a run file -> what is built; ``core.model_parts.POSITION_KINDS`` has the numbers of the same names."""


class RotaryTable:
    """Cosines and sines of rotary positions (Su et al., arXiv 2104.09864, equation 34), half-split as in GPT-NeoX."""

    def __init__(self, head_dim: int, base: float) -> None:
        self._inverse_frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Rotate ``x`` (batch, heads, seq, head_dim) by its position along seq; computed in fp32, dtype kept.

        Args:
            documents: in which positions count; None for those in the sample.
        """
        cos, sin = self._table(x.shape[-2], x.device)  # (seq, head_dim / 2) each
        if documents is not None:
            places = documents.positions
            # (batch, 1, seq, head_dim / 2) each
            cos, sin = documents.once(self, lambda: (cos[places].unsqueeze(1), sin[places].unsqueeze(1)))
        # Half-split: channel i and channel i + head_dim / 2 are the pair that is turned.
        first, second = x.float().chunk(2, dim=-1)  # (batch, heads, seq, head_dim / 2) each
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _table(self, seq_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (seq_length, device)
        if key not in self._tables:
            # In fp64: an angle of thousands of radians has lost its fraction of a turn in fp32.
            angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), self._inverse_frequencies)
            self._tables[key] = (angles.cos().float().to(device), angles.sin().float().to(device))
        return self._tables[key]


class AttentionBias:
    """What is added to the attention scores, unscaled: minus infinity above the diagonal, and a penalty of each head.

    Args:
        slopes: the penalty of each of the rank's heads for a distance of one token, (heads,); None for the causal mask
            alone.
    """

    def __init__(self, slopes: Tensor | None = None) -> None:
        self._slopes = slopes
        self._biases: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    @property
    def causal_only(self) -> bool:
        """Tell whether a kernel's own causal mask does the same."""
        return self._slopes is None

    def get(self, seq_length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the bias, (the rank's heads or 1, seq, seq), of ``dtype``."""
        key = (seq_length, device, dtype)
        if key not in self._biases:
            future = torch.ones(seq_length, seq_length, dtype=torch.bool).triu(1)  # (query, key)
            bias = torch.zeros(1, seq_length, seq_length)
            if self._slopes is not None:
                position = torch.arange(seq_length, dtype=torch.float32)
                distance = position[None, None, :] - position[None, :, None]  # key minus query: (1, seq, seq), <= 0
                bias = self._slopes[:, None, None] * distance  # (heads, seq, seq)
            self._biases[key] = bias.masked_fill(future, -math.inf).to(device=device, dtype=dtype)
        return self._biases[key]


class DocumentBias:
    """An ``AttentionBias`` in which no token sees another document than its own; distances are the same in both."""

    causal_only = False

    def __init__(self, bias: AttentionBias, documents: Documents) -> None:
        self._bias = bias
        self._documents = documents

    def get(self, seq_length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the bias, (batch, the rank's heads or 1, seq, seq), of ``dtype``."""
        documents = self._documents
        whole = self._bias.get(seq_length, device, dtype)
        return documents.once((self._bias, dtype), lambda: documents.hide_others(whole))


def alibi_slopes(num_heads: int) -> Tensor:
    """Return one slope a head, (num_heads,): Press et al., arXiv 2108.12409, section 3; off powers of two their code.

    For 2^n heads they are a geometric sequence from 2^(-8/num_heads). Other counts take the slopes of the power of two
    below, and fill up with every other slope of the power above.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes)
