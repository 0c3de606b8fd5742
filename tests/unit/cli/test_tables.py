"""Numbers, shares and times as a person reads them, and the rows of a table that is too long."""

from __future__ import annotations

import pytest

from megastable.cli.tables import duration, percent, shown_indices, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.0, "1"), (3.14159, "3.142"), (12.5, "12.50"), (12345.6, "12,346"), (6e-5, "6.00e-05"),
     (1e30, "1.00e+30"), (-0.5, "-0.5000"), (999.97, "1000")],
)  # fmt: skip
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0%"), (1, "100.0%"), (0.0123, "1.2%"), (2e-5, "0.002%")])
def test_shares_are_percents(value: float, text: str) -> None:
    assert percent(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0421, "0.042 s"), (9.96, "10 s"), (59.7, "1 min"), (310, "5 min 10 s"), (7205, "2 h"),
     (86_400 + 3600, "1 d 1 h"), (1e20, "1,157,407,407,407,407 d 9 h")],
)  # fmt: skip
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_long_ramp_is_shown_by_some_of_its_phases_with_both_ends() -> None:
    assert shown_indices(5, 12) == [0, 1, 2, 3, 4]
    shown = shown_indices(117, 12)
    assert (shown[0], shown[-1], len(shown)) == (0, 116, 12)
