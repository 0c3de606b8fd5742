"""Documents of words drawn from a seed, for work on throughput: no file is read, and every machine has the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megastable.config import SyntheticSourceConfig
from megastable.data.sample_order import UInt64Array, hash64

NUM_WORDS = 4096
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_WORDS_PER_LINE = 12


class SyntheticDocuments:
    """Documents of made-up words, of which the frequent ones are as frequent as in text (Zipf's law)."""

    def __init__(self, spec: SyntheticSourceConfig) -> None:
        """Spell the words; documents are made when they are read."""
        self.name = f"synthetic text of seed {spec.seed}"
        self._spec = spec
        self._words = [_spelling(index) for index in range(NUM_WORDS)]
        # Frequency proportional to 1 / rank; the upper end of each word's share of 2^53 parts.
        shares = np.cumsum(1 / np.arange(1, NUM_WORDS + 1))
        self._ends = shares / shares[-1]

    def __len__(self) -> int:
        return self._spec.num_documents

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        document_key = int(hash64(hash64(np.uint64(self._spec.seed)) + np.uint64(index))[0])
        # From half to one and a half times the average, evenly.
        low = max(1, self._spec.words_per_document // 2)
        num_words = low + document_key % (2 * (self._spec.words_per_document - low) + 1)
        draws = hash64(np.uint64(document_key) + np.arange(num_words, dtype=np.uint64))  # (words,)
        ranks = np.searchsorted(self._ends, _fractions(draws), side="right")
        words = [self._words[rank] for rank in ranks.tolist()]
        lines = [words[start : start + _WORDS_PER_LINE] for start in range(0, num_words, _WORDS_PER_LINE)]
        return "\n".join(" ".join(line) for line in lines) + "\n"

    def num_bytes(self) -> int:
        """Estimate the size of all documents from the average length of a word."""
        lengths = np.array([len(word) + 1 for word in self._words])
        average = float((lengths * np.diff(self._ends, prepend=0)).sum())
        return round(len(self) * self._spec.words_per_document * average)

    def remarks(self) -> Sequence[str]:
        """Return nothing: nothing is left out."""
        return ()

    def fingerprint(self) -> str:
        """Return the settings that the text is a function of."""
        return self._spec.model_dump_json()


def _fractions(draws: UInt64Array) -> np.ndarray:
    """Map 64 bits to [0, 1), evenly."""
    return (draws >> np.uint64(11)).astype(np.float64) / 2**53


def _spelling(index: int) -> str:
    """Spell a number in syllables, the smaller the shorter."""
    syllables = []
    while True:
        index, vowel = divmod(index, len(_VOWELS))
        index, consonant = divmod(index, len(_CONSONANTS))
        syllables.append(_CONSONANTS[consonant] + _VOWELS[vowel])
        if index == 0:
            return "".join(syllables)
        index -= 1
