"""The live objects of a rank's run, and the moments at which a fault may touch them. Nothing of the trainer knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from megastable.data import MicroBatch
from megastable.training import loop

Deed = Callable[[], None]
Replaced = Callable[[Callable[[int], Iterator[MicroBatch]], int], Iterator[MicroBatch]]


class Live:
    """Holds what a fault may touch on this rank.

    Attributes:
        rank: of this process.
        engine: the run's training engine.
        step: that is taken, or was last. Those that are taken twice count twice, so that a fault that lasts for some
            steps is over when a run has gone back.
    """

    def __init__(self, running: Any) -> None:
        self.rank = int(os.environ["RANK"])
        self.engine = running._engine
        self.step = 0
        self._due: dict[str, list[tuple[int, int, Deed]]] = {"before": [], "after": []}

    def before(self, first: int, last: int, deed: Deed) -> None:
        """Let ``deed`` be done before every step from ``first`` to ``last``."""
        self._due["before"].append((first, last, deed))

    def after(self, first: int, last: int, deed: Deed) -> None:
        """Let ``deed`` be done after the update of every step from ``first`` to ``last``."""
        self._due["after"].append((first, last, deed))

    def do(self, when: str) -> None:
        """Do what is due ``before`` or ``after`` the step."""
        for first, last, deed in self._due[when]:
            if first <= self.step <= last:
                deed()

    def lasts(self, first: int, last: int) -> bool:
        """Tell whether the step is one from ``first`` to ``last``."""
        return first <= self.step <= last

    def replace_data(self, first: int, after: int, replaced: Replaced) -> None:
        """Let the steps that begin at positions from ``first`` to below ``after`` read other micro-batches.

        Args:
            replaced: is given a function that reads the micro-batches of any position, and the step's own position.
        """
        original = vars(loop)["training_micro_batches"]

        def read(dataset: Any, order: Any, batch: Any, position: int, *rest: Any) -> Iterator[MicroBatch]:
            def at(other: int) -> Iterator[MicroBatch]:
                found: Iterator[MicroBatch] = original(dataset, order, batch, other, *rest)
                return found

            return replaced(at, position) if first <= position < after else at(position)

        vars(loop).update(training_micro_batches=read)

    @property
    def module(self) -> Any:
        """Return this rank's stage of the model."""
        return self.engine.deepspeed.module

    @property
    def layers(self) -> list[nn.Module]:
        """Return the layers of this rank's stage that are modules; a tied head is a function."""
        return [layer for layer in self.module.forward_funcs if isinstance(layer, nn.Module)]

    def weights(self, begins: str) -> list[Tensor]:
        """Return what is computed with of the same parameters as ``parameters``."""
        return [parameter.detach() for parameter in self.parameters(begins).values()]

    def parameters(self, begins: str) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank whose names in the whole model begin so."""
        names = self.module.parameter_names()
        return {name: parameter for parameter, name in names.items() if name.startswith(begins)}

    def masters(self, begins: str) -> list[Tensor]:
        """Return this rank's parts of the fp32 masters of the parameters whose names begin so."""
        return [part for part, _ in self._states(begins, "")]

    def moments(self, begins: str, kind: str) -> list[Tensor]:
        """Return the same parts of one of Adam's moments."""
        return [part for _, part in self._states(begins, kind)]

    def follow_masters(self) -> None:
        """Round the masters to the weights that are computed with; collective."""
        self.engine.model_state.weights_follow_masters()

    def _states(self, begins: str, kind: str) -> list[tuple[Tensor, Tensor]]:
        found = []
        state = self.engine.model_state
        for partition, flats in zip(state.partitions, state.flats(), strict=True):
            for held in partition.held:
                if held.name.startswith(begins):
                    start, stop = held.span
                    master = partition.master.detach()[start:stop]
                    found.append((master, flats[kind][start:stop] if kind else master))
        return found


def install(inject: Callable[[Live], None]) -> None:
    """Let ``inject`` have the objects of the run that this process is about to make."""
    kind = vars(loop)["TrainingLoop"]
    run, take_step = kind.run, kind._take_step

    def run_injected(self: Any, state: Any) -> Any:
        live = Live(self)
        live.step = state.step
        inject(live)

        def take_injected(state: Any) -> Any:
            live.step += 1
            live.do("before")
            seen = take_step(self, state)
            live.do("after")
            return seen

        self._take_step = take_injected
        return run(self, state)

    kind.run = run_injected
