"""From documents to micro-batches: text sources, tokenizers, the token cache, the sample order."""

from megastable.data.blended import Order
from megastable.data.corpora import BlendedCorpus, Corpus, check_serves_run
from megastable.data.corpus import prepare_corpus
from megastable.data.dataset import TokenDataset
from megastable.data.micro_batches import (
    MicroBatch,
    evaluation_micro_batches,
    has_tokens_to_learn,
    num_evaluation_micro_batches,
    samples_at,
    training_micro_batches,
)
from megastable.data.sample_order import SampleOrder

__all__ = [
    "BlendedCorpus",
    "Corpus",
    "MicroBatch",
    "Order",
    "SampleOrder",
    "TokenDataset",
    "check_serves_run",
    "evaluation_micro_batches",
    "has_tokens_to_learn",
    "num_evaluation_micro_batches",
    "prepare_corpus",
    "samples_at",
    "training_micro_batches",
]
