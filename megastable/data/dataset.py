"""A stream of tokens, cut into samples of one length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megastable.core.errors import DamagedDataError
from megastable.core.labels import IGNORED_LABEL
from megastable.data.block_checksums import BlockChecksums, TokenArray, describe_damage
from megastable.data.prompts import PromptSpans

REBUILD = "delete the folder, and the next start builds it again"


@dataclass(frozen=True)
class TokenDataset:
    """Packs samples back to back: sample i reads ``tokens[i*S : i*S+S+1]`` and predicts all of them but the first.

    So every token but the very first is predicted exactly once an epoch. The last sample is padded with ``eod_id``
    where the tokens end, and its padded labels are ``IGNORED_LABEL``.
    """

    tokens: TokenArray = field(repr=False)
    seq_length: int
    eod_id: int
    vocab_size: int
    """Of the tokenizer; ids are in ``[0, vocab_size)``."""
    name: str
    """What a message calls these tokens: the path of their file."""
    checksums: BlockChecksums | None = field(default=None, repr=False)
    """Of the tokens' file; None where it has none."""
    first_token: int = 0
    """Where ``tokens`` begin in their file."""
    remedy: str = REBUILD
    """What a message tells the user to do about damaged tokens."""
    prompts: PromptSpans | None = field(default=None, repr=False)
    """Which tokens are of prompts, whose labels are ignored; None where there are none."""

    def __len__(self) -> int:
        """Count the samples; 0 where there are fewer than two tokens."""
        # Rounded up: the last sample may be shorter, and is padded.
        return -(-max(0, len(self.tokens) - 1) // self.seq_length)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Read the input ids and labels of one sample, each of shape [seq_length].

        Raises:
            DamagedDataError: the tokens are not those that were written, or an id is outside the vocabulary.
        """
        valid = self._num_labels(index)
        start = index * self.seq_length
        stop = start + valid + 1
        self._compare(self.first_token + start, self.first_token + stop)
        window = self.tokens[start:stop].astype(np.int64)  # (valid + 1,)
        # Compared here, on the host, where it costs microseconds. The model would not notice: an id past the
        # vocabulary but inside of its padding has a row of the embedding, and one past both reads as zeros.
        if window.max() >= self.vocab_size or window.min() < 0:
            self._refuse(window, self.first_token + start)
        input_ids, labels = self.padding_sample()
        # With the padded inputs after it, the last token may stay as an input: causal attention hides it from
        # every label that counts, and its own label is ignored.
        kept = min(len(window), self.seq_length)
        input_ids[:kept] = window[:kept]
        labels[:valid] = window[1:]
        if self.prompts is not None:
            labels[:valid][~self._learned(self.prompts, index)] = IGNORED_LABEL
        return input_ids, labels

    def _compare(self, start: int, stop: int) -> None:
        """Compare the tokens ``[start, stop)`` of the file with their checksums."""
        if self.checksums is None:
            return
        damaged = self.checksums.first_damaged(start, stop)
        if damaged is not None:
            self._refuse(self.checksums.tokens[damaged], damaged.start)

    def _refuse(self, found: npt.NDArray[Any], start: int) -> NoReturn:
        damage = describe_damage(found, start, self.vocab_size)
        raise DamagedDataError(f"the tokenised corpus is damaged: {self.name} has {damage}; {self.remedy}")

    def valid_tokens(self, index: int) -> int:
        """Count the labels of sample ``index`` that are not ignored, without reading its tokens.

        Raises:
            IndexError: the index is not in ``[0, len(self))``.
        """
        if self.prompts is not None:
            return int(np.count_nonzero(self._learned(self.prompts, index)))
        return self._num_labels(index)

    def _num_labels(self, index: int) -> int:
        """Count the tokens of a sample that have one before them."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)} samples")
        return min(self.seq_length, len(self.tokens) - 1 - index * self.seq_length)

    def _learned(self, prompts: PromptSpans, index: int) -> npt.NDArray[np.bool_]:
        """Return which labels of a sample are of completions, without those of its padding."""
        start = self.first_token + index * self.seq_length + 1
        return prompts.learned(start, start + self._num_labels(index))

    def padding_sample(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Make a sample of ``eod_id`` with ignored labels, which fills up a micro-batch without changing the loss."""
        return np.full(self.seq_length, self.eod_id), np.full(self.seq_length, IGNORED_LABEL)
