"""Init standard deviations against the figures of the papers and runs that they come from."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.init_std import INIT_SCHEMES, MatrixSize, residual_output_std

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

# Rows for each scheme: (hidden size, fixed std, expected std) of a square matrix.
PUBLISHED: dict[str, list[tuple[int, float | None, float]]] = {
    "fixed": [(14_336, 0.0048, 0.0048), (128, 0.02, 0.02)],
    "transformers_without_tears": [(4096, None, 0.00988), (1024, None, 0.01976)],
    "megatron_530b": [(14_336, None, 0.00482), (20_480, None, 0.004034), (4096, None, 0.00902)],
    "xavier": [(100, None, 0.1), (14_336, None, 0.008352)],
}


def test_every_scheme_has_a_row_here() -> None:
    assert PUBLISHED.keys() == INIT_SCHEMES.keys()


@pytest.mark.parametrize("name", sorted(INIT_SCHEMES))
def test_published_figures(name: str) -> None:
    for hidden_size, fixed_std, expected in PUBLISHED[name]:
        assert INIT_SCHEMES[name](MatrixSize.square(hidden_size), fixed_std) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", sorted(INIT_SCHEMES.keys() - {"fixed"}))
@quick
@given(hidden_size=st.integers(1, 100_000))
def test_variance_shrinks_with_the_width(name: str, hidden_size: int) -> None:
    scheme = INIT_SCHEMES[name]
    assert scheme(MatrixSize.square(4 * hidden_size), None) == pytest.approx(
        scheme(MatrixSize.square(hidden_size), None) / 2
    )


def test_fixed_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="std"):
        INIT_SCHEMES["fixed"](MatrixSize.square(128), None)


@quick
@given(std=st.floats(1e-6, 1), num_layers=st.integers(1, 1000))
def test_residual_outputs_are_divided_by_the_root_of_twice_the_depth(std: float, num_layers: int) -> None:
    assert residual_output_std(std, num_layers) * math.sqrt(2 * num_layers) == pytest.approx(std)


def test_reported_failure_g1() -> None:
    """Hidden 4096, 32 layers: 0.00988 and that by the root of 64."""
    std = INIT_SCHEMES["transformers_without_tears"](MatrixSize.square(4096), None)
    assert residual_output_std(std, 32) == pytest.approx(0.00988 / 8, rel=1e-3)
