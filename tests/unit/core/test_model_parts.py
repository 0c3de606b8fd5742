"""The number of weights: a small case by hand, and published totals of models of exactly these parts."""

from dataclasses import replace

from megastable.core.model_parts import ModelParts, num_parameters
from tests.unit.core.test_flops import BLOOM, TINY

PLAIN = ModelParts(
    tie_embeddings=True, learned_positions=False, embedding_norm=False, norm_has_bias=True, qk_norm=False
)
EMBEDDING = 8 * 4
BLOCK = (3 * 16 + 3 * 4) + (16 + 4) + (4 * 16 + 16) + (16 * 4 + 4) + 2 * 8  # q k v, output, up, down, two norms


def test_every_part_by_hand() -> None:
    plain = EMBEDDING + 2 * BLOCK + 8
    assert num_parameters(TINY, PLAIN) == plain
    assert num_parameters(TINY, replace(PLAIN, tie_embeddings=False)) == plain + EMBEDDING
    assert num_parameters(TINY, replace(PLAIN, learned_positions=True)) == plain + 3 * 4
    assert num_parameters(TINY, replace(PLAIN, embedding_norm=True)) == plain + 8
    assert num_parameters(TINY, replace(PLAIN, norm_has_bias=False)) == plain - 5 * 4
    assert num_parameters(TINY, replace(PLAIN, qk_norm=True)) == plain + 2 * 2 * 2 * (4 // TINY.num_attention_heads)
    assert num_parameters(replace(TINY, gated_ffn=True), PLAIN) == plain + 2 * (4 * 16 + 16)
    assert num_parameters(replace(TINY, num_key_value_heads=1), PLAIN) == plain - 2 * (16 + 4)


def test_bloom_has_its_published_number() -> None:
    """176,247,271,424: BLOOM's model card."""
    assert num_parameters(BLOOM, replace(PLAIN, embedding_norm=True)) == 176_247_271_424
