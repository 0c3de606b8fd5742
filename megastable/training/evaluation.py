"""Evaluates a model on the validation text, of a blend on that of each source."""

from __future__ import annotations

import math

from megastable.core.batch_rampup import Batch
from megastable.data import BlendedCorpus, Corpus, TokenDataset, evaluation_micro_batches, num_evaluation_micro_batches
from megastable.engine.training_engine import TrainingEngine
from megastable.planning.run_plan import RunPlan
from megastable.training.metrics import Evaluation


def evaluate(plan: RunPlan, engine: TrainingEngine, corpus: Corpus | BlendedCorpus, batch: Batch) -> Evaluation:
    """Compute the token mean of the validation loss, in micro-batches of the current size. Collective.

    Of a blend every source has its share of the samples, and the loss is the mean of theirs by weight. A source without
    validation text is left out.
    """
    most = plan.run.megastable.training.eval_samples
    if isinstance(corpus, Corpus):
        return Evaluation(_loss(plan, engine, corpus.validation, batch, most))
    losses: dict[str, float] = {}
    weighted = 0.0
    evaluated_share = 0.0
    for name, (share, part) in corpus.parts.items():
        if len(part.validation) == 0:
            continue
        losses[name] = _loss(plan, engine, part.validation, batch, math.ceil(share * most))
        weighted += share * losses[name]
        evaluated_share += share
    return Evaluation(weighted / evaluated_share, losses)


def _loss(plan: RunPlan, engine: TrainingEngine, dataset: TokenDataset, batch: Batch, most_samples: int) -> float:
    size = batch.micro_batch_size  # an evaluation runs through the same pipeline, which is set to this size
    replicas = plan.layout.data_parallel_size
    micro_batches = None  # as in training, the stages between the first and the last read no data
    if engine.needs_data:
        micro_batches = evaluation_micro_batches(dataset, size, most_samples, engine.replica, replicas)
    return engine.evaluate(micro_batches, num_evaluation_micro_batches(dataset, size, most_samples, replicas))
