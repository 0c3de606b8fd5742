"""What a run reads: one tokenised corpus, or a blend of several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.config import BlendSourceConfig, DataConfig
from megastable.core.blend import Blend
from megastable.core.errors import UserError
from megastable.data.blended import BlendedOrder, JoinedDatasets, Order
from megastable.data.dataset import TokenDataset
from megastable.data.sample_order import SampleOrder


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus, cut into samples of the model's length."""

    train: TokenDataset
    validation: TokenDataset
    """May have length 0."""
    vocab_size: int
    """Size of the tokenizer's vocabulary."""
    eod_id: int
    unigram_entropy_nats: float
    """Entropy of the training tokens: the loss per token of a model that has learned their frequencies alone."""
    fingerprint: str
    """Hash of all tokens and of their split: equal for equal data, on any machine."""
    tokenizer_path: Path
    """A folder with ``tokenizer.json`` that ``transformers.AutoTokenizer`` opens."""

    @property
    def num_train_tokens(self) -> int:
        """Count the tokens of the training documents, with one end-of-document token each."""
        return len(self.train.tokens)

    @property
    def num_validation_tokens(self) -> int:
        """Count the tokens of the validation documents, with one end-of-document token each."""
        return len(self.validation.tokens)

    @property
    def samples_per_epoch(self) -> int | None:
        """Count the training samples, each of which is read once before any is read again."""
        return len(self.train)

    @property
    def has_prompts(self) -> bool:
        """Tell whether some tokens are read and not learned."""
        return self.train.prompts is not None

    @property
    def parts(self) -> Mapping[str, tuple[float, Corpus]]:
        """Return nothing: this is no blend."""
        return {}

    def order(self, seed: int) -> Order:
        """Return which training sample comes when."""
        return SampleOrder(len(self.train), seed)


@dataclass(frozen=True)
class BlendedCorpus:
    """Several corpora of one tokenizer, of which every stretch of a run has its share of samples to within one."""

    parts: Mapping[str, tuple[float, Corpus]]
    """The share of the samples, and the corpus, by the name of the source."""
    blend: Blend
    train: JoinedDatasets
    validation: JoinedDatasets

    @classmethod
    def of(cls, spec: BlendSourceConfig, corpora: Sequence[Corpus]) -> BlendedCorpus:
        """Blend corpora, one for each source of the section."""
        blend = Blend([part.weight for part in spec.sources])
        shares = [weight / blend.period for weight in blend.weights]
        names = [part.name for part in spec.sources]
        return cls(
            dict(zip(names, zip(shares, corpora, strict=True), strict=True)),
            blend,
            JoinedDatasets([corpus.train for corpus in corpora]),
            JoinedDatasets([corpus.validation for corpus in corpora]),
        )

    @property
    def vocab_size(self) -> int:
        """Return the size of the tokenizer's vocabulary."""
        return self._first.vocab_size

    @property
    def eod_id(self) -> int:
        """Return the id that ends a document."""
        return self._first.eod_id

    @property
    def tokenizer_path(self) -> Path:
        """Return a folder that ``transformers.AutoTokenizer`` opens."""
        return self._first.tokenizer_path

    @property
    def unigram_entropy_nats(self) -> float:
        """Return the loss per token of a model that knows the source of a text, and the frequencies of its tokens."""
        return sum(share * corpus.unigram_entropy_nats for share, corpus in self.parts.values())

    @property
    def fingerprint(self) -> str:
        """Return a hash of the tokens of all sources and of their weights, but not of their names."""
        tokens = [corpus.fingerprint for _, corpus in self.parts.values()]
        return hashlib.sha256(json.dumps([self.blend.weights, tokens]).encode()).hexdigest()

    @property
    def num_train_tokens(self) -> int:
        """Count the training tokens of all sources."""
        return sum(corpus.num_train_tokens for _, corpus in self.parts.values())

    @property
    def num_validation_tokens(self) -> int:
        """Count the validation tokens of all sources."""
        return sum(corpus.num_validation_tokens for _, corpus in self.parts.values())

    @property
    def samples_per_epoch(self) -> int | None:
        """Return None: each source has epochs of its own."""
        return None

    @property
    def has_prompts(self) -> bool:
        """Tell whether some tokens of a source are read and not learned."""
        return any(corpus.has_prompts for _, corpus in self.parts.values())

    def order(self, seed: int) -> Order:
        """Return which training sample comes when."""
        return BlendedOrder.of(self.blend, self.train, seed)

    @property
    def _first(self) -> Corpus:
        return next(iter(self.parts.values()))[1]


def check_serves_run(corpus: Corpus | BlendedCorpus, data: DataConfig, largest_batch: int, eval_interval: int) -> None:
    """Refuse a corpus that has less text than a run asks for.

    Args:
        largest_batch: samples of the largest global batch.
        eval_interval: steps between two evaluations; 0 means never.

    Raises:
        UserError: a batch would hold the same sample twice, or there is nothing to evaluate on.
    """
    if isinstance(corpus, BlendedCorpus):
        _check_parts_serve(corpus, largest_batch)
    elif largest_batch > len(corpus.train):
        raise UserError(
            f"megastable.batch_rampup: the largest global batch of {largest_batch:,} samples is larger than the "
            f"training data, which are {len(corpus.train):,} samples: a step would hold the same samples twice; legal "
            f"is at most {len(corpus.train):,}, or more text in megastable.data.source"
        )
    if eval_interval > 0 and len(corpus.validation) == 0:
        raise UserError(
            f"megastable.training.eval_interval: {eval_interval}, but there is no text to evaluate on: none of the "
            f"documents kept for validation (megastable.data.validation_fraction = {data.validation_fraction:g}) has "
            "any, and a single document is for training; legal is 0, or more documents in megastable.data.source"
        )


def _check_parts_serve(corpus: BlendedCorpus, largest_batch: int) -> None:
    """Refuse a source of which one step would hold a sample twice."""
    for index, (name, (_, part)) in enumerate(corpus.parts.items()):
        most = corpus.blend.most_of(index, largest_batch)
        if most > len(part.train):
            raise UserError(
                f"megastable.data.source.sources[{index}]: {name} has {len(part.train):,} training samples, but a "
                f"global batch of {largest_batch:,} may hold {most:,} of it: a step would hold the same samples twice; "
                "give it more text or a smaller weight, or make the largest global batch smaller"
            )
