"""Curves of block characters, and the values of layers that stand out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.cli.run_drawings import BLOCKS, bars, outliers
from tests.unit.cli.watch_examples import LAYERS


def test_an_outlier_stands_out_above_the_median_of_its_column() -> None:
    found = outliers(LAYERS)
    assert [(one.layer, one.column.key) for one in found] == [("block_1", "grad_norm")]
    assert found[0].ratio == pytest.approx(0.96 / 0.125)
    even = {name: dict.fromkeys(values, 2.0) for name, values in LAYERS.items()}
    assert outliers(even) == []
    assert outliers({name: dict.fromkeys(values, 0.0) for name, values in LAYERS.items()}) == []
    assert outliers({}) == []


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    width=st.integers(1, 50),
    height=st.integers(1, 5),
)
def test_curves_keep_their_place_whatever_they_draw(values: list[float | None], width: int, height: int) -> None:
    lines = bars(values, width, height)
    assert [len(line) for line in lines] == [min(width, len(values))] * height
    assert set("".join(lines)) <= {*BLOCKS, "x"}
    assert lines[-1].count("x") == (values.count(None) if len(values) <= width else lines[-1].count("x"))
    assert (None in values) == ("x" in lines[-1])


def test_a_curve_goes_from_its_lowest_to_its_highest_value_and_loses_no_spike() -> None:
    assert bars([0, 1, 2, 3, 4, 5, 6, 7], width=8, height=1) == ["▁▂▃▄▅▆▇█"]
    assert bars([0, 15], width=2, height=2) == [" █", "▁█"]
    for place in range(100):
        (line,) = bars([float(index == place) for index in range(100)], width=10, height=1)
        assert line.index("█") == place // 10
