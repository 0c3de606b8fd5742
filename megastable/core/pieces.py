"""How a process's piece of a parameter lies in the whole one: the one place that says so.

Two cuts lie on top of each other. Tensor ranks take ranges of rows or columns of a whole weight: the even share of a
vocabulary, the rows of their heads in a fused projection. That is a ``Shard``. ZeRO lays shards end to end and cuts
them flat, anywhere, into equal shares, one a replica: what a process holds of a shard is a ``Piece`` of it.

Every piece, of any cut, is a handful of ``Box``es, rectangles of the whole matrix. Two boxes overlap in a box, so that
between any two layouts elements move as rectangles. Checkpoints, exports and the drawing of weights go by this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

Span = tuple[int, int]
"""Indices of the first element and of the one after the last."""


def share_of(spans: Iterable[Span], size: int, rank: int) -> tuple[Span, ...]:
    """Return the equal share of tensor rank ``rank`` of ``size`` in what ``spans`` hold one behind the other."""
    spans = tuple(spans)
    share = sum(stop - start for start, stop in spans) // size
    return tuple(span for span, _ in _part_of(spans, (rank * share, (rank + 1) * share)))


def _part_of(spans: Iterable[Span], part: Span) -> Iterator[tuple[Span, int]]:
    """Yield what a part of the elements that ``spans`` hold one behind the other is made of, and where each begins.

    ``part`` and the beginnings count the elements held; the spans that are yielded count like ``spans``.
    """
    passed = 0
    for start, stop in spans:
        first = max(part[0], passed)
        last = min(part[1], passed + stop - start)
        if first < last:
            yield (start + first - passed, start + last - passed), first
        passed += stop - start


@dataclass(frozen=True)
class Shard:
    """The part of a whole weight, or of a bias of its rows, that one tensor rank holds.

    Attributes:
        full_shape: shape of the whole, over all tensor ranks: one or two dimensions.
        dim: the dimension that is cut.
        ranges: the spans along ``dim`` that the rank holds, in the order in which it holds them.
        padding: rows behind them, where rows are cut, that stand for nothing in the whole and are zero: a vocabulary
            is padded by them.
    """

    full_shape: tuple[int, ...]
    dim: int
    ranges: tuple[Span, ...]
    padding: int = 0

    @classmethod
    def whole(cls, full_shape: tuple[int, ...]) -> Shard:
        """Hold all of it."""
        return cls(full_shape, 0, ((0, full_shape[0]),))

    @classmethod
    def even(cls, full_shape: tuple[int, ...], dim: int, size: int, rank: int, padded_to: int | None = None) -> Shard:
        """Hold the equal, contiguous share of tensor rank ``rank`` of ``size``.

        Args:
            padded_to: what is shared out, where that is more than ``full_shape[dim]``.
        """
        length = full_shape[dim]
        share = (padded_to or length) // size
        # The last shares of a padded dimension may lie in the padding as a whole.
        first = min(rank * share, length)
        last = min((rank + 1) * share, length)
        return cls(full_shape, dim, ((first, last),), share - (last - first))

    @property
    def length(self) -> int:
        """Return the elements along ``dim`` that stand for some of the whole."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part, padding included."""
        return (*self.full_shape[: self.dim], self.length + self.padding, *self.full_shape[self.dim + 1 :])

    @property
    def num_elements(self) -> int:
        """Return the elements of the whole that are in the part."""
        return math.prod(self.full_shape) // self.full_shape[self.dim] * self.length

    @property
    def of_rows(self) -> Shard:
        """Return the part of a vector with an element for each row, such as a bias."""
        return Shard(self.full_shape[:1], 0, self.ranges, self.padding)

    @property
    def columns(self) -> int:
        """Return the width of the part, as a matrix; a vector is a matrix of one column."""
        return math.prod(self.shape[1:])


class Box(NamedTuple):
    """A rectangle of a whole matrix, and where it lies in the flat elements of a piece."""

    rows: Span
    columns: Span
    offset: int
    """Of the first element, in the piece."""
    stride: int
    """Elements of the piece from one row to the next."""


class View(NamedTuple):
    """Rows of elements inside something flat."""

    offset: int
    stride: int


class Overlap(NamedTuple):
    """Elements that two pieces have in common, as rows in both."""

    num_rows: int
    num_columns: int
    source: View
    target: View


@dataclass(frozen=True)
class Piece:
    """The elements from ``start`` to ``stop`` of a shard, row by row."""

    shard: Shard
    start: int
    stop: int

    @classmethod
    def all_of(cls, shard: Shard) -> Piece:
        """Hold the whole shard."""
        return cls(shard, 0, math.prod(shard.shape))

    @property
    def num_elements(self) -> int:
        """Return the elements of the piece, padding included."""
        return self.stop - self.start

    @property
    def without_padding(self) -> Piece:
        """Return the piece cut off where the padding begins."""
        mapped = self.shard.num_elements
        return Piece(self.shard, min(self.start, mapped), min(self.stop, mapped))

    def boxes(self) -> Iterator[Box]:
        """Yield the rectangles of the whole of which the piece is made."""
        for rows, columns in self._strips():
            for whole_rows, local_row in self._in_whole(rows, 0):
                for whole_columns, local_column in self._in_whole(columns, 1):
                    offset = local_row * self.shard.columns + local_column - self.start
                    yield Box(whole_rows, whole_columns, offset, self.shard.columns)

    def _strips(self) -> Iterator[tuple[Span, Span]]:
        """Cut the run of elements into rectangles of the shard: the end of a row, whole rows, the start of a row."""
        width = self.shard.columns
        if self.start >= self.stop:
            return
        first_row, first_column = divmod(self.start, width)
        last_row, last_column = divmod(self.stop, width)
        if first_row == last_row:
            yield (first_row, first_row + 1), (first_column, last_column)
            return
        if first_column > 0:
            yield (first_row, first_row + 1), (first_column, width)
            first_row += 1
        if first_row < last_row:
            yield (first_row, last_row), (0, width)
        if last_column > 0:
            yield (last_row, last_row + 1), (0, last_column)

    def _in_whole(self, local: Span, dim: int) -> Iterator[tuple[Span, int]]:
        """Yield the spans of the whole that a span of the shard's rows or columns stands for, each with its start."""
        if dim != self.shard.dim:
            yield local, local[0]
            return
        yield from _part_of(self.shard.ranges, local)


def overlaps(source: Piece, target: Piece) -> Iterator[Overlap]:
    """Yield what two pieces of the same whole have in common, each element once."""
    source_boxes = list(source.boxes())
    for to in target.boxes():
        for of in source_boxes:
            rows = _common(of.rows, to.rows)
            columns = _common(of.columns, to.columns)
            if rows[0] < rows[1] and columns[0] < columns[1]:
                yield Overlap(
                    rows[1] - rows[0],
                    columns[1] - columns[0],
                    _view(of, rows[0], columns[0]),
                    _view(to, rows[0], columns[0]),
                )


def _common(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def _view(box: Box, row: int, column: int) -> View:
    offset = box.offset + (row - box.rows[0]) * box.stride + column - box.columns[0]
    return View(offset, box.stride)
