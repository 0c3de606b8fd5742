"""Token files that were changed on disk: noticed when they are opened, or when the tokens are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.errors import DamagedDataError, UserError
from megastable.data import SampleOrder, TokenDataset, prepare_corpus, token_store, training_micro_batches
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
    what = "their hash differs"
    if token >= BytesTokenizer.vocab_size:
        what = f"{file} has the id {token} at token {position}, outside 257 ids"
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
    damaged.train[1]
    with pytest.raises(DamagedDataError, match=rf"{file} has the id 299 at token 17, .* vocabulary of 257"):
        damaged.train[2]
