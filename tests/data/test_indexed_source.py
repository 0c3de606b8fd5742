"""Pairs of Megatron's indexed format as the source of a run: looked through once, and never copied."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.core.errors import DamagedDataError, UserError
from megastable.data import Corpus, prepare_corpus
from megastable.data.beside import meta_path, same_vocabulary, tokenizer_path
from megastable.data.indexed_format import index_path, tokens_path, write_index
from megastable.data.indexed_writer import IndexedWriter
from megastable.data.text_tokenizers import BytesTokenizer, train_bpe
from megastable.data.token_store import TokenStoreMeta
from megastable.data.tokenizer_interface import TextTokenizer
from megastable.planning.preflight.review import LocalText
from megastable.training.host import look_at_text
from tests.data.data_examples import text_data, tiny_model, write_documents

EOD = 256
DOCUMENTS = [[*f"document {index}: {'ab' * index}".encode(), EOD] for index in range(20)]


def write_pair(prefix: Path, documents: list[list[int]], vocab_size: int = 257, checksums: bool = True) -> Path:
    ids = np.concatenate(documents)
    writer = IndexedWriter(prefix, vocab_size)
    writer.append(ids, np.cumsum([len(document) for document in documents]))
    writer.finish()
    if not checksums:
        prefix.with_suffix(".crc32").unlink()
    return prefix


def prepared(prefix: Path, cache: Path, validation: Path | None = None, **changes: Any) -> Corpus:
    source = {"type": "indexed", "path": str(prefix)}
    if validation is not None:
        source["validation_path"] = str(validation)
    corpus = prepare_corpus(text_data(prefix, cache, source=source, **changes), tiny_model(), show_progress=True)
    assert isinstance(corpus, Corpus)
    return corpus


def flat(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.7])
def test_the_last_documents_are_for_validation(tmp_path: Path, fraction: float) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    corpus = prepared(pair, tmp_path / "cache", validation_fraction=fraction)
    kept = round(20 * (1 - fraction))
    assert corpus.train.tokens.tolist() == flat(DOCUMENTS[:kept])
    assert corpus.validation.tokens.tolist() == flat(DOCUMENTS[kept:])
    assert isinstance(corpus.train.tokens, np.memmap)
    assert (corpus.vocab_size, corpus.eod_id) == (257, 256)
    assert (corpus.tokenizer_path / "tokenizer.json").is_file()


def test_another_pair_may_be_for_validation(tmp_path: Path) -> None:
    train = write_pair(tmp_path / "train", DOCUMENTS[:15])
    validation = write_pair(tmp_path / "validation.v1", DOCUMENTS[15:])
    corpus = prepared(train, tmp_path / "cache", validation, validation_fraction=0.0)
    assert corpus.train.tokens.tolist() == flat(DOCUMENTS[:15])
    assert corpus.validation.tokens.tolist() == flat(DOCUMENTS[15:])


def test_the_store_of_a_text_is_a_pair_with_the_same_samples_and_fingerprint(tmp_path: Path) -> None:
    text = prepare_corpus(
        text_data(write_documents(tmp_path / "text"), tmp_path / "cache"), tiny_model(), show_progress=False
    )
    store = text.tokenizer_path.parent
    corpus = prepared(store / "train", tmp_path / "cache", store / "validation")
    assert corpus.fingerprint == text.fingerprint, "a run may go on with either"
    assert corpus.unigram_entropy_nats == text.unigram_entropy_nats
    for index in range(len(text.train)):
        for ours, theirs in zip(corpus.train[index], text.train[index], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_it_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    first = prepared(pair, tmp_path / "cache")
    monkeypatch.delattr("megastable.data.indexed_source.check_ids")
    assert prepared(pair, tmp_path / "cache").fingerprint == first.fingerprint


@pytest.mark.parametrize("place", ["train", "validation"])
@pytest.mark.parametrize("wrong", [257, -1])
def test_an_id_outside_the_vocabulary_is_named_before_the_run(tmp_path: Path, place: str, wrong: int) -> None:
    ids = np.array(flat(DOCUMENTS), "<i4")
    position = 5 if place == "train" else len(ids) - 3
    ids[position] = wrong
    tokens_path(tmp_path / "pair").write_bytes(ids.tobytes())
    write_index(index_path(tmp_path / "pair"), "<i4", np.array([len(document) for document in DOCUMENTS]))
    message = rf"{tmp_path}/pair\.bin has the id {wrong} at token {position}, outside the vocabulary of 257"
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "pair", tmp_path / "cache")


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("place", ["train", "validation"])
def test_damage_during_a_run_is_named_and_nobody_is_told_to_delete_his_data(
    tmp_path: Path, place: str, checksums: bool
) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS, vocab_size=70_000, checksums=checksums)
    corpus = prepared(pair, tmp_path / "cache")
    samples = corpus.train if place == "train" else corpus.validation
    position = samples.first_token + 9
    changed = np.memmap(tokens_path(pair), "<i4", mode="r+")
    changed[position] = -5
    changed.flush()
    with pytest.raises(DamagedDataError, match=rf"pair\.bin has the id -5 at token {position}, outside") as raised:
        samples[1]
    assert "copy the pair anew" in str(raised.value)
    assert "the next start builds it again" not in str(raised.value)


def test_faults_of_the_pair_name_the_key(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    missing = re.escape(f"megastable.data.source.path: {tmp_path}/none.idx cannot be read")
    with pytest.raises(UserError, match=missing):
        prepared(tmp_path / "none", tmp_path / "cache")
    with pytest.raises(UserError, match=r"megastable.data.source.validation_path: .*none\.idx cannot be read"):
        prepared(pair, tmp_path / "cache", tmp_path / "none")
    write_index(index_path(tmp_path / "void"), "<u2", np.zeros(0, np.int64))
    tokens_path(tmp_path / "void").touch()
    with pytest.raises(UserError, match=r"void\.bin has no tokens"):
        prepared(tmp_path / "void", tmp_path / "cache")
    (tmp_path / "pair.crc32").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"the checksums beside .*/pair\.bin are not its own"):
        prepared(pair, tmp_path / "cache")


def test_documents_that_another_tokenizer_ended_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [document if index % 5 else document[:-1] for index, document in enumerate(DOCUMENTS)]
    prepared(write_pair(tmp_path / "pair", documents), tmp_path / "cache")
    assert "4 of 20 documents do not end with the tokenizer's end-of-document id 256" in capsys.readouterr().err
    prepared(write_pair(tmp_path / "whole", DOCUMENTS), tmp_path / "cache")
    assert "do not end" not in capsys.readouterr().err


def write_built(prefix: Path, tokenizer: TextTokenizer, record: bool, beside: bool) -> Path:
    """Write a pair with what `data build` leaves beside it, in whole or in part."""
    documents = [[*tokenizer.encode_batch([f"document {index}"])[0], tokenizer.eod_id] for index in range(20)]
    write_pair(prefix, documents, tokenizer.vocab_size)
    if record:
        meta = TokenStoreMeta("<u2", 20, 0, 0, 0, tokenizer.vocab_size, tokenizer.eod_id, 0.0, "")
        meta_path(prefix).write_text(json.dumps(asdict(meta)))
    if beside:
        tokenizer_path(prefix).mkdir()
        tokenizer.save(tokenizer_path(prefix))
    return prefix


@pytest.mark.parametrize(("record", "beside"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("is_for_validation", [False, True])
def test_tokens_of_another_tokenizer_are_refused(
    tmp_path: Path, record: bool, beside: bool, is_for_validation: bool
) -> None:
    # Of as many tokens as the other one, so that no id is outside the vocabulary.
    made = train_bpe(257, ["document"])
    good = write_built(tmp_path / "good", BytesTokenizer(), record, beside)
    wrong = write_built(tmp_path / "wrong", made, record, beside)
    assert prepared(good, tmp_path / "cache", good).vocab_size == 257
    pairs = (good, wrong) if is_for_validation else (wrong, good)
    with pytest.raises(UserError, match=f"megastable.data.tokenizer: {wrong} was made with another token") as raised:
        prepared(pairs[0], tmp_path / "cache", pairs[1])
    assert (f'"path": "{wrong}.tokenizer"' in str(raised.value)) == beside


def test_a_tokenizer_that_is_put_beside_a_pair_later_is_seen(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    prepared(pair, tmp_path / "cache")
    tokenizer_path(pair).mkdir()
    train_bpe(257, ["a"]).save(tokenizer_path(pair))
    with pytest.raises(UserError, match="was made with another tokenizer"):
        prepared(pair, tmp_path / "cache")


def test_the_same_tokenizer_in_another_writing_is_the_same(tmp_path: Path) -> None:
    made = train_bpe(280, ["some words and some more words"] * 9)
    pair = write_built(tmp_path / "pair", made, record=True, beside=True)
    own = tmp_path / "own"
    own.mkdir()
    made.save(own)
    stored = json.loads((own / "tokenizer.json").read_text())
    stored["model"]["merges"] = [" ".join(merge) for merge in stored["model"]["merges"]]
    (own / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = {"type": "transformers", "path": str(own)}
    assert same_vocabulary(own, tokenizer_path(pair))
    assert prepared(pair, tmp_path / "cache", tokenizer=tokenizer).vocab_size == made.vocab_size


def test_documents_that_do_not_end_cannot_be_begun_anew_at(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", [document[:-1] for document in DOCUMENTS])
    prepared(pair, tmp_path / "cache")
    with pytest.raises(UserError, match=rf'packing: "reset" .* 256, with which no document of {pair}\.bin ends'):
        prepared(pair, tmp_path / "cache", packing="reset")
    last_ends = [document[:-1] for document in DOCUMENTS[:-1]] + [DOCUMENTS[-1]]
    prepared(write_pair(tmp_path / "last", last_ends), tmp_path / "cache", packing="reset")


def test_a_check_counts_the_tokens(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    source = text_data(pair, tmp_path, source={"type": "indexed", "path": str(pair)}).source
    assert look_at_text(source) == LocalText(20, 0, num_tokens=len(flat(DOCUMENTS)))
    index_path(pair).unlink()
    found = look_at_text(source)
    assert found is not None and found.fault.startswith(f"megastable.data.source.path: {pair}.idx cannot be read")
