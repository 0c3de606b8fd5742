"""Builds a run from its parts and trains it: the one place that imports everything."""

from __future__ import annotations

import math
from pathlib import Path

from megastable.core.errors import UserError
from megastable.core.launch import Launch
from megastable.core.records import TrainingState
from megastable.data import Corpus, prepare_corpus
from megastable.engine.checkpoint import load_checkpoint, save_checkpoint
from megastable.engine.failure import report_and_exit
from megastable.engine.process_group import Peer, connected
from megastable.engine.training_engine import TrainingEngine
from megastable.engine.upstream_fixes import check_fp16_support
from megastable.training.console import make_display
from megastable.training.loop import train_steps
from megastable.training.recorder import Recorder, SilentRecorder
from megastable.training.run_folder import RunFolder, run_as_dict
from megastable.training.run_plan import RunPlan


def train(plan: RunPlan, launch: Launch, folder: RunFolder, checkpoint: Path | None) -> None:
    """Train a planned run in this process, together with the other ranks of the launch.

    Args:
        checkpoint: a complete checkpoint that has been checked against the run, or None for fresh weights.

    Raises:
        UserError: fp16 is not to be had, or the data cannot be read or does not fit the model; raised on every rank,
            before they connect.
    """
    settings = plan.run.megastable
    check_fp16_support(plan.run)
    corpus = prepare_corpus(settings.data, settings.model, show_progress=launch.rank == 0)
    if launch.rank == 0:
        folder.write_config(plan.run)
    peers: list[Peer] = []
    try:
        with connected(launch) as members:
            peers.extend(members)
            _train_connected(plan, launch, folder, checkpoint, corpus)
    except UserError:
        raise
    except Exception as error:
        report_and_exit(error, launch.rank, plan.layout, peers)


def _train_connected(plan: RunPlan, launch: Launch, folder: RunFolder, checkpoint: Path | None, corpus: Corpus) -> None:
    engine = TrainingEngine(plan.run, plan.layout, plan.ramp, folder.path)
    state = TrainingState()
    if checkpoint is not None:
        state = load_checkpoint(engine, checkpoint)
    recorder = _make_recorder(plan, launch, folder, engine, state)
    with recorder:
        for line in _introduction(plan, corpus, folder, checkpoint, state):
            recorder.note(line)
        saved_run = run_as_dict(plan.run)
        last_eval_loss = train_steps(
            plan,
            engine,
            corpus,
            state,
            recorder,
            save=lambda reached: save_checkpoint(engine, folder.checkpoints, reached, saved_run),
        )
        recorder.note(_conclusion(corpus, last_eval_loss))


def _make_recorder(
    plan: RunPlan, launch: Launch, folder: RunFolder, engine: TrainingEngine, state: TrainingState
) -> Recorder | SilentRecorder:
    if launch.rank != 0:
        return SilentRecorder()
    folder.drop_metrics_after(state.step)
    display = make_display(
        plan.length.total_steps,
        plan.length.total_samples,
        state.consumed_samples,
        plan.run.megastable.logging.interval,
    )
    return Recorder(folder.metrics, engine.writers, display)


def _introduction(
    plan: RunPlan, corpus: Corpus, folder: RunFolder, checkpoint: Path | None, state: TrainingState
) -> list[str]:
    layout, model, length = plan.layout, plan.run.megastable.model, plan.length
    first, last = plan.phases[0].batch, plan.phases[-1].batch
    return [
        f"run folder {folder.path}",
        f"layout {layout.num_stages} stages x {layout.data_parallel_size} replicas = {layout.world_size} processes",
        f"model {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size} (padded to {model.padded_vocab_size})",
        f"data {corpus.num_train_tokens:,} training and {corpus.num_validation_tokens:,} validation tokens, "
        f"{len(corpus.train):,} training samples an epoch",
        f"plan {length.total_steps:,} steps, {length.total_samples:,} samples, global batch "
        f"{first.global_batch_size} to {last.global_batch_size} in {len(plan.phases)} phases",
        *_warnings(plan),
        f"at the start the loss of a model that knows nothing is ln(vocabulary) = {math.log(model.vocab_size):.4f}",
        f"continues {checkpoint} at step {state.step}" if checkpoint else "starts from fresh weights",
    ]


def _warnings(plan: RunPlan) -> list[str]:
    slow = plan.run.fp16.enabled and plan.run.megastable.training.fp16_on_cpu
    return ["megastable.training.fp16_on_cpu: fp16 may run on a CPU, where its arithmetic is slow"] if slow else []


def _conclusion(corpus: Corpus, last_eval_loss: float | None) -> str:
    loss = "" if last_eval_loss is None else f"validation loss {last_eval_loss:.4f}; "
    return (
        f"done: {loss}unigram entropy of the text {corpus.unigram_entropy_nats:.4f} nats per token "
        "(a loss below it has learned from context)"
    )
