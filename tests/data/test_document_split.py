from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.data.sample_order import validation_documents

GOLDEN = [3, 10, 11, 18]


@given(num_documents=st.integers(2, 2000), fraction=st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_fraction_is_taken_but_never_none_or_all(num_documents: int, fraction: float) -> None:
    taken = int(validation_documents(num_documents, fraction).sum())
    assert 1 <= taken <= num_documents - 1
    assert abs(taken - fraction * num_documents) <= 1


@given(num_documents=st.integers(0, 100))
def test_no_fraction_takes_nothing(num_documents: int) -> None:
    assert not validation_documents(num_documents, 0.0).any()


def test_a_single_document_is_for_training() -> None:
    assert validation_documents(1, 0.5).tolist() == [False]


def test_the_split_is_spread_over_the_documents_and_always_the_same() -> None:
    mask = validation_documents(10_000, 0.1)
    assert (mask == validation_documents(10_000, 0.1)).all()
    assert all(70 <= int(part.sum()) <= 130 for part in mask.reshape(10, 1000))
    assert validation_documents(20, 0.2).nonzero()[0].tolist() == GOLDEN
