"""Megatron's indexed format: byte for byte its own files, read by its own reader, and every fault of a file named."""

from __future__ import annotations

import itertools
import re
import struct
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.data import indexed_format
from megastable.data.indexed_format import (
    HEADER,
    check_ids,
    index_path,
    open_indexed,
    token_dtype,
    tokens_path,
    write_index,
)
from megastable.data.indexed_writer import IndexedWriter, holds

Documents = list[list[int]]
VOCABULARIES = [257, 65_499, 65_500, 65_536, 70_000, 2_000_000]


@st.composite
def documents_of_a_vocabulary(draw: st.DrawFn) -> tuple[int, Documents]:
    vocab_size = draw(st.sampled_from(VOCABULARIES))
    ids = st.one_of(st.integers(0, vocab_size - 1), st.just(vocab_size - 1))
    return vocab_size, draw(st.lists(st.lists(ids, max_size=9), max_size=8))


def write(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int, cuts: Sequence[int] = ()) -> None:
    """Write documents, in calls that end at the tokens of ``cuts``."""
    ids = np.array([token for document in documents for token in document], np.int64)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    # A document ends in the first call that has its last token; an empty one in that of the token before it.
    calls = np.searchsorted(bounds[1:], ends)
    writer = IndexedWriter(prefix, vocab_size)
    for call, (start, stop) in enumerate(itertools.pairwise(bounds)):
        writer.append(ids[start:stop], ends[calls == call] - start)
    writer.finish()


def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def write_with_megatron(prefix: Path, documents: Documents, vocab_size: int) -> None:
    import torch

    dtype = megatron().DType.optimal_dtype(vocab_size)
    builder = megatron().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@settings(max_examples=40, deadline=None)
@given(case=documents_of_a_vocabulary())
def test_a_pair_is_byte_for_byte_the_one_that_megatron_writes(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[int, Documents]
) -> None:
    vocab_size, documents = case
    folder = tmp_path_factory.mktemp("pairs")
    write_with_megatron(folder / "theirs", documents, vocab_size)
    write(folder / "ours.v1", documents, vocab_size)
    for suffix in ("bin", "idx"):
        assert (folder / f"ours.v1.{suffix}").read_bytes() == (folder / f"theirs.{suffix}").read_bytes()


@settings(max_examples=40, deadline=None)
@given(case=documents_of_a_vocabulary())
def test_what_megatron_writes_is_read(tmp_path_factory: pytest.TempPathFactory, case: tuple[int, Documents]) -> None:
    vocab_size, documents = case
    prefix = tmp_path_factory.mktemp("pairs") / "theirs"
    write_with_megatron(prefix, documents, vocab_size)
    opened = open_indexed(prefix)
    assert [opened.document(index).tolist() for index in range(opened.num_documents)] == documents
    check_ids(opened, vocab_size, 0, len(opened.tokens))


@settings(max_examples=40, deadline=None)
@given(case=documents_of_a_vocabulary())
def test_what_is_written_here_is_read_by_megatron(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[int, Documents]
) -> None:
    vocab_size, documents = case
    documents = [*documents, [vocab_size - 1]]  # its reader maps no empty file
    prefix = tmp_path_factory.mktemp("pairs") / "ours"
    write(prefix, documents, vocab_size)
    theirs = megatron().IndexedDataset(str(prefix))
    assert [theirs[index].tolist() for index in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


def test_documents_of_several_sequences_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_format, "LONGEST_SEQUENCE", 4)
    documents = [[1, 2, 3], [], list(range(13)), [7] * 4, [8] * 8]
    write(tmp_path / "long", documents, 257)
    opened = open_indexed(tmp_path / "long")
    assert opened.sequence_lengths.tolist() == [3, 0, 4, 4, 4, 1, 4, 4, 4]
    assert [opened.document(index).tolist() for index in range(opened.num_documents)] == documents
    theirs = megatron().IndexedDataset(str(tmp_path / "long"))
    assert theirs.document_indices.tolist() == [0, 1, 2, 6, 7, 9]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=9), max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    large=st.booleans(),
)
def test_a_pair_does_not_depend_on_the_parts_in_which_it_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, cuts: list[int], large: bool
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    write(folder / "whole", documents, 257)
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(indexed_format, "_CHECKED_AT_ONCE", 2)
        write(folder / "parts", documents, 257, cuts)
        open_indexed(folder / "parts")
    for suffix in ("bin", "idx", "crc32"):
        assert (folder / f"whole.{suffix}").read_bytes() == (folder / f"parts.{suffix}").read_bytes()
    assert len(list(folder.iterdir())) == 6, "nothing else is left"


def test_the_type_of_the_ids_is_megatrons() -> None:
    for vocab_size in [1, *VOCABULARIES, 2**31 - 1]:
        assert token_dtype(vocab_size) == np.dtype(megatron().DType.optimal_dtype(vocab_size))


