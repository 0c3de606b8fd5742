"""Runs the passes of a step once more with hooks on, to find the first value that was not finite.

The update of such a step was not applied, so the weights are those it was computed with, and the passes of the same
micro-batches with the same random streams give the same values. Nothing is reduced or updated, so that what arises on
one replica is seen there alone. Afterwards training goes on as if there had been no replay.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megastable.core.labels import IGNORED_LABEL
from megastable.core.layout import ParallelLayout
from megastable.core.records import Culprit
from megastable.data import MicroBatch
from megastable.engine.instructions import Execute, Kind, accumulated_gradient, executed_instead
from megastable.engine.pipeline_module import GptPipeline
from megastable.engine.random_state import random_state, set_random_state
from megastable.model.ends import LogitCap

T = TypeVar("T")

BEFORE_ALL = -1
AFTER_ALL = sys.maxsize
"""They stand for a micro-batch in the order of what is found: weights are there before the first one, and gradients are
summed after the last."""
DATA, FORWARD, BACKWARD = range(3)
"""In the order in which a micro-batch meets them."""


@dataclass(frozen=True, order=True)
class Place:
    """When and where a value came up, in the order of what depends on what.

    Ranks that share a stage call the same modules in the same order, so that ``number`` says which of them was first.
    """

    micro_batch: int
    phase: int
    stages_before: int
    """Whose passes of the micro-batch come earlier: lower stages in a forward pass, higher ones in a backward pass."""
    number: int
    """Of the values that this rank looked at in this pass before."""
    rank: int


class Replay:
    """Finds the first culprit of the last step; ``find`` is collective.

    Args:
        discard_gradients: forgets what the passes have accumulated.
        vocab_size: of the data, in which every token id has to be.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        layout: ParallelLayout,
        discard_gradients: Callable[[], None],
        vocab_size: int,
    ) -> None:
        self._engine = engine
        self._module: GptPipeline = engine.module
        self._layout = layout
        self._discard_gradients = discard_gradients
        self._vocab_size = vocab_size
        self._random: dict[str, Tensor] = {}
        self._micro_offset = 0
        self._found: tuple[Place, Culprit] | None = None
        self._micro_batch = BEFORE_ALL
        self._phase: int | None = None
        self._num_looked_at = 0

    def begin_step(self) -> None:
        """Remember the random streams from which the step begins."""
        self._random = random_state()
        self._micro_offset = self._module.micro_offset

    def find(self, micro_batches: Iterator[MicroBatch] | None) -> Culprit | None:
        """Run the passes of the last step again, and return the first value that is not finite; None where all are.

        Args:
            micro_batches: those of the step, on ranks that need data.
        """
        self._found = None
        self._look_at_weights()
        followed = None if micro_batches is None else self._looked_at(micro_batches)
        with self._as_at_the_beginning(), self._hooked(), executed_instead(self._engine, self._passes_alone):
            engine = self._engine
            if followed is not None:
                engine.set_dataiterator(followed)
            engine.module.train()
            engine.total_loss = None
            engine._compute_loss = True
            engine._exec_schedule(engine._train_schedule())
        culprit = self._first_of_all_ranks()
        if culprit is None:
            self._look_at_sums()
            culprit = self._first_of_all_ranks()
        self._discard_gradients()
        return culprit

    def _first_of_all_ranks(self) -> Culprit | None:
        own: list[tuple[Place, Culprit]] = [] if self._found is None else [self._found]
        findings = self.gathered(own)
        if not findings:
            return None
        _, culprit = min(findings, key=lambda finding: finding[0])
        return culprit

    @staticmethod
    def gathered(own: list[T]) -> list[T]:
        """Join the lists of all ranks, by rank."""
        lists: list[list[T]] = [[]] * dist.get_world_size()
        dist.all_gather_object(lists, own)
        return [entry for of_rank in lists for entry in of_rank]

    @contextlib.contextmanager
    def _as_at_the_beginning(self) -> Iterator[None]:
        """Draw as the step did, and afterwards as if nothing had been drawn."""
        module = self._module
        after = random_state()
        offset_after = module.micro_offset
        set_random_state(self._random)
        module.micro_offset = self._micro_offset
        try:
            yield
        finally:
            set_random_state(after)
            module.micro_offset = offset_after

    def _passes_alone(self, table: Mapping[Kind, Execute]) -> Mapping[Kind, Execute]:
        """Return what is executed instead: passes are followed, and nothing comes of their gradients."""
        ends = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
        return {
            **dict.fromkeys(ends, _do_nothing),
            schedule.ForwardPass: self._followed(table[schedule.ForwardPass], FORWARD),
            schedule.BackwardPass: self._followed(table[schedule.BackwardPass], BACKWARD),
        }

    def _followed(self, execute: Execute, phase: int) -> Execute:
        """Return a pass that notes what it is of; every kind of pass meets the micro-batches in their order."""
        numbers = itertools.count()

        def followed(engine: PipelineEngine, buffer_id: int) -> None:
            self._micro_batch = next(numbers)
            self._phase = phase
            self._num_looked_at = 0
            execute(engine, buffer_id=buffer_id)
            if phase == FORWARD and engine.is_last_stage():
                self._look_at(engine.loss, "loss", "loss")
            self._phase = None

        return followed

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        """Look at what goes into and comes out of every module, and at every gradient."""
        handles: list[RemovableHandle] = []
        for module, name in self._module.module_names().items():
            handles.append(module.register_forward_hook(self._forward_hook(name, module)))
        for parameter, name in self._module.parameter_names().items():
            handles.append(parameter.register_hook(self._gradient_hook(name, "gradient")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward_hook(self, name: str, module: nn.Module) -> Callable[..., None]:
        if isinstance(module, LogitCap):
            # A tied head is no module: its logits pass through that of the embedding.
            name = f"{self._module.layer_names[-1]}.logits"

        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            # Within a backward pass it computes again what was looked at in the forward pass.
            if self._phase == FORWARD:
                for tensor in _tensors(inputs):
                    self._look_at(tensor, name, "input")
                for tensor in _tensors(output):
                    self._look_at(tensor, name, "output")
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(name, "gradient of the output"))

        return hook

    def _gradient_hook(self, name: str, tensor_name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._look_at(gradient, name, tensor_name)

        return hook

    def _look_at(self, tensor: Tensor, name: str, tensor_name: str) -> None:
        assert self._phase is not None
        origin = "forward" if self._phase == FORWARD else "backward"
        self._num_looked_at += 1
        if tensor.is_floating_point():
            # A hook of autograd's own on the tensor, as recomputation has, must not take this for a use of it.
            self._note(_num_not_finite(tensor.detach()), tensor.numel(), origin, name, tensor_name)

    def _look_at_weights(self) -> None:
        self._micro_batch = BEFORE_ALL
        self._phase = FORWARD
        for number, (parameter, name) in enumerate(self._module.parameter_names().items()):
            self._num_looked_at = number
            self._note(_num_not_finite(parameter.detach()), parameter.numel(), "weights", name, "weight")
        self._phase = None

    def _look_at_sums(self) -> None:
        """Look at gradients that are finite one by one: summed over the micro-batches, then over the replicas."""
        self._micro_batch = AFTER_ALL
        self._phase = BACKWARD
        self._num_looked_at = 0
        replicas = self._engine.grid.get_data_parallel_group()
        for parameter, name in self._module.parameter_names().items():
            # Of a parameter that took no part there is none, on any replica.
            gradient = accumulated_gradient(parameter)
            if gradient is not None:
                self._look_at(gradient, name, "gradient summed over the micro-batches")
                total = gradient.clone()
                dist.all_reduce(total, group=replicas)
                self._look_at(total, name, "gradient summed over the replicas")
        self._phase = None

    def _looked_at(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Pass micro-batches on, and look for ids that the vocabulary does not have."""
        for number, micro_batch in enumerate(micro_batches):
            ids, (labels, _) = micro_batch
            self._micro_batch, self._phase, self._num_looked_at = number, DATA, 0
            outside = (ids < 0) | (ids >= self._vocab_size)
            self._note(int(outside.sum()), ids.numel(), "data", "token ids", "ids outside of the vocabulary")
            outside = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= self._vocab_size))
            self._note(int(outside.sum()), labels.numel(), "data", "labels", "ids outside of the vocabulary")
            self._phase = None
            yield micro_batch

    def _note(self, num_bad: int, num_elements: int, origin: str, name: str, tensor_name: str) -> None:
        """Keep a value that is at fault, unless an earlier one is known on this rank."""
        if num_bad == 0:
            return
        assert self._phase is not None
        stage: int = self._engine.grid.get_stage_id()
        before = self._layout.num_stages - 1 - stage if self._phase == BACKWARD else stage
        place = Place(self._micro_batch, self._phase, before, self._num_looked_at, dist.get_rank())
        if self._found is not None and self._found[0] <= place:
            return
        layer, _, module = name.partition(".")
        culprit = Culprit(
            origin=origin,
            layer=layer,
            module=module,
            tensor=tensor_name,
            num_bad=num_bad,
            num_elements=num_elements,
            rank=dist.get_rank(),
            stage=stage,
            replica=self._engine.grid.get_data_parallel_id(),
            tensor_rank=self._engine.grid.get_tensor_model_parallel_rank(),
            micro_batch=None if self._micro_batch in (BEFORE_ALL, AFTER_ALL) else self._micro_batch,
        )
        self._found = (place, culprit)


def _do_nothing(engine: PipelineEngine) -> None:
    """Stand for an instruction that a replay leaves out."""


def _num_not_finite(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    # What is finite, as nearly everything is, is seen without a mask of the tensor's size: both ends are numbers then.
    ends = torch.stack(torch.aminmax(tensor))
    if bool(ends.isfinite().all()):
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [part for part in value if isinstance(part, Tensor)] if isinstance(value, tuple) else []
