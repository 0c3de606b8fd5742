"""ALiBi slopes by hand, rotary's relative-position property, and causality of the whole model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megastable.model.attention import ATTENTION_BACKENDS
from megastable.model.positions import POSITION_EMBEDDINGS, AttentionBias, RotaryTable, alibi_slopes
from tests.model.plain_attention import plain_rotation
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

SLOPES_BY_HAND = {
    # Press et al., section 3: for 8 heads 1/2, 1/4 ... 1/256; for 16 heads 1/2^0.5, 1/2^1, 1/2^1.5 ... 1/2^8.
    1: [1 / 256],
    2: [1 / 16, 1 / 256],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    16: [2**-0.5, 2**-1, 2**-1.5, 2**-2, 2**-2.5, 2**-3, 2**-3.5, 2**-4,
         2**-4.5, 2**-5, 2**-5.5, 2**-6, 2**-6.5, 2**-7, 2**-7.5, 2**-8],
    # Other counts: those of the power of two below, then every other one of the power above.
    3: [1 / 16, 1 / 256, 1 / 4],
    6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
    12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}  # fmt: skip


@pytest.mark.parametrize("num_heads", SLOPES_BY_HAND)
def test_alibi_slopes(num_heads: int) -> None:
    assert alibi_slopes(num_heads).tolist() == pytest.approx(SLOPES_BY_HAND[num_heads], rel=1e-6)


def test_the_slopes_of_bloom_176b() -> None:
    slopes = alibi_slopes(112)
    assert len(set(slopes.tolist())) == 112
    assert slopes[[0, 63, 64, 111]].tolist() == pytest.approx([2**-0.125, 2**-8, 2**-0.0625, 2**-5.9375], rel=1e-6)


def test_the_bias_is_minus_slope_times_distance_and_hides_the_future() -> None:
    causal = AttentionBias().get(5, torch.device("cpu"), torch.float32)
    alibi = AttentionBias(alibi_slopes(6)).get(5, torch.device("cpu"), torch.float32)
    assert (causal.shape, alibi.shape) == ((1, 5, 5), (6, 5, 5))
    for query in range(5):
        for key in range(5):
            seen = key <= query
            assert causal[0, query, key] == (0.0 if seen else -math.inf)
            for head, slope in enumerate(SLOPES_BY_HAND[6]):
                assert alibi[head, query, key] == (-slope * (query - key) if seen else -math.inf)


@pytest.mark.parametrize(("head_dim", "base"), [(2, 10000.0), (8, 10000.0), (64, 500000.0)])
def test_rotary_turns_by_the_angles_of_the_paper(head_dim: int, base: float) -> None:
    x = torch.randn(2, 3, 40, head_dim, generator=torch.Generator().manual_seed(1))
    rotated = RotaryTable(head_dim, base).rotate(x)
    torch.testing.assert_close(rotated.double(), plain_rotation(x, base), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotated[..., 0, :], x[..., 0, :], rtol=0, atol=0)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    table, seq_length = RotaryTable(16, 10000.0), 50
    q, k = (torch.randn(1, 1, 1, 16, generator=generator).expand(-1, -1, seq_length, -1) for _ in range(2))
    scores = (table.rotate(q) @ table.rotate(k).transpose(-1, -2))[0, 0]
    for distance in range(-seq_length + 1, seq_length):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert scores[:, 0].std() > 0.1, "scores do not depend on the distance at all"


def test_rotary_keeps_16_bit_inputs_and_computes_in_fp32() -> None:
    x = torch.randn(1, 1, 3000, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    rotated = RotaryTable(8, 10000.0).rotate(x)
    assert rotated.dtype == torch.bfloat16
    # 2^-8 is half a unit in the last place of bf16: angles that went through bf16 would be off by whole turns.
    expected = plain_rotation(x[..., -1:, :].expand(-1, -1, 3000, -1), 10000.0)[..., -1:, :]
    torch.testing.assert_close(rotated[..., -1:, :].double(), expected, rtol=2**-8, atol=1e-6)


def model_logits(model: ReferenceModel, token_ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(token_ids)[0]


@pytest.mark.parametrize("positions", POSITION_EMBEDDINGS)
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_a_token_never_changes_the_logits_before_it(positions: str, backend: str) -> None:
    run = tiny_run(megastable__model__position_embedding=positions, megastable__model__attention=backend)
    size, model = run.megastable.model, ReferenceModel(run)
    token_ids = torch.randint(size.vocab_size, (1, size.seq_length), generator=torch.Generator().manual_seed(4))
    before = model_logits(model, token_ids)
    for position in range(size.seq_length):
        changed = token_ids.clone()
        changed[0, position] = (changed[0, position] + 1) % size.vocab_size
        after = model_logits(model, changed)
        assert torch.equal(after[:position], before[:position])
        assert ((after[position:] - before[position:]).abs().amax(dim=-1) > 1e-6).all(), "the token had no effect"


@pytest.mark.parametrize("positions", POSITION_EMBEDDINGS)
def test_the_order_of_earlier_tokens_matters(positions: str) -> None:
    run = tiny_run(megastable__model__position_embedding=positions)
    model = ReferenceModel(run)
    logits = [model_logits(model, torch.tensor([ids]))[-1] for ids in ([5, 9, 2, 7], [9, 5, 2, 7])]
    assert (logits[0] - logits[1]).abs().max() > 1e-4
