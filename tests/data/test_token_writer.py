"""Building a token store: in pieces that do not show, and going on after an interrupt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from megastable.config import BpeTokenizerConfig
from megastable.core.errors import UserError
from megastable.data import corpus as corpus_module
from megastable.data import prepare_corpus, seams, token_writer
from megastable.data.text_tokenizers import BytesTokenizer, TransformersTokenizer, make_tokenizer
from megastable.data.token_store import open_token_store
from megastable.data.token_writer import describe_progress, write_token_store
from megastable.data.tokenizer_interface import TextTokenizer
from tests.data.data_examples import text_data, tiny_model, write_documents

LEARNED = ["the cat and the hat, don't 12 345! " * 30, "über  the\n\n cat\t'll "] * 3
# What tokenizers treat unlike letters: spaces in rows, line ends, digits, contractions, combining marks.
TEXTS = st.text(st.sampled_from("thecatu \n\r\t'1!.\u0301é▁"), min_size=1, max_size=300)


def trained(pre_tokenizer: Any, normalizer: Any = None, unigram: bool = False) -> TextTokenizer:
    """Train a tokenizer of the transformers kind."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    specials = ["</s>", "<unk>"]
    trainer: Any = trainers.BpeTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    if unigram:
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(LEARNED, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    return TransformersTokenizer(wrapped, wrapped.eos_token_id)


@pytest.fixture(scope="module")
def kinds() -> dict[str, TextTokenizer]:
    # Llama 2's: a space before every text, and no pre-tokenizer but spaces.
    llama = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bert = normalizers.BertNormalizer()
    return {
        "bytes": BytesTokenizer(),
        "bpe": make_tokenizer(BpeTokenizerConfig(type="bpe"), tiny_model(vocab_size=290), LEARNED),
        "metaspace": trained(pre_tokenizers.Metaspace()),
        "metaspace unigram": trained(pre_tokenizers.Metaspace(), normalizers.NFKC(), unigram=True),
        "metaspace first": trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
        "prepend": trained(pre_tokenizers.Metaspace(prepend_scheme="never", split=False), llama),
        "words": trained(pre_tokenizers.BertPreTokenizer(), bert),
        "byte level": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "strip": trained(pre_tokenizers.Whitespace(), normalizers.Strip()),
    }


KINDS = [
    "bytes", "bpe", "metaspace", "metaspace unigram", "metaspace first", "prepend", "words", "byte level", "strip"
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(text=TEXTS, characters=st.integers(1, 60))
def test_the_pieces_of_a_text_have_its_ids(
    kinds: dict[str, TextTokenizer], kind: str, text: str, characters: int
) -> None:
    tokenizer = kinds[kind]
    pieces = list(tokenizer.pieces(text, characters))
    assert "".join(pieces) == text
    joined = [int(token) for ids in tokenizer.encode_batch(pieces) for token in ids]
    assert joined == [int(token) for token in tokenizer.encode_batch([text])[0]]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace", "words", "byte level"])
def test_a_long_text_is_cut_where_it_can_be(kinds: dict[str, TextTokenizer], kind: str) -> None:
    pieces = list(kinds[kind].pieces("the cat and the hat " * 100, 100))
    assert len(pieces) > 10
    assert max(map(len, pieces)) < 100 + 20 * seams._MOST_ATTEMPTS


def test_a_text_without_a_space_is_one_piece(kinds: dict[str, TextTokenizer]) -> None:
    assert list(kinds["bpe"].pieces("x" * 1000, 10)) == ["x" * 1000]


def test_a_document_longer_than_the_budget_is_learned_from_in_part_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_documents(tmp_path / "documents", {"a.txt": "the cat and " * 1000})
    seen: list[str] = []

    def spy(spec: Any, model: Any, training_texts: Any) -> Any:
        seen.extend(training_texts)
        return make_tokenizer(spec, model, seen)

    monkeypatch.setattr(corpus_module, "make_tokenizer", spy)
    monkeypatch.setattr(corpus_module, "BPE_TRAINING_CHARACTERS", 5000)
    data = text_data(texts, tmp_path / "cache", tokenizer={"type": "bpe"})
    prepare_corpus(data, tiny_model(), show_progress=False)
    assert [len(text) for text in seen] == [5000]


class Interrupting(Sequence[tuple[str, bool]]):
    """Documents of which one interrupts the build, as a kill would."""

    def __init__(self, documents: Sequence[tuple[str, bool]], at: int | None) -> None:
        self._documents = documents
        self._at = at
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        if index == self._at:
            raise KeyboardInterrupt
        self.read.append(index)
        return self._documents[index]


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_writer, "_BATCH_CHARACTERS", 12)
        patch.setattr(token_writer, "_PIECE_CHARACTERS", 5)
        patch.setattr(token_writer, "_SYNC_SECONDS", 0)
        yield


@pytest.mark.usefixtures("_small_batches")
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 11), max_size=3),
    torn=st.binary(max_size=5),
)
def test_an_interrupted_build_goes_on_and_has_the_tokens_of_one_that_was_not(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int], torn: bytes
) -> None:
    documents = [(chr(97 + index) * length, index % 3 == 1) for index, length in enumerate(lengths)]
    whole = tmp_path_factory.mktemp("whole")
    write_token_store(whole, documents, BytesTokenizer())
    folder = tmp_path_factory.mktemp("interrupted")
    done = 0
    for cut in [*(cut for cut in sorted(cuts) if cut < len(documents)), None]:
        reading = Interrupting(documents, cut)
        if cut is not None and cut < done:
            continue
        if cut is not None:
            with pytest.raises(KeyboardInterrupt):
                write_token_store(folder, reading, BytesTokenizer())
            done = json.loads((folder / "progress.json").read_text())["finished_documents"]
            far = f"{done} of {len(documents)} documents are tokenised"
            assert describe_progress(folder) == (far if done else "")
            # A killed process may have written more than it has recorded.
            with (folder / "train.bin").open("ab") as file:
                file.write(torn)
        else:
            write_token_store(folder, reading, BytesTokenizer())
            assert reading.read == list(range(done, len(documents))), "what was finished is not read again"
    for name in ("train.bin", "validation.bin", "meta.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace", "strip"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_processes_writes_the_same_bytes(
    tmp_path: Path, kinds: dict[str, TextTokenizer], kind: str, num_workers: int
) -> None:
    texts = ["the cat ", "", "über  the\n\n cat" * 3, "a", "the cat and the hat, don't 12 345! " * 5, "", " "]
    documents = [(text, index % 4 == 1) for index, text in enumerate(texts * 3)]
    folders = []
    for workers in (0, num_workers):
        folder = tmp_path / str(workers)
        folder.mkdir()
        write_token_store(folder, documents, kinds[kind], num_workers=workers)
        folders.append(folder)
    names = sorted(path.name for path in folders[0].iterdir() if path.is_file())
    assert len(names) == 7
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_a_few_batches_are_read_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token_writer, "_BATCH_CHARACTERS", 1)
    monkeypatch.setattr(token_writer, "_SYNC_SECONDS", 0)
    reading = Interrupting([(str(index), False) for index in range(100)], at=50)
    with pytest.raises(KeyboardInterrupt):
        write_token_store(tmp_path, reading, BytesTokenizer(), num_workers=2)
    finished = json.loads((tmp_path / "progress.json").read_text())["finished_documents"]
    assert 50 - 2 * 2 <= finished <= 50


