from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megastable.core.errors import UserError
from megastable.data.text_tokenizers import BytesTokenizer
from megastable.data.token_store import open_token_store, unigram_entropy_nats
from megastable.data.token_writer import write_token_store

EOD = BytesTokenizer.eod_id


class WideTokenizer:
    """One id a character, far apart, of a vocabulary that 16 bits may not hold."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod_id = vocab_size - 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) % self.vocab_size for character in text] for text in texts]

    def pieces(self, text: str, characters: int) -> list[str]:
        return [text]

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").touch()


def test_documents_go_to_their_split_in_order_and_each_is_ended(tmp_path: Path) -> None:
    documents = [("ab", False), ("v", True), ("", False), ("ü", False), ("w", True)]
    write_token_store(tmp_path, documents, BytesTokenizer())
    meta, train, validation = open_token_store(tmp_path)
    assert train.tokens.tolist() == [*b"ab", EOD, *"ü".encode(), EOD]
    assert validation.tokens.tolist() == [*b"v", EOD, *b"w", EOD]
    assert (meta.num_train_tokens, meta.num_validation_tokens) == (6, 4)
    assert meta.eod_id == EOD and meta.vocab_size == 257


@pytest.mark.parametrize("num_characters", [10_000_000, 9 << 20])
def test_a_document_of_several_batches_is_whole_and_ended_once(tmp_path: Path, num_characters: int) -> None:
    text = ("0123456789" * 1_000_000)[:num_characters]
    write_token_store(tmp_path, [("a", False), (text, False), ("b", True)], BytesTokenizer())
    _, train, validation = open_token_store(tmp_path)
    assert train.tokens.tobytes() == np.array([*b"a", EOD, *text.encode(), EOD], dtype=np.uint16).tobytes()
    assert validation.tokens.tolist() == [*b"b", EOD]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (70_000, np.int32)])
def test_the_type_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    text = "a\N{SNAKE}\uffff"
    write_token_store(tmp_path, [(text, False)], WideTokenizer(vocab_size))
    _, train, validation = open_token_store(tmp_path)
    assert train.tokens.dtype == dtype
    assert train.tokens.tolist() == [*(ord(character) % vocab_size for character in text), vocab_size - 1]
    assert len(validation.tokens) == 0


@pytest.mark.parametrize(("vocab_size", "hashed"), [(65_499, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_checkpoints_of_earlier_formats_know_the_text_by_the_same_hash(
    tmp_path: Path, vocab_size: int, hashed: str
) -> None:
    write_token_store(tmp_path, [("ab", False), ("c", True)], WideTokenizer(vocab_size))
    files = ([97, 98, vocab_size - 1], [99, vocab_size - 1])
    digests = [hashlib.sha256(np.array(ids, hashed).tobytes()).digest() for ids in files]
    assert open_token_store(tmp_path)[0].fingerprint == hashlib.sha256(b"".join(digests)).hexdigest()


def test_tokens_are_mapped_not_read(tmp_path: Path) -> None:
    write_token_store(tmp_path, [("abc", False)], BytesTokenizer())
    _, train, _ = open_token_store(tmp_path)
    assert isinstance(train.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        train.tokens[0] = 1


def test_the_fingerprint_follows_the_tokens_and_the_split(tmp_path: Path) -> None:
    variants = [
        [("ab", False), ("c", True)],
        [("ab", False), ("d", True)],
        [("ac", False), ("c", True)],
        [("ab", True), ("c", False)],
        [("ab", False), ("c", False)],
    ]
    seen = []
    for index, documents in enumerate([*variants, variants[0]]):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_token_store(folder, documents, BytesTokenizer())
        seen.append(open_token_store(folder)[0].fingerprint)
    assert len(set(seen)) == len(variants)
    assert seen[-1] == seen[0]


def test_unigram_entropy() -> None:
    assert unigram_entropy_nats(np.array([2, 2, 0, 2, 2])) == pytest.approx(math.log(4))
    assert unigram_entropy_nats(np.array([3, 1])) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert unigram_entropy_nats(np.array([0, 7])) == 0
    assert unigram_entropy_nats(np.zeros(3, dtype=np.int64)) == 0


def test_the_entropy_is_that_of_the_training_tokens(tmp_path: Path) -> None:
    write_token_store(tmp_path, [("a", False), ("zzzzzz", True)], BytesTokenizer())
    assert open_token_store(tmp_path)[0].unigram_entropy_nats == pytest.approx(math.log(2))


@pytest.mark.parametrize("damage", ["cut", "no record", "record cut", "no file", "no index", "index cut", "other type"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    write_token_store(tmp_path, [("abc", False)], BytesTokenizer())
    train, index, meta = tmp_path / "train.bin", tmp_path / "train.idx", tmp_path / "meta.json"
    damages: dict[str, Callable[[], object]] = {
        "cut": lambda: train.write_bytes(train.read_bytes()[:-1]),
        "no record": meta.unlink,
        "record cut": lambda: meta.write_text(meta.read_text()[:20]),
        "no file": train.unlink,
        "no index": index.unlink,
        "index cut": lambda: index.write_bytes(index.read_bytes()[:-1]),
        "other type": lambda: index.write_bytes(index.read_bytes().replace(b"\x08", b"\x03", 1)),
    }
    damages[damage]()
    with pytest.raises(UserError, match=f"{tmp_path} is damaged .* delete that folder"):
        open_token_store(tmp_path)
