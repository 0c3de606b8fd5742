"""Saves the checkpoints of a run, and says how each save has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from megastable.checkpoints.manifest import Manifest, in_skips
from megastable.core.errors import UserError
from megastable.core.records import Event, TrainingState
from megastable.engine.checkpoint import RunRecord, load_newest
from megastable.engine.checkpoint_writer import CheckpointWriter, SaveOutcome
from megastable.engine.model_state import ModelState
from megastable.engine.progress import Progress
from megastable.monitors import Monitors
from megastable.planning.run_plan import RunPlan
from megastable.training.continuation import reads_the_same
from megastable.training.recorder import Recorder, SilentRecorder


class Checkpoints:
    """Feeds the writer with what a checkpoint holds, and the recorder with what became of it.

    Args:
        run: the run file as a dictionary.
        tokenizer: its files, by their names; read beforehand, since a cache may be deleted while the run goes on.

    Attributes:
        last: how the last save of this run has ended; None where none has.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        monitors: Monitors,
        recorder: Recorder | SilentRecorder,
        run: dict[str, Any],
        corpus_fingerprint: str,
        tokenizer: Mapping[str, bytes],
        progress: Progress,
    ) -> None:
        self._writer = writer
        self._monitors = monitors
        self._recorder = recorder
        self._run = run
        self._corpus_fingerprint = corpus_fingerprint
        self._tokenizer = tokenizer
        self._progress = progress
        self._consumed_samples: dict[int, int] = {}
        self.last: SaveOutcome | None = None

    def save(self, state: TrainingState, loss: float | None, eval_loss: float | None) -> None:
        """Begin to save the state as it is, with the losses of its last step; collective."""
        self._consumed_samples[state.step] = state.consumed_samples
        # As JSON will give it back; and a copy, since the monitors go on while it is written.
        monitors = json.loads(json.dumps(self._monitors.state_dict()))
        record = RunRecord(
            state, self._run, self._corpus_fingerprint, monitors, loss, eval_loss, tokenizer=self._tokenizer
        )
        with self._progress.at_length("saving"):
            self._writer.save(record)

    def report(self) -> list[SaveOutcome]:
        """Show and return the saves that have ended since; one that failed is an event, too."""
        outcomes = self._writer.outcomes()
        for outcome in outcomes:
            self._show(outcome)
            self.last = outcome
        return outcomes

    def finish(self) -> list[SaveOutcome]:
        """Wait for a save that is under way, and report as ``report`` does."""
        with self._progress.at_length("waiting for a save"):
            self._writer.wait()
        return self.report()

    def abandon_after(self, step: int) -> str | None:
        """Let no resume go on from the checkpoints of later steps; returns why not, where that fails. Collective."""
        with self._progress.at_length("going back"):
            return self._writer.abandon_after(step)

    def load_newest(self, state: ModelState, plan: RunPlan, before_step: int) -> Manifest | None:
        """Load the newest checkpoint that the run can go back to, with what the monitors remember. Collective.

        Args:
            before_step: look only at checkpoints of lower steps.

        Returns:
            Its manifest; None where there is none.
        """
        seed = plan.run.megastable.training.seed
        why_not = partial(why_not_on_this_layout, plan)
        with self._progress.at_length("going back to a checkpoint"):
            manifest = load_newest(
                self._writer.checkpoints, before_step, state, plan.layout, seed, self._recorder.note, why_not
            )
        if manifest is not None:
            is_same_text = reads_the_same(manifest, plan.run, self._corpus_fingerprint)
            self._monitors.load_state_dict(manifest.monitors, is_same_text)
        return manifest

    def how_to_go_on(self) -> str | None:
        """Say what a resume does with the last save; None where it has failed, or nothing was saved."""
        if self.last is None or self.last.fault is not None:
            return None
        if in_skips(self._monitors.state_dict()):
            return f"{self.last.folder} was saved in a row of skipped steps: --resume takes an older one where it can"
        return f"--resume goes on from {self.last.folder}"

    def _show(self, outcome: SaveOutcome) -> None:
        consumed_samples = self._consumed_samples.pop(outcome.step)
        if outcome.fault is None:
            self._recorder.note(f"saved {outcome.folder}")
        if outcome.warning is not None:
            self._recorder.record_event(Event(outcome.step, consumed_samples, "not_thinned", outcome.warning, {}))
        if outcome.fault is None:
            return
        text = f"no checkpoint of step {outcome.step}: {outcome.fault}"
        data = {"checkpoint": str(outcome.folder), "fault": outcome.fault}
        self._recorder.record_event(Event(outcome.step, consumed_samples, "save_failed", text, data))


def why_not_on_this_layout(plan: RunPlan, manifest: Manifest) -> str | None:
    """Say why the run cannot go on from a checkpoint that is older than its own start; None where it can."""
    # Only the batches that were left at the start had to divide; before that the run may have had another layout.
    try:
        RunPlan.of(plan.run, plan.layout.world_size, manifest.state.to_training_state())
    except UserError as error:
        return f"is of earlier batches, which this layout cannot take: {error}"
    return None
