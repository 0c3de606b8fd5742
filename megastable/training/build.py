"""Builds a run from its parts and trains it: the one place that imports everything."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from megastable.checkpoints.folder import clean_up
from megastable.checkpoints.tokenizer_files import read_tokenizer_files
from megastable.config.run_config import run_as_dict
from megastable.core.launch import Launch
from megastable.core.records import FRESH, Event, TrainingState
from megastable.data import BlendedCorpus, Corpus, check_serves_run, prepare_corpus
from megastable.engine.checkpoint import load_checkpoint, shared_faults
from megastable.engine.checkpoint_writer import CheckpointWriter
from megastable.engine.device import allow_fp16_on_cpu, check_compiler, check_fp16_support
from megastable.engine.hang_watch import hangs_watched
from megastable.engine.hostfile import check_hostfile
from megastable.engine.node_work import first_on_each_node
from megastable.engine.process_group import check_equal_on_all_ranks, connected, reporting_failures, stop_together
from megastable.engine.progress import Progress
from megastable.engine.stop_request import StopRequest, listening
from megastable.engine.training_engine import TrainingEngine
from megastable.engine.writers import rewind_writers
from megastable.monitors import Monitors
from megastable.training.console import make_display
from megastable.training.continuation import check_same_corpus, events_of_resume, reads_the_same
from megastable.training.loop import TrainingLoop
from megastable.training.metrics import STEP_METRICS
from megastable.training.output import report_on_stderr
from megastable.training.recorder import Recorder, SilentRecorder
from megastable.training.report import conclusion, introduction
from megastable.training.run_folder import RunFolder
from megastable.training.run_lock import RunLock
from megastable.training.saving import Checkpoints
from megastable.training.start import Start


def train(start: Start, launch: Launch, folder: RunFolder, lock: RunLock | None) -> None:
    """Train a planned run in this process, together with the other ranks of the launch.

    Args:
        lock: that of the folder on rank 0, and None on the others.

    Raises:
        UserError: the launcher's hostfile was not read; the port is taken; no checkpoint is whole; the data cannot be
            read, does not fit the model or is not the checkpoint's; fp16 or a C++ compiler is not to be had; two
            metrics have one name; the ranks do not agree on the checkpoint, the data or the batches. Nothing is written
            into the run folder then.
        AskedToStopError: the run was asked to stop.
    """
    run = start.plan.run
    check_hostfile()
    check_fp16_support(run)
    check_compiler(run)
    allow_fp16_on_cpu(run)
    monitors = Monitors(start.plan, STEP_METRICS)
    # A failure ends the process inside of the inner one: leaving the group in order would wait for peers that are gone.
    # The lock is inside of both, so that it is given back before.
    held = nullcontext() if lock is None else lock
    stop = StopRequest.of_this_process(launch.rank, run.megastable.training.time_limit)
    progress = Progress()
    with (
        listening(stop),
        connected(launch) as peers,
        reporting_failures(launch.rank, start.plan.layout, peers, stop),
        hangs_watched(launch, start.plan.layout, peers, progress, run.megastable.training.hang_timeout),
        held,
    ):
        with progress.at_length("verifying the checkpoint"):
            whole = _whole_start(start)
        if whole is not start:
            monitors = Monitors(whole.plan, STEP_METRICS)
            start = whole
        # After the ranks have met: tokenising may take hours on one node, where another would give up connecting.
        corpus = first_on_each_node(launch.rank, peers, progress, partial(_open_corpus, start, launch))
        check_equal_on_all_ranks(corpus.fingerprint, "the tokenised corpus of megastable.data")
        check_equal_on_all_ranks(
            start.plan.run.megastable.batch_rampup.model_dump_json(),
            "megastable.batch_rampup, with the micro-batch sizes chosen,",
        )
        _train_connected(start, folder, corpus, monitors, stop, progress, lock)


def _whole_start(start: Start) -> Start:
    """Go back to the newest checkpoint whose files have their checksums; collective."""
    while start.checkpoint is not None and start.manifest is not None:
        # A node may see the files of a shared folder late, and would start from step 0 where the others go on.
        check_equal_on_all_ranks(start.manifest.model_dump_json(), "the checkpoint that the run goes on from")
        faults = shared_faults(start.checkpoint, start.manifest)
        if not faults:
            return start
        start = start.older(faults)
    check_equal_on_all_ranks("", "the checkpoint that the run goes on from")
    return start


def _open_corpus(start: Start, launch: Launch) -> Corpus | BlendedCorpus:
    """Tokenise the corpus or find it in the cache, and check it against the run and the checkpoint."""
    plan = start.plan
    settings = plan.run.megastable
    corpus = prepare_corpus(settings.data, settings.model, show_progress=launch.rank == 0)
    check_serves_run(corpus, settings.data, plan.phases[-1].batch.global_batch_size, settings.training.eval_interval)
    if start.manifest is not None:
        warn = report_on_stderr if launch.rank == 0 else _say_nothing
        check_same_corpus(start.manifest, corpus.fingerprint, start.allowed_changes, warn)
    return corpus


def _say_nothing(text: str) -> None:
    """Leave a warning to rank 0."""


def _train_connected(
    start: Start,
    folder: RunFolder,
    corpus: Corpus | BlendedCorpus,
    monitors: Monitors,
    stop: StopRequest,
    progress: Progress,
    lock: RunLock | None,
) -> None:
    """Build the engine, bring it to where the run starts from, and train."""
    plan = start.plan
    settings = plan.run.megastable
    with progress.at_length("building the engine"):
        engine = TrainingEngine(
            plan.run,
            plan.layout,
            plan.ramp,
            folder.path,
            plan.phases[0].first_sample,
            lambda: stop.is_made,
            progress,
            corpus.eod_id if settings.data.resets_at_documents else None,
        )
    state = FRESH
    if start.checkpoint is not None and start.manifest is not None:
        with progress.at_length("loading the checkpoint"):
            state = load_checkpoint(
                start.checkpoint, start.manifest, engine.model_state, plan.layout, settings.training.seed
            )
        monitors.load_state_dict(start.manifest.monitors, reads_the_same(start.manifest, plan.run, corpus.fingerprint))
    # Written only now: a run that could not be built leaves the folder of an earlier one as it was.
    stop_together(None if lock is None else lock.begin_writing())
    if lock is not None:
        folder.write_config(plan.run)
        clean_up(folder.checkpoints)
    loss = (lambda: None) if lock is None else lock.loss
    writer = CheckpointWriter(folder.checkpoints, engine.model_state, plan.layout, settings.checkpoint, loss)

    with _make_recorder(start, folder, lock, engine, state) as recorder:
        # On all ranks, since each has layers of its own; but weights of a checkpoint are not as they were drawn.
        fresh_weights = engine.weight_kinds() if start.checkpoint is None else []
        for line in introduction(plan, corpus, folder, start.checkpoint, state, fresh_weights):
            recorder.note(line)
        if start.checkpoint is not None and start.manifest is not None:
            for event in events_of_resume(
                start.checkpoint, start.manifest, plan.run, plan.layout, corpus.fingerprint, folder.checkpoints
            ):
                recorder.record_event(event)
        checkpoints = Checkpoints(
            writer,
            monitors,
            recorder,
            run_as_dict(plan.run),
            corpus.fingerprint,
            # The others write none of it.
            {} if lock is None else read_tokenizer_files(corpus.tokenizer_path),
            progress,
        )
        loop = TrainingLoop(plan, engine, corpus, recorder, monitors, checkpoints, stop, folder)
        recorder.note(conclusion(corpus, loop.run(state)))


def _make_recorder(
    start: Start, folder: RunFolder, lock: RunLock | None, engine: TrainingEngine, state: TrainingState
) -> Recorder | SilentRecorder:
    """Make the recorder of this rank, on a run folder that holds nothing of the steps after ``state``."""
    if lock is None:
        return SilentRecorder()
    plan = start.plan
    goes_on = folder.holds_run
    unreadable = folder.drop_lines_after(state.step)
    if goes_on:
        try:
            rewind_writers(engine.writers, state.consumed_samples)
        except OSError as error:
            report_on_stderr(f"a writer of DeepSpeed's holds later steps twice ({error}); the run goes on")
    display = make_display(
        plan.length.total_steps,
        plan.length.total_samples,
        state.consumed_samples,
        plan.run.megastable.logging.interval,
    )
    recorder = Recorder(folder, lock, partial(folder.write_config, plan.run), engine.writers, display)
    if goes_on and start.checkpoint is None:
        recorder.record_event(Event(0, 0, "restart", "starts again from step 0: no checkpoint was saved before", {}))
    for text in unreadable:
        recorder.record_event(Event(state.step, state.consumed_samples, "set_aside", text, {}))
    return recorder
