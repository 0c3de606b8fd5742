"""Builds a run from its parts and trains it: the one place that imports everything."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

from megastable.config.run_config import run_as_dict
from megastable.core.checkpoint_folder import Manifest, read_manifest
from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.core.records import TrainingState
from megastable.data import Corpus, check_serves_run, prepare_corpus
from megastable.engine.checkpoint import load_checkpoint, save_checkpoint
from megastable.engine.device import allow_fp16_on_cpu, check_compiler, check_fp16_support
from megastable.engine.hostfile import check_hostfile
from megastable.engine.node_work import first_on_each_node
from megastable.engine.process_group import check_equal_on_all_ranks, connected, reporting_failures, stop_together
from megastable.engine.training_engine import TrainingEngine
from megastable.monitors import Monitors
from megastable.planning.run_plan import RunPlan
from megastable.training.console import make_display
from megastable.training.loop import train_steps
from megastable.training.metrics import STEP_METRICS
from megastable.training.recorder import Recorder, SilentRecorder
from megastable.training.report import conclusion, introduction
from megastable.training.run_folder import RunFolder, events_of_resume
from megastable.training.run_lock import RunLock


def train(plan: RunPlan, launch: Launch, folder: RunFolder, checkpoint: Path | None, lock: RunLock | None) -> None:
    """Train a planned run in this process, together with the other ranks of the launch.

    Args:
        checkpoint: a complete checkpoint that has been checked against the run, or None for fresh weights.
        lock: that of the folder on rank 0, and None on the others.

    Raises:
        UserError: the launcher's hostfile was not read; the port is taken; the data cannot be read, does not fit the
            model or is not the checkpoint's; fp16 or a C++ compiler is not to be had; two metrics have one name; the
            ranks do not agree on the data or the batches. Nothing is written into the run folder then.
    """
    settings = plan.run.megastable
    check_hostfile()
    check_fp16_support(plan.run)
    check_compiler(plan.run)
    allow_fp16_on_cpu(plan.run)
    monitors = Monitors(plan, STEP_METRICS)
    # A failure ends the process inside of the inner one: leaving the group in order would wait for peers that are gone.
    # The lock is inside of both, so that it is given back before.
    held = nullcontext() if lock is None else lock
    with connected(launch) as peers, reporting_failures(launch.rank, plan.layout, peers), held:
        # After the ranks have met: tokenising may take hours on one node, where another would give up connecting.
        corpus = first_on_each_node(launch.rank, peers, partial(_open_corpus, plan, launch, checkpoint))
        check_equal_on_all_ranks(corpus.fingerprint, "the tokenised corpus of megastable.data")
        check_equal_on_all_ranks(
            settings.batch_rampup.model_dump_json(), "megastable.batch_rampup, with the micro-batch sizes chosen,"
        )
        _train_connected(plan, folder, checkpoint, corpus, monitors, lock)


def _open_corpus(plan: RunPlan, launch: Launch, checkpoint: Path | None) -> Corpus:
    """Tokenise the corpus or find it in the cache, and check it against the run and the checkpoint."""
    settings = plan.run.megastable
    corpus = prepare_corpus(settings.data, settings.model, show_progress=launch.rank == 0)
    check_serves_run(corpus, settings.data, plan.phases[-1].batch.global_batch_size, settings.training.eval_interval)
    if checkpoint is not None:
        check_same_corpus(read_manifest(checkpoint), corpus)
    return corpus


def check_same_corpus(manifest: Manifest, corpus: Corpus) -> None:
    """Refuse to continue a checkpoint on other data: token ids and sample order would mean something else.

    Raises:
        UserError: the tokens or their split are not those that the checkpoint was trained on.
    """
    if manifest.corpus_fingerprint != corpus.fingerprint:
        raise UserError(
            "This run cannot continue the checkpoint: the tokenised corpus of megastable.data is not the one it was "
            "trained on. Text files, tokenizer or (for the source stdlib) Python have changed since."
        )


def _train_connected(
    plan: RunPlan,
    folder: RunFolder,
    checkpoint: Path | None,
    corpus: Corpus,
    monitors: Monitors,
    lock: RunLock | None,
) -> None:
    """Build the engine, bring it to where the run starts from, and train."""
    engine = TrainingEngine(plan.run, plan.layout, plan.ramp, folder.path)
    state = TrainingState()
    if checkpoint is not None:
        state = load_checkpoint(engine, checkpoint)
        monitors.load_state_dict(read_manifest(checkpoint).monitors)
    # Written only now: a run that could not be built leaves the folder of an earlier one as it was.
    stop_together(None if lock is None else lock.begin_writing())
    if lock is not None:
        folder.write_config(plan.run)
    saved_run = run_as_dict(plan.run)

    def save(reached: TrainingState) -> Path:
        return save_checkpoint(
            engine, folder.checkpoints, reached, saved_run, corpus.fingerprint, monitors.state_dict()
        )

    with _make_recorder(plan, folder, lock, engine, state) as recorder:
        # On all ranks, since each has layers of its own; but weights of a checkpoint are not as they were drawn.
        fresh_weights = engine.weight_kinds() if checkpoint is None else []
        for line in introduction(plan, corpus, folder, checkpoint, state, fresh_weights):
            recorder.note(line)
        if checkpoint is not None:
            for event in events_of_resume(folder, checkpoint, plan.run, state):
                recorder.record_event(event)
        last_eval_loss = train_steps(plan, engine, corpus, state, recorder, monitors, save)
        recorder.note(conclusion(corpus, last_eval_loss))


def _make_recorder(
    plan: RunPlan, folder: RunFolder, lock: RunLock | None, engine: TrainingEngine, state: TrainingState
) -> Recorder | SilentRecorder:
    """Make the recorder of this rank, on a run folder that holds nothing of the steps after ``state``."""
    if lock is None:
        return SilentRecorder()
    folder.drop_lines_after(state.step)
    display = make_display(
        plan.length.total_steps,
        plan.length.total_samples,
        state.consumed_samples,
        plan.run.megastable.logging.interval,
    )
    return Recorder(folder, lock, partial(folder.write_config, plan.run), engine.writers, display)
