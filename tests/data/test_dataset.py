from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.core.labels import IGNORED_LABEL
from megastable.data.dataset import TokenDataset

EOD = 999


def dataset_of(num_tokens: int, seq_length: int) -> TokenDataset:
    return TokenDataset(np.arange(num_tokens, dtype=np.uint16), seq_length, EOD, vocab_size=10_000, name="tokens")


@given(num_tokens=st.integers(0, 200), seq_length=st.integers(1, 20))
def test_every_token_but_the_first_is_predicted_once_from_the_one_before(num_tokens: int, seq_length: int) -> None:
    dataset = dataset_of(num_tokens, seq_length)
    inputs, predicted = [], []
    for index in range(len(dataset)):
        input_ids, labels = dataset[index]
        assert input_ids.dtype == labels.dtype == np.int64
        assert input_ids.shape == labels.shape == (seq_length,)
        counts = labels != IGNORED_LABEL
        assert counts.sum() == dataset.valid_tokens(index) > 0
        assert counts[: counts.sum()].all(), "only the end of a sample is padded"
        inputs += input_ids[counts].tolist()
        predicted += labels[counts].tolist()
    assert inputs == list(range(max(0, num_tokens - 1)))
    assert predicted == list(range(1, max(1, num_tokens)))


def test_only_the_last_sample_is_padded_with_the_end_of_document() -> None:
    dataset = dataset_of(num_tokens=11, seq_length=4)
    assert len(dataset) == 3
    assert [dataset.valid_tokens(index) for index in range(3)] == [4, 4, 2]
    input_ids, labels = dataset[2]
    assert input_ids.tolist() == [8, 9, 10, EOD]
    assert labels.tolist() == [9, 10, IGNORED_LABEL, IGNORED_LABEL]


def test_a_sample_that_just_fits_leaves_no_other() -> None:
    assert len(dataset_of(num_tokens=9, seq_length=4)) == 2
    assert len(dataset_of(num_tokens=10, seq_length=4)) == 3


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sample_that_does_not_exist(index: int) -> None:
    dataset = dataset_of(num_tokens=11, seq_length=4)
    with pytest.raises(IndexError, match="3 samples"):
        dataset[index]
    with pytest.raises(IndexError, match="3 samples"):
        dataset.valid_tokens(index)


def test_a_sample_may_be_changed_without_changing_the_tokens() -> None:
    dataset = dataset_of(num_tokens=9, seq_length=4)
    for part in dataset[0]:
        part[:] = 77
    assert dataset.tokens.tolist() == list(range(9))
    assert dataset[0][0].tolist() == [0, 1, 2, 3]


def test_a_padding_sample_counts_nothing() -> None:
    input_ids, labels = dataset_of(num_tokens=9, seq_length=3).padding_sample()
    assert input_ids.tolist() == [EOD] * 3
    assert labels.tolist() == [IGNORED_LABEL] * 3
