"""The lines with which a run begins and ends."""

from __future__ import annotations

import math
from pathlib import Path

from megastable.core.records import TrainingState
from megastable.data import Corpus
from megastable.engine.layer_statistics import WeightKind
from megastable.planning.micro_batches import describe_choice
from megastable.planning.run_plan import RunPlan
from megastable.training.run_folder import RunFolder


def introduction(
    plan: RunPlan,
    corpus: Corpus,
    folder: RunFolder,
    checkpoint: Path | None,
    state: TrainingState,
    weights: list[WeightKind],
) -> list[str]:
    """What is about to be trained, on what, for how long, and where it is written."""
    layout, model, length = plan.layout, plan.run.megastable.model, plan.length
    sizes = sorted({phase.batch.global_batch_size for phase in plan.phases})
    batch = f"{sizes[0]} to {sizes[-1]} in {len(plan.phases)} phases" if len(sizes) > 1 else f"{sizes[0]}"
    warmup = plan.lr_schedule.warmup_samples
    short_run = warmup > length.last_step_start
    slow_fp16 = plan.run.fp16.enabled and plan.run.megastable.training.fp16_on_cpu
    return [
        f"run folder {folder.path}",
        f"layout {layout.num_stages} stages x {layout.data_parallel_size} replicas x {layout.tensor_parallel_size} "
        f"tensor ranks = {layout.world_size} processes",
        *([f"stages: {plan.cut}"] if layout.num_stages > 1 else []),
        f"model {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, "
        f"sequence {model.seq_length}, vocabulary {model.vocab_size} (padded to {model.padded_vocab_size})",
        f"data {corpus.num_train_tokens:,} training and {corpus.num_validation_tokens:,} validation tokens, "
        f"{len(corpus.train):,} training samples an epoch",
        f"tokenizer of {corpus.vocab_size:,} tokens in {corpus.tokenizer_path}",
        f"plan {length.total_steps:,} steps, {length.total_samples:,} samples, global batch {batch}",
        *([describe_choice(plan)] if plan.run.megastable.batch_rampup.chooses_micro_batch_sizes else []),
        *([f"the warmup of {warmup:,} samples does not end within this run"] if short_run else []),
        *(["fp16 on a CPU as megastable.training.fp16_on_cpu allows: its arithmetic is slow"] if slow_fp16 else []),
        *(["compiles every block (megastable.model.compile): the first steps are slow"] if model.compile else []),
        f"references: ln(vocabulary) = {math.log(model.vocab_size):.4f} is the loss of a model that knows nothing, "
        f"{corpus.unigram_entropy_nats:.4f} of one that knows how frequent each token is",
        *([f"continues {checkpoint} at step {state.step}"] if checkpoint else fresh_weights(plan, weights)),
    ]


def fresh_weights(plan: RunPlan, weights: list[WeightKind]) -> list[str]:
    """The init scheme, and for every kind of weight the std by its formula beside the measured one."""
    init = plan.run.megastable.init
    scaled = ", projections into the residual stream over sqrt(2 layers)" if init.residual_scaling else ""
    return [
        f"starts from fresh weights: scheme {init.scheme}{scaled}; std by formula (measured):",
        *(f"  {kind.name} {kind.formula_std:.5f} ({kind.measured_std:.5f})" for kind in weights),
    ]


def conclusion(corpus: Corpus, last_eval_loss: float | None) -> str:
    """How far the run got, beside what a model without context would reach."""
    loss = "" if last_eval_loss is None else f"validation loss {last_eval_loss:.4f}; "
    return (
        f"done: {loss}unigram entropy of the text {corpus.unigram_entropy_nats:.4f} nats per token "
        "(a loss below it has learned from context)"
    )