def test_documents_without_text_are_counted(tmp_path: Path) -> None:
    documents = [("a", False), ("", False), ("", True)]
    meta = write_token_store(tmp_path, documents, BytesTokenizer())
    assert (meta.num_documents, meta.num_empty_documents) == (3, 2)
    assert open_token_store(tmp_path)[0] == meta


def test_a_run_says_how_many_documents_had_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat and the hat"}\n{"text": ""}\n\n')
    data = text_data(tmp_path, tmp_path / "cache", source={"type": "jsonl", "path": str(tmp_path / "rows.jsonl")})
    prepare_corpus(data.model_copy(update={"validation_fraction": 0.0}), tiny_model(), show_progress=True)
    assert "rows.jsonl: left out 2 documents without text" in capsys.readouterr().err


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("damage", ["another tokenizer", "no record", "record of another form", "cut"])
def test_what_cannot_be_gone_on_from_is_built_anew(tmp_path: Path, damage: str) -> None:
    documents = [(f"some text {index}", False) for index in range(6)]
    with pytest.raises(KeyboardInterrupt):
        write_token_store(tmp_path, Interrupting(documents, 4), BytesTokenizer())
    progress = tmp_path / "progress.json"
    record = json.loads(progress.read_text())
    assert record["finished_documents"] > 0
    if damage == "another tokenizer":
        progress.write_text(json.dumps(record | {"tokenizer": "other"}))
    elif damage == "no record":
        progress.unlink()
    elif damage == "record of another form":
        progress.write_text('{"documents": 3}')
    else:
        (tmp_path / "train.bin").write_bytes(b"ab")
    reading = Interrupting(documents, None)
    write_token_store(tmp_path, reading, BytesTokenizer())
    assert reading.read == list(range(6))
    _, train, _ = open_token_store(tmp_path)
    assert np.count_nonzero(train.tokens == BytesTokenizer.eod_id) == 6


def test_a_document_with_half_a_surrogate_pair_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_documents(tmp_path / "documents", {"a.txt": "a", "b.txt": "b"})
    monkeypatch.setattr("megastable.data.text_files.TextFiles.__getitem__", lambda self, index: "a\ud800" * index)
    for tokenizer in ({"type": "bytes"}, {"type": "bpe"}):
        with pytest.raises(UserError, match=r"document 1 of .* is no Unicode text: .* \(character 1\)"):
            prepare_corpus(text_data(texts, tmp_path, tokenizer=tokenizer), tiny_model(), show_progress=False)
