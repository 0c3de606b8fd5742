"""Bytes by kind: small cases by hand, and what may only grow with what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.activations import ActivationSettings, activation_bytes, block_bytes_per_token
from megastable.core.flops import ATTENTION, BLOCK, FEED_FORWARD, HALVES, ModelShape, Recomputation
from megastable.core.layers import LayerKind, StageLayers, flat_layers, num_parameters, stage_parameters
from megastable.core.memory import COPIES_CHECK_BYTES, MemoryUse, NumberFormat, memory_use
from megastable.core.model_parts import ATTENTION_KINDS, ModelParts
from megastable.planning.number_formats import FORMATS
from tests.unit.core.test_flops import BLOOM
from tests.unit.core.test_layers import PLAIN, any_parts

quick = settings(max_examples=25, deadline=None)
PARTS = replace(PLAIN, embedding_norm=True)
KINDS = st.sampled_from([(), (ATTENTION,), (FEED_FORWARD,), HALVES, (BLOCK,)])
MIDDLE = StageLayers.blocks(6)
SMALL_VOCABULARY = replace(BLOOM, vocab_size=1024, padded_vocab_size=1024)
"""So that the blocks, not the ends of the model, hold most at the peak."""
BF16 = ActivationSettings(element_bytes=2, recomputed=())


def use(number_format: NumberFormat, **changes: Any) -> MemoryUse:
    """Of a thousand weights on two replicas, with changes."""
    values: dict[str, Any] = {
        "num_parameters": 1000, "data_parallel_size": 2, "reduce_bucket_size": 1000, "communication_bytes": 4,
        "activations": 500.0, **changes,
    }  # fmt: skip
    return memory_use(number_format, **values)


@pytest.mark.parametrize(
    ("formats", "state"),
    [
        (("fp32", "fp32"), (4000, 4000, 2000, 4000)),
        (("bf16", "fp32"), (2000, 4000, 2000, 4000)),
        (("bf16", "bf16"), (2000, 2000, 2000, 4000)),
        (("fp16", "fp32"), (2000, 6000, 2000, 4000)),
    ],
)
def test_the_state_of_a_thousand_weights_on_two_replicas(formats: tuple[str, str], state: tuple[int, ...]) -> None:
    own = use(FORMATS[formats])
    assert (own.weights, own.gradients, own.master_weights, own.moments) == state
    assert own.total == sum(state) + max(own.activations + own.buffers, own.update)


def test_the_gradient_buffer_is_there_once_in_the_backward_pass_and_twice_to_reduce() -> None:
    own = use(FORMATS["fp32", "fp32"])
    assert own.buffers - COPIES_CHECK_BYTES == 4000
    assert own.update - COPIES_CHECK_BYTES == 8000
    assert use(FORMATS["bf16", "fp32"]).buffers == COPIES_CHECK_BYTES


def test_one_replica_needs_no_gradient_buffer() -> None:
    for formats in FORMATS.values():
        assert use(formats, data_parallel_size=1).buffers == COPIES_CHECK_BYTES
    assert use(FORMATS["bf16", "bf16"], data_parallel_size=1).update - COPIES_CHECK_BYTES == 4000  # widened
    assert use(FORMATS["bf16", "fp32"], data_parallel_size=1).update == COPIES_CHECK_BYTES


@quick
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 10**9), st.integers(2, 64), st.integers(0, 10**9))
def test_memory_grows_with_weights_and_activations_and_falls_with_replicas(
    formats: tuple[str, str], weights: int, replicas: int, activations: int
) -> None:
    def total(**changes: Any) -> float:
        values = {"num_parameters": weights, "data_parallel_size": replicas, "activations": activations, **changes}
        return use(FORMATS[formats], **values).total

    # One replica has no buffers to reduce in, so two may hold more than one.
    # Over half a billion weights the flat sums are no longer copied, so that is looked at from both sides alone.
    assert total(num_parameters=weights + 1) >= total() or formats == ("bf16", "fp32")
    assert total(activations=activations + 1) >= total()
    assert total(data_parallel_size=replicas + 1) <= total()


def test_a_block_of_multi_head_attention_keeps_18_elements_a_token_and_hidden_unit() -> None:
    log_sums = 4 * BLOOM.num_attention_heads
    assert block_bytes_per_token(BLOOM, PARTS, BF16) == 18 * BLOOM.hidden_size * 2 + log_sums


def activations(shape: ModelShape = BLOOM, stage: StageLayers = MIDDLE, batch: Any = (1, 4), **changes: Any) -> float:
    """Of a middle stage with changes; ``batch`` is micro-batch size and how many are in flight."""
    return activation_bytes(shape, PARTS, stage, replace(BF16, **changes), *batch)


def with_plain_attention(shape: ModelShape, stage: StageLayers, batch: tuple[int, int], **changes: Any) -> float:
    """The same of a model whose attention weights are kept."""
    parts = replace(PARTS, attention=ATTENTION_KINDS["math"])
    return activation_bytes(shape, parts, stage, replace(BF16, **changes), *batch)


@quick
@given(st.integers(1, 8), st.integers(1, 16), KINDS, st.booleans(), st.sampled_from([1, 2, 4]), st.booleans())
def test_activations_grow_with_what_makes_them(
    size: int, in_flight: int, recomputed: tuple[str, ...], first: bool, ranks: int, last: bool
) -> None:
    stage = StageLayers(4, is_first=first, has_embedding_finish=first, has_final_norm=last, is_last=last)

    def own(batch: tuple[int, int] = (size, in_flight), layers: StageLayers = stage, **changes: Any) -> float:
        return activations(
            SMALL_VOCABULARY,
            stage=layers,
            batch=batch,
            **{"recomputed": recomputed, "tensor_parallel_size": ranks, **changes},
        )

    assert own((size + 1, in_flight)) > own()
    assert own((size, in_flight + 1)) > own()
    assert own(layers=replace(stage, num_blocks=5)) > own()
    assert own(element_bytes=4) > own()
    assert own(dropout=True) >= own()
    kept_weights = with_plain_attention(
        SMALL_VOCABULARY, stage, (size, in_flight), recomputed=recomputed, tensor_parallel_size=ranks
    )
    assert kept_weights > own()
    assert own(tensor_parallel_size=2 * ranks) < own()
    if ranks > 1:
        assert own(sequence_parallel=True) < own()
    if in_flight > 1:
        assert own(recomputed=(BLOCK,)) < own(recomputed=())
        for half in HALVES:
            assert own(recomputed=HALVES) < own(recomputed=(half,)) < own(recomputed=())


def test_recomputation_keeps_the_inputs_of_blocks_alone() -> None:
    def of_one_more(recomputed: tuple[str, ...]) -> float:
        return activations(batch=(1, 9), recomputed=recomputed) - activations(batch=(1, 8), recomputed=recomputed)

    stream = BLOOM.seq_length * BLOOM.hidden_size * 2
    whole = 6 * BLOOM.seq_length * block_bytes_per_token(BLOOM, PARTS, BF16)
    assert of_one_more(recomputed=(BLOCK,)) == (6 + 1) * stream  # six inputs, and what was sent
    assert of_one_more(recomputed=()) == whole + stream
    assert of_one_more(recomputed=HALVES) == (2 * 6 + 1) * stream  # the middle of every block, too
    feed_forward = 6 * (2 + 2 * 4) * stream  # the input, the norm's output, and twice the inner width of 4 h
    assert of_one_more(recomputed=(FEED_FORWARD,)) == whole - feed_forward + 6 * stream + stream
    assert of_one_more(recomputed=(ATTENTION,)) == feed_forward + 6 * stream + stream


@quick
@given(any_parts(), st.integers(1, 11))
def test_stages_hold_the_whole_model_wherever_it_is_cut_and_a_tied_head_is_a_copy(parts: ModelParts, cut: int) -> None:
    shape = replace(BLOOM, num_layers=8)
    kinds = [layer.kind for layer in flat_layers(shape, parts, Recomputation())]
    halves = (StageLayers.of(kinds[:cut]), StageLayers.of(kinds[cut:]))
    whole = num_parameters(shape, parts)
    copied = shape.padded_vocab_size * shape.hidden_size if parts.tie_embeddings else 0
    assert sum(stage_parameters(shape, parts, half) for half in halves) == whole + copied


def test_tensor_ranks_share_matrices_and_keep_norms_and_row_biases_whole() -> None:
    one, four = (stage_parameters(BLOOM, PARTS, MIDDLE, ranks) for ranks in (1, 4))
    whole = 6 * 6 * BLOOM.hidden_size  # per block two norms with biases and two row-parallel biases
    assert four == (one - whole) // 4 + whole


def test_a_stage_of_final_norm_and_head_keeps_their_inputs_and_works_with_no_block() -> None:
    ends = StageLayers.of([LayerKind.FINAL_NORM, LayerKind.HEAD])
    stream = BLOOM.seq_length * BLOOM.hidden_size * 2
    assert activations(stage=ends, batch=(1, 2)) - activations(stage=ends, batch=(1, 1)) == 2 * stream
    with_block = StageLayers.of([LayerKind.BLOCK, LayerKind.FINAL_NORM, LayerKind.HEAD])
    assert activations(stage=ends, recomputed=(BLOCK,)) < activations(stage=with_block, recomputed=(BLOCK,))
    assert stage_parameters(BLOOM, PARTS, ends) == (BLOOM.padded_vocab_size + 2) * BLOOM.hidden_size


def test_a_stage_of_the_embedding_alone_keeps_what_it_sends_and_its_norm_the_input() -> None:
    ends = StageLayers.of([LayerKind.EMBEDDING, LayerKind.EMBEDDING_FINISH])
    stream = BLOOM.seq_length * BLOOM.hidden_size * 2
    one = activations(SMALL_VOCABULARY, ends, batch=(1, 9)) - activations(SMALL_VOCABULARY, ends, batch=(1, 8))
    assert one == 2 * stream
    assert stage_parameters(BLOOM, PARTS, ends) == (BLOOM.padded_vocab_size + 2) * BLOOM.hidden_size
