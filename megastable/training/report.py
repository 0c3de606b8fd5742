"""Writes the lines with which a run begins and ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from megastable.checkpoints.thinning import what_stays
from megastable.core.records import TrainingState
from megastable.data import BlendedCorpus, Corpus
from megastable.engine.layer_statistics import WeightKind
from megastable.planning.memory import host_copies
from megastable.planning.micro_batches import describe_choice
from megastable.planning.preflight.preflight import findings_of
from megastable.planning.preflight.review import Review
from megastable.planning.run_plan import RunPlan
from megastable.training.run_folder import RunFolder


def introduction(
    plan: RunPlan,
    corpus: Corpus | BlendedCorpus,
    folder: RunFolder,
    checkpoint: Path | None,
    state: TrainingState,
    weights: list[WeightKind],
) -> Iterator[str]:
    """Yield lines that say what is about to be trained, on what, for how long, and where it is written."""
    layout = plan.layout
    model = plan.run.megastable.model
    yield f"run folder {folder.path}"
    yield (
        f"layout {layout.num_stages} stages x {layout.data_parallel_size} replicas x {layout.tensor_parallel_size} "
        f"tensor ranks = {layout.world_size} processes"
    )
    if layout.num_stages > 1:
        yield f"stages: {plan.cut}"
    yield (
        f"model {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size} (padded to {model.padded_vocab_size})"
    )
    yield from _data_lines(plan, corpus)
    if plan.run.megastable.data.resets_at_documents:
        yield f"packing: attention and positions begin anew with every document, at token {corpus.eod_id}"
    yield f"tokenizer of {corpus.vocab_size:,} tokens in {corpus.tokenizer_path}"
    yield from _plan_lines(plan)
    yield _kept(plan, folder)
    yield _guarded(plan)
    yield str(host_copies(plan))
    yield (
        f"references: ln(vocabulary) = {math.log(model.vocab_size):.4f} is the loss of a model that knows nothing, "
        f"{corpus.unigram_entropy_nats:.4f} of one that knows how frequent each token is"
    )
    if checkpoint is not None:
        yield f"continues {checkpoint} at step {state.step}"
    else:
        yield from _reviewed(plan)
        yield from _fresh_weights(plan, weights)


def _reviewed(plan: RunPlan) -> Iterator[str]:
    """Yield what ``megastable check`` warns of in the run file, so that it is told also where nobody has asked."""
    review = Review.of(plan, world_size_was_assumed=False, gpus=(), text=None)
    for finding in findings_of(review):
        if finding.level != "note":
            yield f"review: {finding.level} {finding.key}: {finding.message}; instead: {finding.suggestion}"


def _data_lines(plan: RunPlan, corpus: Corpus | BlendedCorpus) -> Iterator[str]:
    """Yield how much text there is, of a blend in each source, and how often the run reads it."""
    tokens = f"data {corpus.num_train_tokens:,} training and {corpus.num_validation_tokens:,} validation tokens"
    if corpus.samples_per_epoch is not None:
        yield f"{tokens}, {corpus.samples_per_epoch:,} training samples an epoch"
        return
    yield f"{tokens} in {len(corpus.parts)} sources:"
    for name, (share, part) in corpus.parts.items():
        passes = plan.length.total_samples * share / len(part.train)
        yield (
            f"  {name} {share:.2%} of the samples: {part.num_train_tokens:,} training and "
            f"{part.num_validation_tokens:,} validation tokens, read {passes:.2f} times"
        )


def _plan_lines(plan: RunPlan) -> Iterator[str]:
    """Yield the length of the run, and what makes it slower or shorter than its reader may expect."""
    settings = plan.run.megastable
    sizes = sorted({phase.batch.global_batch_size for phase in plan.phases})
    batch = f"{sizes[0]}"
    if len(sizes) > 1:
        batch = f"{sizes[0]} to {sizes[-1]} in {len(plan.phases)} phases"
    length = plan.length
    yield f"plan {length.total_steps:,} steps, {length.total_samples:,} samples, global batch {batch}"
    if settings.batch_rampup.chooses_micro_batch_sizes:
        yield describe_choice(plan)
    warmup = plan.lr_schedule.warmup_samples
    if warmup > length.last_step_start:  # no step starts at or past its end, so that none has the full learning rate
        yield f"the warmup of {warmup:,} samples does not end within this run"
    if plan.run.fp16.enabled and settings.training.fp16_on_cpu:
        yield "fp16 on a CPU as megastable.training.fp16_on_cpu allows: its arithmetic is slow"
    if settings.model.compile:
        yield "compiles every block (megastable.model.compile): the first steps are slow"


def _kept(plan: RunPlan, folder: RunFolder) -> str:
    """Say which checkpoints the run will keep."""
    interval = plan.run.megastable.checkpoint.save_interval
    if interval is None:
        return "keeps no checkpoint (megastable.checkpoint.save_interval is null): the weights are lost at the end"
    if interval == 0:
        return f"keeps one checkpoint, after the last step, in {folder.checkpoints}"
    saved = f"keeps checkpoints every {interval:,} steps and after the last, in {folder.checkpoints}"
    return f"{saved}{what_stays(plan.run.megastable.checkpoint)}"


def _guarded(plan: RunPlan) -> str:
    """Say what becomes of a step that stands out."""
    done = {
        "warn": "it is told, and applied all the same",
        "skip": "its update is not applied",
        "rollback": "its update is not applied, and where the loss jumped or rises the run goes back past its samples",
        "stop": "the run stops",
    }
    guard = plan.run.megastable.stability.guard
    return f"guard {guard}: where a step stands out, {done[guard]}"


def _fresh_weights(plan: RunPlan, weights: list[WeightKind]) -> Iterator[str]:
    """Yield the init scheme, and for every kind of weight the std by its formula beside the measured one."""
    init = plan.run.megastable.init
    scaled = ", projections into the residual stream over sqrt(2 layers)" if init.residual_scaling else ""
    yield f"starts from fresh weights: scheme {init.scheme}{scaled}; std by formula (measured):"
    for kind in weights:
        yield f"  {kind.name} {kind.formula_std:.5f} ({kind.measured_std:.5f})"


def conclusion(corpus: Corpus | BlendedCorpus, last_eval_loss: float | None) -> str:
    """Say how far the run got, beside what a model without context would reach."""
    loss = "" if last_eval_loss is None else f"validation loss {last_eval_loss:.4f}; "
    return (
        f"done: {loss}unigram entropy of the text {corpus.unigram_entropy_nats:.4f} nats per token "
        "(a loss below it has learned from context)"
    )
