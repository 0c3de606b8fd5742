"""Operation counts: small cases by hand, any case product by product, and BLOOM-176B's published throughput."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.flops import ATTENTION, BLOCK, FEED_FORWARD, ModelShape, Recomputation, tflops_per_device
from megastable.core.model_parts import FEED_FORWARD_KINDS

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

# 2 blocks, width 4, 2 heads of width 2, feed-forward 16, 3 tokens, 5 tokens in the vocabulary padded to 8.
TINY = ModelShape(
    num_layers=2,
    hidden_size=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    ffn_hidden_size=16,
    feed_forward=FEED_FORWARD_KINDS["gelu"],
    seq_length=3,
    vocab_size=5,
    padded_vocab_size=8,
)
BLOOM = ModelShape(
    num_layers=70,
    hidden_size=14_336,
    num_attention_heads=112,
    num_key_value_heads=112,
    ffn_hidden_size=4 * 14_336,
    feed_forward=FEED_FORWARD_KINDS["gelu"],
    seq_length=2048,
    vocab_size=250_880,
    padded_vocab_size=250_880,
)
BLOOM_DEVICES = 384

# A (3 x 4) by (4 x 4) product is 2*3*4*4 = 96 operations; scores are 2 heads of (3 x 2) by (2 x 3), 36 each.
TINY_BLOCK = 96 + 96 + 96 + 96 + (36 + 36) + (36 + 36) + 384 + 384  # Q K V out, scores, weights V, up, down
TINY_HEAD = 2 * 3 * 4 * 5
TINY_PADDED_HEAD = 2 * 3 * 4 * 8


def blocks_again(shape: ModelShape, num_blocks: int) -> int:
    """Operations of so many whole blocks."""
    return Recomputation((BLOCK,)).flops_per_sample(shape, num_blocks, holds_head=True)


def test_gelu_block_by_hand() -> None:
    assert TINY_BLOCK == 1296
    assert TINY.block_forward_flops == 1296
    assert TINY.model_flops_per_sample == 3 * (1296 + 1296 + 120) == 8136


def test_swiglu_block_by_hand() -> None:
    shape = replace(TINY, feed_forward=FEED_FORWARD_KINDS["swiglu"])  # gate, up and down
    assert shape.block_forward_flops == 96 + 96 + 96 + 96 + 72 + 72 + 384 + 384 + 384 == 1680
    assert shape.model_flops_per_sample == 3 * (1680 + 1680 + 120) == 10_440


def test_grouped_heads_by_hand() -> None:
    shape = replace(TINY, num_key_value_heads=1)  # K and V are 3 x 4 by 4 x 2; scores as before
    assert shape.block_forward_flops == 96 + 48 + 48 + 96 + 72 + 72 + 384 + 384 == 1200
    assert shape.model_flops_per_sample == 3 * (1200 + 1200 + 120) == 7560


def test_feed_forward_of_another_width_by_hand() -> None:
    shape = replace(TINY, ffn_hidden_size=5)  # not 4 x hidden
    assert shape.block_forward_flops == 96 + 96 + 96 + 96 + 72 + 72 + 120 + 120 == 768


def test_padding_counts_in_hardware_flops_only() -> None:
    assert TINY_HEAD == 120
    assert TINY_PADDED_HEAD == 192
    assert TINY.hardware_flops_per_sample(0) == 3 * (1296 + 1296 + 192) == 8352
    assert replace(TINY, padded_vocab_size=800).model_flops_per_sample == TINY.model_flops_per_sample


def test_recompute_adds_a_forward_of_the_recomputed_blocks_to_hardware_flops() -> None:
    assert TINY.hardware_flops_per_sample(blocks_again(TINY, 1)) == 3 * (1296 + 1296 + 192) + 1296 == 9648
    assert TINY.hardware_flops_per_sample(blocks_again(TINY, 2)) == 3 * (1296 + 1296 + 192) + 1296 + 1296 == 10_944


@pytest.mark.parametrize(
    ("kinds", "of_a_block"),
    [
        ((), 0),
        ((ATTENTION,), 4 * 96 + 2 * 72),
        ((FEED_FORWARD,), 2 * 384),
        ((ATTENTION, FEED_FORWARD), TINY_BLOCK),
        ((BLOCK,), TINY_BLOCK),
    ],
)
def test_what_each_kind_computes_again_by_hand(kinds: tuple[str, ...], of_a_block: int) -> None:
    for num_blocks in range(3):
        again = Recomputation(kinds).flops_per_sample(TINY, num_blocks, holds_head=True)
        assert again == num_blocks * of_a_block
        for holds_head in (True, False):
            with_head = Recomputation(kinds, head=True).flops_per_sample(TINY, num_blocks, holds_head)
            assert with_head == again + holds_head * TINY_PADDED_HEAD


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    """Any legal shape."""
    key_value_heads, group, head_dim = (draw(st.integers(1, 6)) for _ in range(3))
    heads = key_value_heads * group
    vocab = draw(st.integers(1, 100))
    return ModelShape(
        num_layers=draw(st.integers(1, 9)),
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        ffn_hidden_size=draw(st.integers(1, 99)),
        feed_forward=FEED_FORWARD_KINDS[draw(st.sampled_from(sorted(FEED_FORWARD_KINDS)))],
        seq_length=draw(st.integers(1, 50)),
        vocab_size=vocab,
        padded_vocab_size=vocab + draw(st.integers(0, 50)),
    )


def block_products(shape: ModelShape) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of every matrix product of one block's forward pass on one sample."""
    tokens, hidden, ffn = shape.seq_length, shape.hidden_size, shape.ffn_hidden_size
    head_dim = hidden // shape.num_attention_heads
    return [
        *[(tokens, hidden, head_dim)] * shape.num_attention_heads,  # queries
        *[(tokens, hidden, head_dim)] * shape.num_key_value_heads * 2,  # keys and values
        *[(tokens, head_dim, tokens), (tokens, tokens, head_dim)] * shape.num_attention_heads,
        (tokens, hidden, hidden),  # attention output
        *[(tokens, hidden, ffn)] * shape.feed_forward.input_projections,
        (tokens, ffn, hidden),
    ]


