"""Every DeepSpeed key and value that is refused says why and what to do instead."""

import pytest

from megastable.config.refused_keys import REFUSED_KEYS, REFUSED_VALUES
from tests.unit.config.config_examples import FULL, MINIMAL, faults_of, key_paths, with_value

VALUES = [(path, value) for path, values in REFUSED_VALUES.items() for value in values]


@pytest.mark.parametrize("path", REFUSED_KEYS)
@pytest.mark.parametrize("value", [1, {"enabled": True}], ids=["number", "section"])
def test_refused_key_is_the_only_fault(path: str, value: object) -> None:
    (fault,) = faults_of(with_value(MINIMAL, path, value))
    assert fault.path == path
    assert fault.value == value
    assert fault.message == f"refused: {REFUSED_KEYS[path]}"


@pytest.mark.parametrize(("path", "value"), VALUES)
def test_refused_value_is_the_only_fault(path: str, value: object) -> None:
    (fault,) = faults_of(with_value(MINIMAL, path, value))
    assert (fault.path, fault.value, fault.message) == (path, value, f"refused: {REFUSED_VALUES[path][value]}")


@pytest.mark.parametrize("reason", [*REFUSED_KEYS.values(), *(REFUSED_VALUES[path][value] for path, value in VALUES)])
def test_reason_says_what_to_do(reason: str) -> None:
    ways = (
        "write ",
        "remove it",
        "not supported",
        "is in metrics.jsonl",
        "averaged once",
        "every global batch",
        "raise ",
    )
    assert any(way in reason for way in ways)


def test_advice_names_keys_that_exist() -> None:
    legal = {*key_paths(FULL), "metrics.jsonl", "megastable.training.total_samples"}
    legal |= {"megastable.tensor_parallel.size", "megastable.tensor_parallel.sequence_parallel"}
    words = {word.strip('.,;:()"') for reason in REFUSED_KEYS.values() for word in reason.split()}
    assert {word for word in words if "." in word} <= legal


def test_legal_keys_are_not_refused() -> None:
    assert not set(key_paths(FULL)) & set(REFUSED_KEYS)
    assert set(REFUSED_VALUES) <= set(key_paths(FULL))


@pytest.mark.parametrize(("stage", "legal"), [(0, False), (1, True), (2, False), (3, False), (True, False)])
def test_only_zero_stage_1(stage: object, legal: bool) -> None:
    assert (faults_of(with_value(MINIMAL, "zero_optimization.stage", stage)) == ()) == legal
