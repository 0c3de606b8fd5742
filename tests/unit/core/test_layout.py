"""Stages and replicas: every process has its place, and what does not fit is refused with every factor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

small = st.integers(1, 40)


@quick
@given(num_stages=small, replicas=small)
def test_a_world_is_stages_times_replicas(num_stages: int, replicas: int) -> None:
    layout = ParallelLayout.of_world(num_stages * replicas, num_stages, expected_world_size=num_stages * replicas)
    assert (layout.num_stages, layout.data_parallel_size) == (num_stages, replicas)
    assert layout.world_size == num_stages * replicas


@quick
@given(num_stages=st.integers(1, 6), replicas=st.integers(1, 6), tensor_size=st.integers(1, 4))
def test_every_rank_has_a_place_of_its_own(num_stages: int, replicas: int, tensor_size: int) -> None:
    layout = ParallelLayout(num_stages, replicas, tensor_size)
    names = [layout.describe(rank) for rank in range(layout.world_size)]
    places = [
        f"(stage {stage}, replica {replica}, tensor {tensor})"
        for stage in range(num_stages)
        for replica in range(replicas)
        for tensor in range(tensor_size)
    ]
    assert names == [f"rank {rank} {place}" for rank, place in enumerate(places)]


@quick
@given(world_size=st.integers(1, 300), num_stages=st.integers(2, 40))
def test_stages_that_do_not_divide_are_refused_with_every_factor(world_size: int, num_stages: int) -> None:
    if world_size % num_stages == 0:
        return
    with pytest.raises(UserError) as caught:
        ParallelLayout.of_world(world_size, num_stages)
    text = str(caught.value)
    assert f"world size {world_size} " in text
    assert f"megastable.pipeline.num_stages ({num_stages})" in text
    below = world_size - world_size % num_stages
    legal = f"{below} or {below + num_stages}" if below else f"{num_stages}"
    assert f"Launch {legal} processes" in text
    instead = f"product divides {world_size}" if world_size > 1 else "stages and tensor size of 1"
    assert instead in text


@pytest.mark.parametrize(("num_stages", "tensor_size"), [(2, 1), (1, 2), (4, 3)])
def test_one_process_is_told_the_one_choice_that_it_has(num_stages: int, tensor_size: int) -> None:
    with pytest.raises(UserError) as caught:
        ParallelLayout.of_world(1, num_stages, tensor_size)
    need = num_stages * tensor_size
    assert str(caught.value).endswith(f"Launch {need} processes, or choose stages and tensor size of 1.")
    assert "divides" not in str(caught.value)


@quick
@given(num_stages=st.integers(1, 12), tensor_size=st.integers(1, 8), replicas=st.integers(1, 12))
def test_tensor_ranks_are_a_factor_of_the_world(num_stages: int, tensor_size: int, replicas: int) -> None:
    layout = ParallelLayout.of_world(num_stages * tensor_size * replicas, num_stages, tensor_size)
    assert layout == ParallelLayout(num_stages, replicas, tensor_size)
    with pytest.raises(UserError, match=rf"tensor_parallel.size \({2 * tensor_size}\)"):
        ParallelLayout.of_world(num_stages * tensor_size * (2 * replicas - 1), num_stages, 2 * tensor_size)


@quick
@given(world_size=small, expected=small, num_stages=small)
def test_another_world_than_the_file_asks_for_is_refused(world_size: int, expected: int, num_stages: int) -> None:
    if world_size == expected:
        return
    with pytest.raises(UserError) as caught:
        ParallelLayout.of_world(world_size, num_stages, expected_world_size=expected)
    text = str(caught.value)
    assert f"brought up {world_size} process" in text
    assert f"megastable.training.world_size asks for {expected}" in text
    assert "hostfile" in text
