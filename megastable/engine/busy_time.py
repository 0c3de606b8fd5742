"""How long this rank computes within a step, which shows who keeps the others waiting."""

from __future__ import annotations

import time
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

COMPUTING = (schedule.ForwardPass, schedule.BackwardPass)


class BusyTime:
    """While ``enabled``, adds up the ``seconds`` of forward and backward passes; the device is waited for at each."""

    def __init__(self, engine: PipelineEngine) -> None:
        self.enabled = False
        self.seconds = 0.0
        instructions = engine._INSTRUCTION_MAP
        timed = {kind: self._timed(instructions[kind]) for kind in COMPUTING}
        engine._INSTRUCTION_MAP = {**instructions, **timed}

    def clear(self) -> None:
        """Forget the last step."""
        self.seconds = 0.0

    def _timed(self, execute: Any) -> Any:
        def timed(engine: PipelineEngine, *arguments: Any, **keywords: Any) -> None:
            if not self.enabled:
                execute(engine, *arguments, **keywords)
                return
            get_accelerator().synchronize()
            started = time.perf_counter()
            execute(engine, *arguments, **keywords)
            get_accelerator().synchronize()
            self.seconds += time.perf_counter() - started

        return timed
