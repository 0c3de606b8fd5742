"""true, false, or a list of kinds that fit together."""

from itertools import chain, permutations
from typing import Any

import pytest

from megastable.config import run_from_dict
from megastable.core.flops import BLOCK, HALVES, RECOMPUTED_KINDS
from tests.unit.config.config_examples import MINIMAL, faults_of

KEY = "megastable.pipeline.activation_checkpointing"
LISTS = [list(kinds) for kinds in chain(*(permutations(RECOMPUTED_KINDS, length) for length in range(1, 4)))]
LEGAL = [kinds for kinds in LISTS if kinds == [BLOCK] or set(kinds) <= set(HALVES)]
ILLEGAL: list[Any] = [kinds for kinds in LISTS if kinds not in LEGAL]
ILLEGAL += [[], [HALVES[0], HALVES[0]], [BLOCK, BLOCK], ["head"], [1], "block", 1, 1.0, {}]


def run_with(value: Any) -> Any:
    own = MINIMAL["megastable"]
    return run_from_dict({**MINIMAL, "megastable": {**own, "pipeline": {"activation_checkpointing": value}}})


@pytest.mark.parametrize(
    ("value", "kinds"), [(True, (BLOCK,)), (False, ()), *((kinds, tuple(kinds)) for kinds in LEGAL)]
)
def test_a_legal_value_survives_the_run_folder(value: Any, kinds: tuple[str, ...]) -> None:
    run = run_with(value)
    again = run_from_dict(run.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert run.megastable.pipeline.recomputed_kinds == again.megastable.pipeline.recomputed_kinds == kinds


@pytest.mark.parametrize("value", ILLEGAL, ids=str)
def test_any_other_value_is_one_fault_that_lists_the_kinds(value: Any) -> None:
    own = {**MINIMAL["megastable"], "pipeline": {"activation_checkpointing": value}}
    (fault,) = faults_of({**MINIMAL, "megastable": own})
    assert str(fault).startswith(KEY)
    assert all(kind in str(fault) for kind in RECOMPUTED_KINDS)
