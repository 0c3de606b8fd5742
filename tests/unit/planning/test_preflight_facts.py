"""What the preflight's rules rest on: the machine's GPUs, its text, customary values, and arithmetic of ramps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import StdlibSourceConfig, TextSourceConfig
from megastable.core.batch_rampup import BatchRampup, LinearRamp
from megastable.core.pipeline_cost import bubble
from megastable.planning.preflight.batches import MOST_IDLE, fewest_microbatches
from megastable.planning.preflight.numbers import has_tensor_cores
from megastable.planning.preflight.optimizer import steps_before
from megastable.planning.preflight.review import (
    PEAK_LEARNING_RATES,
    SIZE_CLASSES,
    LocalText,
    customary_peak_lr,
    size_class,
)
from megastable.training.host import installed_gpus, look_at_text
from tests.unit.planning.preflight_cases import A100, GTX_1660, P100, V100

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy


def test_gpus_are_read_from_the_drivers_table() -> None:
    table = "Tesla P100-PCIE-16GB, 6.0\nNVIDIA A100-SXM4-80GB, 8.0\nNVIDIA A100-SXM4-80GB, 8.0\nOdd, [N/A]\n\n"
    assert installed_gpus(lambda: table) == (P100, A100)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), subprocess.TimeoutExpired("x", 5), subprocess.CalledProcessError(9, "x")]
)
def test_a_machine_whose_driver_does_not_answer_has_no_gpus(error: Exception) -> None:
    def ask() -> str:
        raise error

    assert installed_gpus(ask) == ()


def test_which_gpus_have_tensor_cores() -> None:
    assert [has_tensor_cores(gpu) for gpu in (V100, A100, P100, GTX_1660)] == [True, True, False, False]


def test_text_files_are_counted_by_their_sizes_and_others_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ten bytes.")
    (tmp_path / "b.txt").write_text("four")
    (tmp_path / "c.bin").write_bytes(b"\xff" * 100)
    # Only the beginning of a file is looked at, where this one is text.
    (tmp_path / "d.txt").write_bytes(b"a" * 100_000 + b"\xff")
    assert look_at_text(TextSourceConfig(type="text", path=str(tmp_path))) == LocalText(3, 100_015)


def test_text_that_is_not_there_is_reported() -> None:
    missing = look_at_text(TextSourceConfig(type="text", path="/no/such/folder"))
    assert missing is not None
    assert "/no/such/folder does not exist" in missing.fault


def test_the_standard_library_is_text_of_this_machine() -> None:
    found = look_at_text(StdlibSourceConfig(type="stdlib"))
    assert found is not None
    assert found.num_bytes > 1_000_000


@pytest.mark.parametrize(("num_parameters", "lr"), PEAK_LEARNING_RATES)
def test_the_table_is_met_at_its_rows(num_parameters: float, lr: float) -> None:
    assert customary_peak_lr(int(num_parameters)) == pytest.approx(lr)


@quick
@given(st.lists(st.integers(10**6, 10**12), min_size=2, max_size=2).map(sorted))
def test_larger_models_have_no_larger_learning_rate(sizes: list[int]) -> None:
    smaller, larger = map(customary_peak_lr, sizes)
    assert 0.6e-4 <= larger <= smaller * (1 + 1e-12) <= 6e-4 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_parameters", "batch", "accumulation"),
    [
        (999_999_999, (256, 512), (2, 4)),
        (1_000_000_000, (1024, 2048), (8, 16)),
        (9_999_999_999, (1024, 2048), (8, 16)),
        (10_000_000_000, (4096, 8192), (32, 64)),
    ],
)
def test_the_customary_ranges(num_parameters: int, batch: tuple[int, int], accumulation: tuple[int, int]) -> None:
    found = size_class(num_parameters)
    assert (found.global_batch_size, found.accumulation_steps) == (batch, accumulation)
    assert found in SIZE_CLASSES


@quick
@given(st.integers(2, 100))
def test_the_suggested_micro_batches_are_the_fewest(num_stages: int) -> None:
    fewest = fewest_microbatches(num_stages)
    assert bubble(num_stages, fewest) <= MOST_IDLE + 1e-12 < bubble(num_stages, fewest - 1)


@quick
@given(st.integers(1, 5), st.integers(1, 400), st.integers(1, 200), st.integers(0, 3000))
def test_updates_of_the_warmup_are_those_that_start_in_it(
    increment: int, length: int, total_steps: int, end: int
) -> None:
    whole = BatchRampup(LinearRamp(increment, increment, 6 * increment, length), 1, 1)
    starts, consumed = [], 0
    for _ in range(total_steps):
        starts.append(consumed)
        consumed += whole.at(consumed).global_batch_size
    assert steps_before(whole.phases(total_steps=total_steps), end) == sum(start < end for start in starts)