def test_nothing_is_gone_on_from_that_is_not_there(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", 257)
    writer.append(np.arange(5), np.array([2, 5]))
    kept = writer.sync()
    writer.close()
    assert holds(tmp_path / "pair", 257, kept)
    assert not holds(tmp_path / "pair", 70_000, kept)
    (tmp_path / "pair.lengths").write_bytes(b"")
    assert not holds(tmp_path / "pair", 257, kept)


# Faults -------------------------------------------------------------------------------------------


def changed_header(stored: bytes, **changes: Any) -> bytes:
    names = ("magic", "version", "code", "sequences", "bounds")
    values = dict(zip(names, HEADER.unpack(stored[: HEADER.size]), strict=True)) | changes
    return HEADER.pack(*values.values()) + stored[HEADER.size :]


def changed_number(stored: bytes, form: str, offset: int, value: int) -> bytes:
    changed = bytearray(stored)
    struct.pack_into(form, changed, HEADER.size + offset, value)
    return bytes(changed)


# Three documents of 3, 1 and 2 ids of two bytes: lengths at 0, pointers at 12, bounds at 36.
INDEX_FAULTS = {
    "empty": (lambda stored: b"", "has 0 bytes, less than its header of 34"),
    "header cut": (lambda stored: stored[:20], "has 20 bytes, less than its header of 34"),
    "no index": (lambda stored: b"PK" + stored[2:], "it is no index of Megatron's format"),
    "version": (lambda stored: changed_header(stored, version=2), "is of version 2; legal is 1"),
    "no type": (lambda stored: changed_header(stored, code=0), "has ids of the type 0; legal are 1, 2, 3, 4, 5, 8"),
    "floats": (lambda stored: changed_header(stored, code=7), "has ids of the type 7"),
    "sequences": (lambda stored: changed_header(stored, sequences=4), "has 102 bytes instead of 114 for 4 sequences"),
    "huge": (lambda stored: changed_header(stored, sequences=2**64 - 1), "has 102 bytes instead of"),
    "bounds": (lambda stored: changed_header(stored, bounds=3), "has 102 bytes instead of 94"),
    "cut": (lambda stored: stored[:-1], "has 101 bytes instead of 102"),
    "modes": (lambda stored: stored + b"\0\0\0", "seems to have a mode for each sequence"),
    "negative length": (lambda stored: changed_number(stored, "<i", 4, -1), "gives sequence 1 a length of -1"),
    "pointer": (
        lambda stored: changed_number(stored, "<q", 20, 4),
        "says that sequence 1 begins at byte 4, but those before it end at 6",
    ),
    "negative pointer": (lambda stored: changed_number(stored, "<q", 12, -6), "sequence 0 begins at byte -6"),
    "first bound": (lambda stored: changed_number(stored, "<q", 36, 1), "over the sequences 1 to 3 instead of 0 to 3"),
    "last bound": (lambda stored: changed_number(stored, "<q", 60, 2), "over the sequences 0 to 2 instead of 0 to 3"),
    "falling bounds": (lambda stored: changed_number(stored, "<q", 44, 3), "document 1 ends before it begins"),
    "bounds whose difference wraps around": (
        lambda stored: changed_number(changed_number(stored, "<q", 44, 2**63 - 1), "<q", 52, -2),
        "document 1 ends before it begins",
    ),
}


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write(tmp_path / "pair", [[1, 2, 3], [4], [5, 6]], 257)
    return tmp_path / "pair"


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_every_fault_of_an_index_is_one_message_with_its_file(pair: Path, fault: str) -> None:
    change, message = INDEX_FAULTS[fault]
    path = index_path(pair)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} .*{re.escape(message)}"):
        open_indexed(pair)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 11, "has 11 bytes, which are no whole number of ids of 2 bytes"),
        (b"\0" * 10, "has 10 bytes instead of the 12 of pair.idx"),
        (b"\0" * 14, "has 14 bytes instead of the 12 of pair.idx"),
        (b"", "has 0 bytes instead of the 12 of pair.idx"),
    ],
)
def test_every_fault_of_the_tokens_size_is_one_message_with_their_file(
    pair: Path, content: bytes, message: str
) -> None:
    tokens_path(pair).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{tokens_path(pair)} {message}")):
        open_indexed(pair)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_that_is_not_there_is_named(pair: Path, suffix: str) -> None:
    pair.with_suffix(f".{suffix}").unlink()
    with pytest.raises(UserError, match=rf"pair\.{suffix} cannot be read \(No such file"):
        open_indexed(pair)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 101), byte=st.integers(0, 255))
def test_an_index_with_any_byte_changed_is_refused_or_has_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    prefix = tmp_path_factory.mktemp("pairs") / "pair"
    write(prefix, [[1, 2, 3], [4], [5, 6]], 257)
    stored = bytearray(index_path(prefix).read_bytes())
    stored[position] = byte
    index_path(prefix).write_bytes(bytes(stored))
    try:
        opened = open_indexed(prefix)
    except UserError:
        return
    assert [int(token) for token in opened.tokens] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("wrong", "code"), [(-1, "<i4"), (257, "<i4"), (65_535, "<u2")])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path, wrong: int, code: str) -> None:
    ids = np.array([0, 256, 5, wrong, 300], code)
    tokens_path(tmp_path / "pair").write_bytes(ids.tobytes())
    write_index(index_path(tmp_path / "pair"), code, np.array([2, 3]))
    opened = open_indexed(tmp_path / "pair")
    check_ids(opened, 257, 0, 3)
    with pytest.raises(UserError, match=rf"pair\.bin has the id {wrong} at token 3, outside the vocabulary of 257"):
        check_ids(opened, 257, 1, 5)


def test_ten_million_documents_open_at_once(tmp_path: Path) -> None:
    num_documents = 10_000_000
    write_index(index_path(tmp_path / "many"), "<u2", np.ones(num_documents, np.int32))
    with tokens_path(tmp_path / "many").open("wb") as file:
        file.truncate(2 * num_documents)
    started = time.perf_counter()
    opened = open_indexed(tmp_path / "many")
    seconds = time.perf_counter() - started
    assert opened.num_documents == num_documents
    assert seconds < 2
