from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.data.sample_order import SampleOrder

GOLDEN = [8, 1, 9, 0, 4, 5, 2, 7, 6, 3, 1, 5, 0, 4, 6, 7, 8, 2, 3, 9]

SEEDS = st.integers(min_value=0, max_value=2**70)


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    return order(epoch * order.num_samples + np.arange(order.num_samples))


@given(num_samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_every_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    visited = epoch_of(SampleOrder(num_samples, seed), epoch)
    assert visited.dtype == np.int64
    np.testing.assert_array_equal(np.sort(visited), np.arange(num_samples))


@given(num_samples=st.integers(50, 3000), seed=SEEDS, epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_epochs_and_seeds_are_shuffled_differently(num_samples: int, seed: int, epoch: int) -> None:
    visited = epoch_of(SampleOrder(num_samples, seed), epoch)
    assert (visited != np.arange(num_samples)).any()
    assert (visited != epoch_of(SampleOrder(num_samples, seed), epoch + 1)).any()
    assert (visited != epoch_of(SampleOrder(num_samples, seed + 1), epoch)).any()


@given(
    num_samples=st.integers(1, 500),
    seed=SEEDS,
    positions=st.lists(st.integers(0, 10_000), min_size=1, max_size=30),
)
@settings(deadline=None)
def test_a_position_does_not_depend_on_those_asked_with_it(num_samples: int, seed: int, positions: list[int]) -> None:
    order = SampleOrder(num_samples, seed)
    together = order(np.array(positions))
    alone = [int(order(np.array([position]))[0]) for position in positions]
    assert together.tolist() == alone


def test_the_order_is_that_of_earlier_versions() -> None:
    """A resumed run must see the samples that it has not seen yet, so the order may never change."""
    assert SampleOrder(10, seed=1234)(np.arange(20)).tolist() == GOLDEN


def test_all_orders_of_few_samples_are_about_equally_frequent() -> None:
    order = SampleOrder(4, seed=5)
    epochs = order(np.arange(4 * 6000)).reshape(-1, 4)
    frequencies = [int((epochs == np.array(permutation)).all(axis=1).sum()) for permutation in permutations(range(4))]
    assert min(frequencies) > 150  # 250 expected each, with a standard deviation of 16
    assert max(frequencies) < 350


@pytest.mark.parametrize("num_samples", [4096, 10_000, 65_537])
def test_neighbours_are_torn_apart(num_samples: int) -> None:
    visited = epoch_of(SampleOrder(num_samples, seed=3), epoch=2)
    bound = 5 / np.sqrt(num_samples)  # five standard deviations of the correlation of unrelated numbers
    assert abs(np.corrcoef(np.arange(num_samples), visited)[0, 1]) < bound
    assert abs(np.corrcoef(visited[:-1], visited[1:])[0, 1]) < bound
    other_epoch = epoch_of(SampleOrder(num_samples, seed=3), epoch=3)
    assert abs(np.corrcoef(visited, other_epoch)[0, 1]) < bound


def test_a_trillion_samples_need_no_memory() -> None:
    num_samples = 10**12 + 7
    visited = SampleOrder(num_samples, seed=1)(3 * num_samples + np.arange(5000))
    assert len(set(visited.tolist())) == 5000
    assert visited.min() >= 0 and visited.max() < num_samples
    assert visited.max() - visited.min() > num_samples // 2


def test_no_samples_have_no_order() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, seed=1)
