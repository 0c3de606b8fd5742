"""Pieces of a whole: any two cuts of it exchange every element once, and to its place."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.core.pieces import Piece, Shard, Span, overlaps, share_of

ROWS, COLUMNS = 12, 6
Cut = list[list[Piece]]
"""For each tensor rank the pieces of its replicas."""


def elements_of(piece: Piece) -> list[int | None]:
    """List, by the plain meaning of its numbers, which element of the flattened whole each one of the piece is."""
    shard = piece.shard
    columns = math.prod(shard.full_shape[1:])
    along = [index for start, stop in shard.ranges for index in range(start, stop)]
    if shard.dim == 0:
        flat = [row * columns + column for row in along for column in range(columns)]
    else:
        flat = [row * columns + column for row in range(shard.full_shape[0]) for column in along]
    padded: list[int | None] = [*flat, *[None] * (shard.padding * columns)]
    return padded[piece.start : piece.stop]


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    """Draw a layout: how many tensor ranks cut the whole and in which way, and where ZeRO cuts what they hold."""
    size = draw(st.sampled_from([1, 2, 3]))
    way = draw(st.sampled_from(["rows", "columns", "fused", "padded"]))
    shards = [_shard(way, shape, size, rank) for rank in range(size)]
    pieces = []
    for shard in shards:
        total = math.prod(shard.shape)
        inner = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
        pieces.append([Piece(shard, start, stop) for start, stop in itertools.pairwise([0, *inner, total])])
    return pieces


def _shard(way: str, shape: tuple[int, ...], size: int, rank: int) -> Shard:
    if way == "columns" and len(shape) == 2:
        return Shard.even(shape, 1, size, rank)
    if way == "fused":
        groups = [[(0, 6)], [(6, 9), (9, 12)]]
        ranges: tuple[Span, ...] = ()
        for spans in groups:
            ranges += share_of(spans, size, rank)
        return Shard(shape, 0, ranges)
    if way == "padded":
        return Shard.even(shape, 0, size, rank, padded_to=18)
    return Shard.even(shape, 0, size, rank)


@given(st.data(), st.sampled_from([(ROWS, COLUMNS), (ROWS,)]))
def test_any_layout_is_filled_from_any_other_to_the_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    sources = [piece for pieces in data.draw(cuts(shape)) for piece in pieces]
    targets = [piece for pieces in data.draw(cuts(shape)) for piece in pieces]
    for target in targets:
        received: list[int | None] = [None] * target.num_elements
        for source in sources:
            held = elements_of(source)
            for overlap in overlaps(source, target):
                for row, column in itertools.product(range(overlap.num_rows), range(overlap.num_columns)):
                    place = overlap.target.offset + row * overlap.target.stride + column
                    assert received[place] is None, "an element came twice"
                    received[place] = held[overlap.source.offset + row * overlap.source.stride + column]
        assert received == elements_of(target)


@given(st.data())
def test_padding_is_cut_off_behind_all_that_is_mapped(data: st.DataObject) -> None:
    for piece in itertools.chain.from_iterable(data.draw(cuts((ROWS, COLUMNS)))):
        kept = elements_of(piece.without_padding)
        assert None not in kept
        assert kept == [element for element in elements_of(piece) if element is not None]


@pytest.mark.parametrize(
    ("spans", "size", "shares"),
    [
        ([(0, 12)], 3, [((0, 4),), ((4, 8),), ((8, 12),)]),
        ([(0, 4), (6, 10)], 4, [((0, 2),), ((2, 4),), ((6, 8),), ((8, 10),)]),
        ([(0, 2), (3, 5), (6, 8)], 2, [((0, 2), (3, 4)), ((4, 5), (6, 8))]),
    ],
)
def test_shares_follow_the_order_of_the_spans(spans: list[Span], size: int, shares: list[tuple[Span, ...]]) -> None:
    assert [share_of(spans, size, rank) for rank in range(size)] == shares


def test_a_rank_whose_share_is_padding_holds_none_of_the_whole() -> None:
    last = Shard.even((10, 2), 0, 4, 3, padded_to=16)
    assert (last.ranges, last.padding, last.shape) == (((10, 10),), 4, (4, 2))
    assert list(Piece.all_of(last).boxes()) == []