@quick
@given(model_shapes(), st.data())
def test_any_shape_product_by_product(shape: ModelShape, data: st.DataObject) -> None:
    block = sum(2 * rows * inner * columns for rows, inner, columns in block_products(shape))
    head = 2 * shape.seq_length * shape.hidden_size * shape.vocab_size
    padded_head = 2 * shape.seq_length * shape.hidden_size * shape.padded_vocab_size
    recomputed = data.draw(st.integers(0, shape.num_layers))
    assert shape.block_forward_flops == block
    assert shape.model_flops_per_sample == 3 * (shape.num_layers * block + head)
    expected = 3 * (shape.num_layers * block + padded_head) + recomputed * block
    assert shape.hardware_flops_per_sample(blocks_again(shape, recomputed)) == expected


def test_narayanan_et_al_equation_3() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh), which counts full recomputation of every block."""
    shape = replace(BLOOM, num_layers=80, hidden_size=12_288, num_attention_heads=96, num_key_value_heads=96,
                    ffn_hidden_size=4 * 12_288, vocab_size=51_200, padded_vocab_size=51_200)  # fmt: skip
    s, layers, h, vocab = 2048, 80, 12_288, 51_200
    closed_form = 96 * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert shape.hardware_flops_per_sample(blocks_again(shape, 80)) == pytest.approx(closed_form, rel=1e-12)


@pytest.mark.parametrize(
    ("global_batch_size", "step_seconds", "published"),
    [(2048, 105.22, 149.0), (16, 15.23, 8.04)],
    ids=["full batch: 149 to 150", "batch 16: 8"],
)
def test_bloom_176b_published_throughput(global_batch_size: int, step_seconds: float, published: float) -> None:
    flops = BLOOM.hardware_flops_per_sample(blocks_again(BLOOM, 70))
    measured = tflops_per_device(flops, global_batch_size, step_seconds, BLOOM_DEVICES)
    assert measured == pytest.approx(published, rel=5e-4)


def test_model_flops_stay_below_hardware_flops_under_recompute() -> None:
    ratio = BLOOM.model_flops_per_sample / BLOOM.hardware_flops_per_sample(blocks_again(BLOOM, 70))
    assert 0.75 < ratio < 0.76  # 3 of 4 passes; the head is not recomputed


@quick
@given(
    st.integers(1, 10**15), st.integers(1, 4096), st.floats(1e-3, 1e3), st.integers(1, 4096), st.integers(2, 9)
)  # fmt: skip
def test_throughput_follows_batch_time_and_devices(
    flops: int, batch: int, seconds: float, devices: int, factor: int
) -> None:
    once = tflops_per_device(flops, batch, seconds, devices)
    assert tflops_per_device(flops, batch * factor, seconds, devices) == pytest.approx(once * factor)
    assert tflops_per_device(flops, batch, seconds * factor, devices) == pytest.approx(once / factor)
    assert tflops_per_device(flops, batch, seconds, devices * factor) == pytest.approx(once / factor)
