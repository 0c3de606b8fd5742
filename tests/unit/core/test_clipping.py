"""What clipping multiplies a gradient by."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.clipping import clip_coefficient

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy


@quick
@given(grad_norm=st.floats(0, 1e6), clip_norm=st.floats(1e-3, 1e3))
def test_a_clipped_gradient_has_at_most_the_clip_norm_and_a_small_one_stays(grad_norm: float, clip_norm: float) -> None:
    clipped = grad_norm * clip_coefficient(grad_norm, clip_norm)
    assert clipped == pytest.approx(min(grad_norm, clip_norm), rel=1e-2, abs=1e-6)
    assert clip_coefficient(grad_norm, 0.0) == 1.0


@pytest.mark.parametrize("grad_norm", [math.inf, math.nan])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_skipped_step_counts_for_nothing(grad_norm: float, clip_norm: float) -> None:
    assert clip_coefficient(grad_norm, clip_norm) == 0.0
