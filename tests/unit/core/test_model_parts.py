"""The kinds of parts: what their numbers have to be, and which backend runs under a cap."""

from __future__ import annotations

import pytest

from megastable.core.model_parts import (
    ATTENTION_KINDS,
    CAPPED_ATTENTION,
    FEED_FORWARD_KINDS,
    NORM_KINDS,
    executed_attention,
)


@pytest.mark.parametrize(
    ("name", "hidden_size", "inner"),
    [("gelu", 768, 3072), ("swiglu", 768, 2048), ("swiglu", 4096, 10_944), ("swiglu", 32, 128), ("gelu", 1, 4)],
)
def test_default_inner_sizes(name: str, hidden_size: int, inner: int) -> None:
    """SwiGLU's is 8/3 of the width, rounded up to a multiple of 64: 4096 * 8/3 is 10,922.7."""
    assert FEED_FORWARD_KINDS[name].default_inner_size(hidden_size) == inner


@pytest.mark.parametrize("name", FEED_FORWARD_KINDS)
def test_default_inner_sizes_give_kinds_about_the_same_number_of_weights(name: str) -> None:
    kind = FEED_FORWARD_KINDS[name]
    assert (kind.input_projections + 1) * kind.default_inner_size(8192) == pytest.approx(8 * 8192, rel=0.01)


def test_a_norm_without_a_fused_kernel_keeps_its_normed_values() -> None:
    kept = {name: [kind.keeps_normed_values(on_cpu) for on_cpu in (True, False)] for name, kind in NORM_KINDS.items()}
    assert kept == {"layernorm": [False, False], "rmsnorm": [True, False]}


@pytest.mark.parametrize("name", ATTENTION_KINDS)
def test_a_cap_is_computed_by_the_one_backend_that_keeps_its_weights(name: str) -> None:
    assert executed_attention(name, None) is ATTENTION_KINDS[name]
    assert executed_attention(name, 30.0) is ATTENTION_KINDS[CAPPED_ATTENTION]
    assert ATTENTION_KINDS[CAPPED_ATTENTION].keeps_weights and ATTENTION_KINDS[CAPPED_ATTENTION].allows_logit_cap
