"""Lets every stage know the documents of the micro-batch that it passes forward, where packing resets at them.

They follow from the token ids, which every rank reads for itself: micro-batches are a pure function of the consumed
position, so that nothing more has to travel between the stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megastable.data import MicroBatch
from megastable.engine.pipeline_module import GptPipeline
from megastable.model.documents import Documents


class PackedDocuments:
    """Follows the micro-batches of a step, and sets the documents of each around its forward pass.

    Args:
        module: the stage, whose layers read the documents.
        end_of_document: the token after which another document begins.
    """

    def __init__(self, module: GptPipeline, end_of_document: int) -> None:
        self._scope = module.documents
        self._end_of_document = end_of_document
        self._micro_batches: Iterator[MicroBatch] = iter(())
        self._loaded: deque[Tensor] = deque()

    def following(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Return the micro-batches of a step or an evaluation, for DeepSpeed to load where a stage needs them."""
        self._loaded.clear()
        self._micro_batches = self._noted(micro_batches)
        return self._micro_batches

    def _noted(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            self._loaded.append(micro_batch[0])
            yield micro_batch

    def read_in(self, execute: Callable[..., None]) -> Callable[..., None]:
        """Return a forward pass that reads the documents of its micro-batch."""

        def forward_pass(engine: PipelineEngine, buffer_id: int) -> None:
            # Between the first and the last stage DeepSpeed loads nothing.
            if not self._loaded:
                next(self._micro_batches)
            token_ids = self._loaded.popleft().to(engine.device)  # (micro-batch, seq)
            with self._scope.reading(Documents(token_ids, self._end_of_document)):
                execute(engine, buffer_id)

        return forward_pass


def recompute_with_documents(module: GptPipeline) -> None:
    """Let blocks that are computed again read the documents of their own micro-batch: later ones have passed since."""
    recompute = module.activation_checkpoint_func

    def recompute_within(function: Callable[..., Any], *arguments: Any) -> Any:
        return recompute(module.documents.kept(function), *arguments)

    module.activation_checkpoint_func = recompute_within
