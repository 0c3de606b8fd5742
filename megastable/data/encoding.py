"""Encodes batches of texts: here, on the tokenizer's own threads, or on several processes, with the same ids."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megastable.core.errors import UserError
from megastable.data.tokenizer_interface import TextTokenizer

Ids = Sequence[npt.NDArray[Any]]
EncodedTexts = tuple[npt.NDArray[Any], list[int]]
"""The ids of several texts in one array, and how many each has."""
THREADS_VARIABLE = "TOKENIZERS_PARALLELISM"
BATCHES_AHEAD = 2
"""Batches that wait for each process: one less, and a process waits for its next one."""


class TextBatch(Protocol):
    """Texts that are encoded together."""

    @property
    def texts(self) -> Sequence[str]:
        """Return the texts."""
        ...


Batch = TypeVar("Batch", bound=TextBatch)


def encoded(
    batches: Iterable[Batch], tokenizer: TextTokenizer, num_workers: int = 0
) -> contextlib.AbstractContextManager[Iterator[tuple[Batch, Ids]]]:
    """Yield every batch with the ids of its texts, in order.

    Args:
        num_workers: processes that encode; 0 encodes here. The batches are read here in any case, a few ahead.
    """
    if num_workers == 0:
        return contextlib.nullcontext((batch, _encode(tokenizer, batch.texts)) for batch in batches)
    return _encoded_elsewhere(batches, tokenizer, num_workers)


@contextlib.contextmanager
def _encoded_elsewhere(
    batches: Iterable[Batch], tokenizer: TextTokenizer, num_workers: int
) -> Iterator[Iterator[tuple[Batch, Ids]]]:
    # Forked: a tokenizer loses settings when it is pickled. Its threads stay with the parent, so a child uses none.
    fork = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(num_workers, fork, initializer=_Worker.begin, initargs=(tokenizer,))
    try:
        # All are forked for the first task: before the caller starts a thread that draws a bar.
        executor.submit(_Worker.encode, []).result()
        yield _in_order(batches, executor, BATCHES_AHEAD * num_workers)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_workers} processes that encode was ended, perhaps because memory ran out; start again to go "
            "on, with fewer processes if need be"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _in_order(batches: Iterable[Batch], executor: ProcessPoolExecutor, most_ahead: int) -> Iterator[tuple[Batch, Ids]]:
    """Hand out batches and take in their ids in the same order; ``map`` would read all batches at once."""
    waiting: deque[tuple[Batch, Future[EncodedTexts]]] = deque()
    for batch in batches:
        waiting.append((batch, executor.submit(_Worker.encode, list(batch.texts))))
        if len(waiting) >= most_ahead:
            yield _taken(waiting)
    while waiting:
        yield _taken(waiting)


def _taken(waiting: deque[tuple[Batch, Future[EncodedTexts]]]) -> tuple[Batch, Ids]:
    batch, result = waiting.popleft()
    ids, lengths = result.result()
    return batch, np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []


class _Worker:
    """What a process that encodes holds."""

    encode_texts: Callable[[Sequence[str]], Ids]

    @classmethod
    def begin(cls, tokenizer: TextTokenizer) -> None:
        # The parent ends its children, whoever presses Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ[THREADS_VARIABLE] = "false"
        cls.encode_texts = lambda texts: _encode(tokenizer, texts)

    @classmethod
    def encode(cls, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of all texts in one array, which travels faster than many, and how many each has."""
        ids = cls.encode_texts(texts)
        lengths = [len(part) for part in ids]
        return np.concatenate([np.zeros(0, np.int32), *(part.astype(np.int32) for part in ids)]), lengths


def _encode(tokenizer: TextTokenizer, texts: Sequence[str]) -> Ids:
    if not texts:
        return []
    return [np.asarray(ids, np.int64) for ids in tokenizer.encode_batch(texts)]
