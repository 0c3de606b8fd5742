"""The flat list of layers in numbers: weights by hand and of published models, names and kinds, stages in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from megastable.core.flops import Recomputation
from megastable.core.layers import FlatLayer, LayerKind, describe_stage, flat_layers, num_parameters
from megastable.core.model_parts import ATTENTION_KINDS, FEED_FORWARD_KINDS, NORM_KINDS, POSITION_KINDS, ModelParts
from tests.unit.core.test_flops import BLOOM, TINY

PLAIN = ModelParts(
    positions=POSITION_KINDS["alibi"],
    norm=NORM_KINDS["layernorm"],
    attention=ATTENTION_KINDS["auto"],
    tie_embeddings=True,
    embedding_norm=False,
    qk_norm=False,
    linear_biases=True,
    parallel_residual=False,
)
EMBEDDING = 8 * 4
BLOCK = (3 * 16 + 3 * 4) + (16 + 4) + (4 * 16 + 16) + (16 * 4 + 4) + 2 * 8  # q k v, output, up, down, two norms


def any_parts() -> st.SearchStrategy[ModelParts]:
    """Every combination of parts."""
    return st.builds(
        ModelParts,
        positions=st.sampled_from(list(POSITION_KINDS.values())),
        norm=st.sampled_from(list(NORM_KINDS.values())),
        attention=st.sampled_from(list(ATTENTION_KINDS.values())),
        tie_embeddings=st.booleans(),
        embedding_norm=st.booleans(),
        qk_norm=st.booleans(),
        linear_biases=st.booleans(),
        parallel_residual=st.booleans(),
    )


def test_every_part_by_hand() -> None:
    plain = EMBEDDING + 2 * BLOCK + 8
    assert num_parameters(TINY, PLAIN) == plain
    assert num_parameters(TINY, replace(PLAIN, tie_embeddings=False)) == plain + EMBEDDING
    assert num_parameters(TINY, replace(PLAIN, positions=POSITION_KINDS["learned"])) == plain + 3 * 4
    assert num_parameters(TINY, replace(PLAIN, positions=POSITION_KINDS["rotary"])) == plain
    assert num_parameters(TINY, replace(PLAIN, embedding_norm=True)) == plain + 8
    assert num_parameters(TINY, replace(PLAIN, norm=NORM_KINDS["rmsnorm"])) == plain - 5 * 4
    assert num_parameters(TINY, replace(PLAIN, qk_norm=True)) == plain + 2 * 2 * 2 * (4 // TINY.num_attention_heads)
    gated = replace(TINY, feed_forward=FEED_FORWARD_KINDS["swiglu"])
    assert num_parameters(gated, PLAIN) == plain + 2 * (4 * 16 + 16)
    assert num_parameters(replace(TINY, num_key_value_heads=1), PLAIN) == plain - 2 * (16 + 4)


def test_bloom_has_its_published_number() -> None:
    """176,247,271,424: BLOOM's model card."""
    assert num_parameters(BLOOM, replace(PLAIN, embedding_norm=True)) == 176_247_271_424


def test_the_layers_have_all_weights_and_a_tied_head_counts_once_more() -> None:
    layers = flat_layers(BLOOM, PLAIN, Recomputation())
    assert sum(layer.num_parameters for layer in layers[:-1]) == num_parameters(BLOOM, PLAIN)
    assert layers[-1].num_parameters == layers[0].num_parameters


def test_the_order_and_the_names_of_the_layers() -> None:
    layers = flat_layers(TINY, PLAIN, Recomputation())
    names = ["embedding", "embedding_finish", "block_0", "block_1", "final_norm", "head"]
    assert [layer.name for layer in layers] == names
    assert [layer.kind for layer in layers] == [
        LayerKind.EMBEDDING, LayerKind.EMBEDDING_FINISH, LayerKind.BLOCK, LayerKind.BLOCK, LayerKind.FINAL_NORM,
        LayerKind.HEAD,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["embedding", "embedding_finish", "block", "block"], "embedding + 2 blocks"),
        (["embedding_finish", "block"], "embedding finish + 1 block"),
        (["block", "final_norm", "head"], "1 block + head"),
        (["block", "final_norm"], "1 block + final norm"),
        (["head"], "head without its norm"),
        ([], ""),
    ],
)
def test_a_stage_in_words(kinds: list[str], text: str) -> None:
    assert describe_stage([FlatLayer(kind, LayerKind(kind), "", 0, True, True, 0) for kind in kinds]) == text
