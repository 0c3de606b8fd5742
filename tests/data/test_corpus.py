from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.core.errors import UserError
from megastable.data import Corpus, prepare_corpus
from megastable.data import corpus as corpus_module
from megastable.data.progress import note
from megastable.data.text_tokenizers import make_tokenizer
from tests.data.data_examples import DOCUMENTS, prepare_single, text_data, tiny_model, write_documents


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents")


def prepared(documents: Path, cache_dir: Path, **changes: Any) -> Corpus:
    return prepare_single(text_data(documents, cache_dir, **changes), tiny_model())


def texts_of(tokens: np.ndarray, eod_id: int) -> list[str]:
    *whole, rest = np.split(tokens, np.flatnonzero(tokens == eod_id) + 1)
    assert len(rest) == 0, "the last document is ended too"
    return [bytes(part[:-1].tolist()).decode() for part in whole]


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.2, 0.7])
def test_every_document_is_in_one_split(documents: Path, tmp_path: Path, fraction: float) -> None:
    corpus = prepared(documents, tmp_path, validation_fraction=fraction)
    train = texts_of(corpus.train.tokens, corpus.eod_id)
    validation = texts_of(corpus.validation.tokens, corpus.eod_id)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(DOCUMENTS.values())
    assert len(validation) == {0.0: 0, 0.02: 1, 0.2: 4, 0.7: 14}[fraction]
    assert (len(corpus.validation) > 0) == (fraction > 0)
    assert corpus.num_train_tokens == sum(len(text.encode()) + 1 for text in train)
    assert corpus.num_validation_tokens == sum(len(text.encode()) + 1 for text in validation)


def test_samples_have_the_models_length(documents: Path, tmp_path: Path) -> None:
    corpus = prepared(documents, tmp_path)
    assert corpus.train.seq_length == corpus.validation.seq_length == 8
    np.testing.assert_array_equal(corpus.train[1][0], corpus.train.tokens[8:16])
    assert corpus.vocab_size == 257
    assert (corpus.tokenizer_path / "tokenizer.json").is_file()


def test_the_cache_is_used_whatever_the_length_of_samples(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(documents, tmp_path)
    monkeypatch.delattr(corpus_module, "write_token_store")
    again = prepare_single(text_data(documents, tmp_path), tiny_model(seq_length=5))
    assert again.fingerprint == first.fingerprint
    assert again.tokenizer_path == first.tokenizer_path
    assert again.train.seq_length == 5


def test_a_start_with_a_finished_cache_reads_no_document(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(documents, tmp_path)
    monkeypatch.delattr("megastable.data.text_files.TextFiles.__getitem__")
    assert prepared(documents, tmp_path).fingerprint == first.fingerprint


def test_a_store_of_an_earlier_format_is_built_anew_with_the_same_tokens(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "FORMAT_VERSION", 1)
        earlier = prepared(documents, tmp_path)
    for file in earlier.tokenizer_path.parent.glob("*.crc32"):
        file.unlink()
    now = prepared(documents, tmp_path)
    assert now.tokenizer_path != earlier.tokenizer_path
    assert now.fingerprint == earlier.fingerprint, "checkpoints go on"


def test_what_decides_the_tokens_decides_the_cache_folder(documents: Path, tmp_path: Path) -> None:
    bpe = {"type": "bpe", "vocab_size": 280}
    changes: list[dict[str, Any]] = [{}, {"validation_fraction": 0.3}, {"tokenizer": bpe}]
    folders = {prepared(documents, tmp_path, **change).tokenizer_path for change in changes}
    write_documents(documents, {"new.txt": "one more"})
    folders.add(prepared(documents, tmp_path).tokenizer_path)
    assert len(folders) == 4
    write_documents(tmp_path / "copy")
    copied = prepared(tmp_path / "copy", tmp_path)
    assert copied.tokenizer_path not in folders


def test_equal_documents_have_equal_fingerprints_wherever_they_are(documents: Path, tmp_path: Path) -> None:
    here = prepared(documents, tmp_path, tokenizer={"type": "bpe", "vocab_size": 290})
    there = prepared(write_documents(tmp_path / "copy"), tmp_path, tokenizer={"type": "bpe", "vocab_size": 290})
    assert here.tokenizer_path != there.tokenizer_path
    assert here.fingerprint == there.fingerprint


def test_a_bpe_learns_from_the_training_documents_alone(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = texts_of(prepared(documents, tmp_path).train.tokens, eod_id=256)
    seen: list[str] = []

    def spy(spec: Any, model: Any, training_texts: Any) -> Any:
        seen.extend(training_texts)
        return make_tokenizer(spec, model, seen)

    monkeypatch.setattr(corpus_module, "make_tokenizer", spy)
    prepared(documents, tmp_path, tokenizer={"type": "bpe", "vocab_size": 270})
    assert sorted(seen) == sorted(train)
    assert seen != train, "mixed, so that a part of them stands for all"

    monkeypatch.setattr(corpus_module, "BPE_TRAINING_CHARACTERS", sum(map(len, seen[:5])))
    few, seen = seen[:5], []
    prepared(documents, tmp_path, tokenizer={"type": "bpe", "vocab_size": 271})
    assert seen == few


def test_a_corpus_shorter_than_a_sample_is_refused_with_its_path(documents: Path, tmp_path: Path) -> None:
    num_tokens = prepared(documents, tmp_path).num_train_tokens
    data = text_data(documents, tmp_path)
    prepare_corpus(data, tiny_model(seq_length=num_tokens - 1), show_progress=False)
    with pytest.raises(UserError, match=rf"{documents} has [\d,]+ training tokens, less than one sample"):
        prepare_corpus(data, tiny_model(seq_length=num_tokens), show_progress=False)


def test_a_cached_tokenizer_is_checked_against_the_model(documents: Path, tmp_path: Path) -> None:
    prepared(documents, tmp_path)
    with pytest.raises(UserError, match=r"megastable\.model\.vocab_size: 256 .* legal is 257 or more"):
        prepare_corpus(text_data(documents, tmp_path), tiny_model(vocab_size=256), show_progress=False)


def test_an_undecodable_file_leaves_nothing_in_the_cache(documents: Path, tmp_path: Path) -> None:
    (documents / "zz.txt").write_bytes(b"o" * 9000 + b"\xff\xff")
    with pytest.raises(UserError, match=r"zz\.txt is not UTF-8"):
        prepared(documents, tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache/tokens").iterdir() if entry.is_dir()] == []


def test_progress_is_one_plain_line_a_part_or_nothing(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(documents, tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    prepare_corpus(text_data(documents, tmp_path / "loud"), tiny_model(), show_progress=True)
    assert capsys.readouterr().err.splitlines() == [
        "Preparing the bytes tokenizer ...",
        "Tokenising 20 documents ...",
    ]


def test_progress_is_a_bar_on_a_terminal(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    corpus = prepare_corpus(text_data(documents, tmp_path), tiny_model(), show_progress=True)
    assert "100%" in capsys.readouterr().err
    assert corpus.num_train_tokens > 0


def test_the_name_of_a_file_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    note("\x1b[31mred.bin is no text", show=True)
    assert capsys.readouterr().err == "\\x1b[31mred.bin is no text\n"
