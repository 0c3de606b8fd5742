"""The probe of this CPU: the real layers are timed, whatever the model has in it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from megastable.planning.measured_cost import BLOCK, FIRST, LAST
from megastable.planning.run_plan import RunPlan
from megastable.training.cpu_probe import measure, probe
from tests.support.ranks import fork_server
from tests.support.tiny_run import tiny_run

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16__enabled": True},
    "untied, swiglu, learned": {
        "megastable__model__tie_embeddings": False,
        "megastable__model__activation": "swiglu",
        "megastable__model__position_embedding": "learned",
    },
    "alibi, dropout, embedding norm": {
        "megastable__model__position_embedding": "alibi",
        "megastable__model__dropout": 0.1,
        "megastable__model__embedding_norm": True,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_every_piece_of_a_model_is_timed(name: str) -> None:
    found = measure(tiny_run(**MODELS[name]), [1, 2], threads=1, seconds=0.0)
    assert found.passes.keys() == {FIRST, BLOCK, LAST}
    for piece in found.passes.values():
        assert piece.forward.at(2) > 0
        assert piece.backward.at(2) > 0
    assert found.update_seconds > 0
    assert found.copy_seconds > 0


def test_larger_layers_take_longer() -> None:
    small, large = (
        measure(
            tiny_run(megastable__model__hidden_size=hidden, megastable__model__vocab_size=vocabulary), [1, 4], 1, 0.5
        )
        for hidden, vocabulary in ((32, 300), (256, 8000))
    )
    for piece in (BLOCK, LAST):
        assert large.passes[piece].backward.at(4) > small.passes[piece].backward.at(4)


def probe_of_two_processes() -> None:
    plan = RunPlan.of(tiny_run(megastable__pipeline__num_stages=2), 2)
    file = probe(plan, seconds=0.0)
    assert file.method == "probe"
    assert len(file.cost.stages) == 2
    assert file.cost.fixed_seconds > 0
    assert file.memory_gib_per_process is not None


def test_a_plan_is_probed_in_as_many_processes_as_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are forked from the server of the tests, which has imported torch, where a user's are spawned."""
    context = fork_server()
    asked = []

    def forked(method: str) -> ForkServerContext:
        asked.append(method)
        return context

    monkeypatch.setattr(multiprocessing, "get_context", forked)
    probe_of_two_processes()
    assert asked == ["spawn"], "a process that is forked while torch runs threads may hang"


@pytest.mark.slow
def test_a_plan_is_probed_in_spawned_processes() -> None:
    probe_of_two_processes()
