"""The table of what a step executes: whole, installed in one place, and what its rows save."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils._python_dispatch import TorchDispatchMode

from megastable.engine.departures import DEPARTURES
from megastable.engine.instructions import BusyTime, Instruction, install_instructions, instruction_table
from tests.support.ranks import run_ranks
from tests.support.steps import build_engine, train
from tests.support.tiny_run import tiny_run

REPOSITORY = Path(__file__).parents[2]
MAP = "_INSTRUCTION_MAP"
TABLE = instruction_table([], BusyTime())


class Engine:
    """Stands for an engine as far as ``install_instructions`` goes: its class has DeepSpeed's map."""

    _INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP


def test_the_table_becomes_the_map_of_one_engine() -> None:
    engine = Engine()
    install_instructions(engine, TABLE)
    assert {row.kind: row.ours for row in TABLE} == engine._INSTRUCTION_MAP
    assert Engine._INSTRUCTION_MAP == PipelineEngine._INSTRUCTION_MAP


def strange(*_: Any) -> None:
    """Stand for a function that DeepSpeed does not have there."""


WRONG_TABLES: dict[str, tuple[tuple[Instruction, ...], str]] = {
    "a row is missing": (TABLE[1:], "LoadMicroBatch is missing"),
    "a function for a kind that DeepSpeed does not have": (
        (*TABLE, Instruction(schedule.CommitP2P, strange, strange, "")),
        "CommitP2P is not executed by strange in DeepSpeed",
    ),
    "none for a kind that it has": (
        (*TABLE[:-1], replace(TABLE[-1], upstream=None)), "OptimizerStep is not executed by nothing in DeepSpeed"
    ),
    "a row twice": ((*TABLE, TABLE[1]), "RecvActivation stands there 2 times"),
    "another original": (
        (*TABLE[:-1], replace(TABLE[-1], upstream=strange)), "OptimizerStep is not executed by strange in DeepSpeed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_a_table_that_is_not_deepspeeds_is_refused(name: str) -> None:
    table, fault = WRONG_TABLES[name]
    engine = Engine()
    with pytest.raises(ValueError, match=f"differ: {fault}$"):
        install_instructions(engine, table)
    assert MAP not in vars(engine)


def test_a_row_of_a_kind_that_deepspeed_does_not_have_is_installed() -> None:
    engine = Engine()
    install_instructions(engine, (*TABLE, Instruction(schedule.CommitP2P, None, strange, "for an executor of ours")))
    assert getattr(engine, MAP)[schedule.CommitP2P] is strange


def test_every_changed_row_is_a_registered_departure() -> None:
    registered = {name.split(":")[1] for departure in DEPARTURES for name in departure.upstream}
    changed = [row for row in TABLE if row.ours is not row.upstream]
    assert changed
    assert {row.upstream.__qualname__ for row in changed if row.upstream is not None} <= registered
    assert all(row.why for row in TABLE)


# Who assigns the map


def mentions(source: str) -> Iterator[ast.AST]:
    """Yield every place where ``source`` names the map: as an attribute, a name, a keyword, or a whole string."""
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
        if name == MAP or (isinstance(node, ast.Constant) and node.value == MAP):
            yield node


@pytest.mark.parametrize(
    "source",
    [
        "engine._INSTRUCTION_MAP = {}",
        "engine._INSTRUCTION_MAP[kind] = execute",
        "engine._INSTRUCTION_MAP |= {kind: execute}",
        "engine._INSTRUCTION_MAP.update(changed)",
        "instructions = engine._INSTRUCTION_MAP",
        "setattr(engine, '_INSTRUCTION_MAP', {})",
        "object.__setattr__(engine, '_INSTRUCTION_MAP', {})",
        "vars(engine)['_INSTRUCTION_MAP'] = {}",
        "vars(engine).update(_INSTRUCTION_MAP={})",
        "class OwnEngine(PipelineEngine):\n    _INSTRUCTION_MAP = {}",
    ],
)
def test_no_way_of_changing_the_map_is_overlooked(source: str) -> None:
    assert list(mentions(source))


def test_the_map_is_assigned_in_one_place() -> None:
    found = set()
    files = (path for folder in ("megastable", "launch", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py"))
    for path in files:
        if any(mentions(path.read_text(encoding="utf-8"))):
            found.add(str(path.relative_to(REPOSITORY)))
    assert found == {"megastable/engine/instructions.py"}


# What the rows save


COPIES = {"clone", "copy_", "_to_copy"}


class CopiesOf(TorchDispatchMode):
    """Counts the copies that are made of the tensors of a list, or of floats of any tensor."""

    def __init__(self, watched: list[torch.Tensor | None] | None = None) -> None:
        super().__init__()
        self._addresses = None if watched is None else {tensor.data_ptr() for tensor in watched if tensor is not None}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in COPIES and not result.is_meta:
            copied = args[1 if name == "copy_" else 0]
            if self._addresses is None:
                self.count += copied.is_floating_point()
            else:
                self.count += copied.data_ptr() in self._addresses
        return result


def copies_of_activations() -> dict[str, int]:
    """Count what is received in three steps, the copies of it, and what the last stage holds at the end."""
    plan, engine = build_engine(tiny_run(megastable__pipeline__num_stages=2))
    pipeline, counts = engine.deepspeed, {"received": 0, "copied": 0}
    receive, forward = (pipeline._INSTRUCTION_MAP[kind] for kind in (schedule.RecvActivation, schedule.ForwardPass))

    def counted_receive(*arguments: Any, **keywords: Any) -> None:
        with CopiesOf() as copies:
            receive(*arguments, **keywords)
        counts["received"] += 1
        counts["copied"] += copies.count

    def counted_forward(*arguments: Any, **keywords: Any) -> None:
        received = [] if pipeline.is_first_stage() else pipeline.pipe_buffers["inputs"]
        with CopiesOf(received) as copies:
            forward(*arguments, **keywords)
        counts["copied"] += copies.count

    pipeline._INSTRUCTION_MAP = {
        **pipeline._INSTRUCTION_MAP,
        schedule.RecvActivation: counted_receive,
        schedule.ForwardPass: counted_forward,
    }
    train(plan, engine, 3)
    return {**counts, "held": sum(output is not None for output in pipeline.pipe_buffers["outputs"])}


def test_no_received_activation_is_copied_and_no_output_is_held() -> None:
    first, last = run_ranks(copies_of_activations, world_size=2)
    assert last["received"] > 0
    assert last["copied"] == 0
    assert first["held"] == last["held"] == 0


def reductions_of_one_replica() -> int:
    """Count how often DeepSpeed reduces over replicas in two steps of a single one."""
    plan, engine = build_engine(tiny_run())
    calls = []
    engine.deepspeed.allreduce_gradients = lambda **_: calls.append(1)
    train(plan, engine, 2)
    return len(calls)


def test_one_replica_reduces_no_gradients() -> None:
    assert run_ranks(reductions_of_one_replica, world_size=1) == [0]
