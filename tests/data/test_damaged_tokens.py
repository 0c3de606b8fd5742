"""Token files that were changed on disk: noticed when they are opened, or when the block is first read."""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.errors import DamagedDataError, UserError
from megastable.data import (
    SampleOrder,
    TokenDataset,
    block_checksums,
    prepare_corpus,
    token_store,
    training_micro_batches,
)
from megastable.data.text_tokenizers import BytesTokenizer
from megastable.data.token_store import open_token_store
from megastable.data.token_writer import write_token_store
from tests.data.data_examples import text_data, tiny_model, write_documents


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_token_store(folder, [("some text to train on", False), ("and to evaluate", True)], BytesTokenizer())
    return folder


@settings(max_examples=25, deadline=None)
@given(file=st.sampled_from(["train.bin", "validation.bin"]), position=st.integers(0, 15), token=st.integers(0, 65_535))
def test_any_token_that_was_changed_is_noticed_when_a_store_is_opened(
    store: Path, tmp_path_factory: pytest.TempPathFactory, file: str, position: int, token: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(store, folder)
    tokens = np.fromfile(folder / file, "<u2")
    was = tokens[position]
    tokens[position] = token
    tokens.tofile(folder / file)
    if was == token:
        open_token_store(folder)
        return
    what = f"{file} has other tokens than were written, somewhere in 0 to "
    if token >= BytesTokenizer.vocab_size:
        what = f"{file} has the id {token} at token {position}, outside its vocabulary of 257"
    with pytest.raises(UserError, match=rf"{folder} is damaged .*{what}.*; delete that folder"):
        open_token_store(folder)


@settings(max_examples=50, deadline=None)
@given(position=st.integers(0, 99), token=st.integers(50, 65_535))
def test_an_id_outside_the_vocabulary_is_never_handed_to_the_model(position: int, token: int) -> None:
    tokens = np.arange(100, dtype=np.uint16) % 50
    tokens[position] = token
    dataset = TokenDataset(tokens, 9, 0, vocab_size=50, name="some/train.bin")
    # All of an epoch, so that every token is read, as an input and as a label.
    items = training_micro_batches(dataset, SampleOrder(11, seed=3), Batch(11, 11, 1), 0, 0, 1)
    with pytest.raises(DamagedDataError, match=rf"some/train\.bin has the id {token} at token {position},"):
        list(items)


BLOCK_TOKENS = 32


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Let blocks be short, and every store too large to be read when it is opened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_checksums, "BLOCK_BYTES", 2 * BLOCK_TOKENS)
        patch.setattr(token_store, "VERIFIED_BYTES", 0)
        yield


@pytest.fixture
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a store of several blocks, the last of which is short."""
    folder = tmp_path_factory.mktemp("large")
    with small_blocks():
        write_token_store(folder, [("0123456789" * 30, False), ("and to evaluate", True)], BytesTokenizer())
    return folder


def dataset_of(folder: Path, seq_length: int) -> TokenDataset:
    meta, train, _ = open_token_store(folder)
    return TokenDataset(train.tokens, seq_length, meta.eod_id, meta.vocab_size, str(train.path), train.checksums)


def has_damage(dataset: TokenDataset, sample: int) -> bool:
    try:
        dataset[sample]
    except DamagedDataError:
        return True
    return False


@pytest.mark.usefixtures("_small_blocks")
@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 300), token=st.integers(0, 65_535), seq_length=st.integers(1, 90))
def test_in_a_large_store_every_sample_that_meets_a_block_with_a_changed_token_is_refused(
    large_store: Path, tmp_path_factory: pytest.TempPathFactory, position: int, token: int, seq_length: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(large_store, folder)
    dataset = dataset_of(folder, seq_length)
    assert not any(has_damage(dataset, sample) for sample in range(len(dataset)))
    tokens = np.fromfile(folder / "train.bin", "<u2")
    was = tokens[position]
    tokens[position] = token
    tokens.tofile(folder / "train.bin")
    dataset = dataset_of(folder, seq_length)
    damaged_block = position // BLOCK_TOKENS
    for sample in [*range(len(dataset)), *range(len(dataset))]:
        first, last = sample * seq_length, min(sample * seq_length + seq_length, 300)
        meets = first // BLOCK_TOKENS <= damaged_block <= last // BLOCK_TOKENS
        assert has_damage(dataset, sample) == (meets and token != was)


@pytest.mark.usefixtures("_small_blocks")
def test_a_block_is_compared_once(large_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(large_store, 8)
    compared: list[int] = []
    crc32 = zlib.crc32

    def counted(block: memoryview) -> int:
        compared.append(len(block))
        return crc32(block)

    monkeypatch.setattr(zlib, "crc32", counted)
    for sample in [*range(len(dataset)), *range(len(dataset))]:
        dataset[sample]
    assert len(compared) == -(-301 // BLOCK_TOKENS)


@pytest.mark.usefixtures("_small_blocks")
@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.binary(max_size=200), max_size=8))
def test_the_checksums_do_not_depend_on_the_parts_in_which_a_file_is_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    writer = block_checksums.ChecksumWriter()
    for part in parts:
        writer.append(part)
    path = tmp_path_factory.mktemp("checksums") / "file.crc32"
    writer.write(path)
    whole = b"".join(parts)
    blocks = [whole[start : start + 2 * BLOCK_TOKENS] for start in range(0, len(whole), 2 * BLOCK_TOKENS)]
    assert np.fromfile(path, "<u4").tolist() == [zlib.crc32(block) for block in blocks]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("damage", ["cut", "absent"])
def test_checksums_that_are_not_whole_are_named(large_store: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(large_store, tmp_path / "store")
    path = tmp_path / "store/train.crc32"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"store is damaged \(.*train\.crc32.*\); delete that folder"):
        open_token_store(tmp_path / "store")


def test_a_store_too_large_to_be_verified_is_checked_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "VERIFIED_BYTES", 10)
    documents = write_documents(tmp_path / "documents")
    data = text_data(documents, tmp_path / "cache")
    file = prepare_corpus(data, tiny_model(), show_progress=False).tokenizer_path.parent / "train.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[17] = 299  # inside the vocabulary of the model, and outside that of the tokenizer
    tokens.tofile(file)
    damaged = prepare_corpus(data, tiny_model(), show_progress=False)
    with pytest.raises(DamagedDataError, match=rf"{file} has the id 299 at token 17, .* vocabulary of 257"):
        damaged.train[2]
