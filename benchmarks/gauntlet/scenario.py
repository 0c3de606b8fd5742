"""What a scenario of the gauntlet is: a run, one fault, and what has to come of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gauntlet.base import Changes

# The rank processes alone load torch.
if TYPE_CHECKING:
    from gauntlet.live import Live

Recovery = Literal["in the run", "by a resume", "by the user"]
"""How the run is to come back from the fault.

in the run: without a person, and to its end. by a resume: it ends by itself with the exit code of its kind, and
``--resume=auto``, as a launcher that restarts would have it, goes on without the fault. by the user: the run file or
the program is at fault, which no trainer can mend; it has to say what, and that is all that is scored.
"""


@dataclass(frozen=True)
class Scenario:
    """One fault in one run.

    Attributes:
        fault: in words, for the table.
        injected_step: before which the fault acts first; 0 where it is in the run file.
        detects: what the first event or line of the fault looks like, ``kind: text``.
        names: what an event or line has to look like that names the culprit, and nobody else.
        inject: called in every rank with the objects of its run, before its first step.
        changes: of the base run, with and without the fault.
        faulty_changes: of the faulty run file alone.
        signal: sent to one rank from outside, once ``injected_step`` is done.
        compares: whether OLMo-core's rule and no guard are played on the same fault; of no use where they say nothing.
        resumes_on_changes: whether the fault is that the run is resumed on ``faulty_changes``.
    """

    name: str
    fault: str
    injected_step: int
    detects: str
    names: str
    recovery: Recovery
    inject: Callable[[Live], None] | None = None
    world_size: int = 2
    changes: Changes = field(default_factory=dict)
    faulty_changes: Changes = field(default_factory=dict)
    signal: int | None = None
    compares: bool = True
    exit_codes: tuple[int, ...] = (0,)
    """That the first start of the faulty run may end with."""
    resumes_on_changes: bool = False

    @property
    def is_resumed(self) -> bool:
        """Tell whether the run is started a second time."""
        return self.recovery == "by a resume" or self.resumes_on_changes

    def is_detected_by(self, line: str) -> bool:
        """Tell whether an event or a printed line tells of this fault."""
        return re.search(self.detects, line) is not None

    def is_named_by(self, line: str) -> bool:
        """Tell whether an event or a printed line names the culprit."""
        return re.search(self.names, line) is not None
