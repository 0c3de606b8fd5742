from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from megastable.config import BpeTokenizerConfig, TokenizerConfig
from megastable.config.data import TokenizerSection
from megastable.config.section import kinds_of, tag_of
from megastable.core.errors import UserError
from megastable.data.byte_level import END_OF_TEXT
from megastable.data.text_tokenizers import (
    TOKENIZERS,
    BytesTokenizer,
    make_tokenizer,
    tokenizer_identity,
)
from megastable.data.tokenizer_interface import TextTokenizer
from tests.data.data_examples import tiny_model

TEXTS = ["the cat and the hat and the bat " * 20, "def the(cat):\n    return 'ähm \N{SNAKE}'\n" * 20]
AWKWARD = ["", " ", "the cat", "\r\n\t\0", "日本語 \N{SNAKE}", f"a{END_OF_TEXT}b"]


def spec_of(**settings: Any) -> TokenizerConfig:
    return TypeAdapter(TokenizerConfig).validate_python(settings)


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return make_tokenizer(spec_of(type="bpe"), tiny_model(vocab_size=280), TEXTS)


@pytest.fixture(scope="module")
def bpe_folder(bpe: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    bpe.save(folder)
    return folder


@pytest.fixture
def made(request: pytest.FixtureRequest, bpe_folder: Path) -> TextTokenizer:
    settings: dict[str, Any] = {"type": request.param}
    if request.param == "transformers":
        settings["path"] = str(bpe_folder)
    return make_tokenizer(spec_of(**settings), tiny_model(vocab_size=280), TEXTS)


@pytest.mark.parametrize("made", TOKENIZERS, indirect=True)
def test_every_kind_encodes_any_text_and_no_text_ends_a_document(made: TextTokenizer) -> None:
    encoded = [np.asarray(ids, dtype=np.int64) for ids in made.encode_batch([*TEXTS, *AWKWARD])]
    assert len(encoded) == len(TEXTS) + len(AWKWARD)
    everything = np.concatenate(encoded)
    assert everything.min() >= 0 and everything.max() < made.vocab_size
    assert made.eod_id not in everything
    assert 0 <= made.eod_id < made.vocab_size
    assert len(encoded[len(TEXTS)]) == 0, "an empty text has no tokens"


@pytest.mark.parametrize("made", TOKENIZERS, indirect=True)
def test_every_kind_is_saved_as_a_folder_that_transformers_opens(made: TextTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made.save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened.eos_token_id == made.eod_id
    for text, ids in zip(TEXTS, made.encode_batch(TEXTS), strict=True):
        assert opened(text, add_special_tokens=False)["input_ids"] == list(ids)
        assert opened.decode(list(ids), clean_up_tokenization_spaces=False) == text


@given(text=st.text())
@settings(deadline=None)
def test_bpe_loses_nothing(bpe: TextTokenizer, bpe_folder: Path, text: str) -> None:
    saved = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    [ids] = bpe.encode_batch([text])
    assert saved.decode(list(ids), skip_special_tokens=False) == text


@given(text=st.text())
def test_bytes_are_the_bytes(text: str) -> None:
    [ids] = BytesTokenizer().encode_batch([text])
    assert bytes(list(ids)) == text.encode()


def test_bpe_learns_and_is_the_same_each_time(bpe: TextTokenizer) -> None:
    [ids] = bpe.encode_batch(["the cat"])
    assert len(ids) <= 4
    again = make_tokenizer(spec_of(type="bpe"), tiny_model(vocab_size=280), iter(TEXTS))
    assert [*again.encode_batch(TEXTS)] == [*bpe.encode_batch(TEXTS)]
    assert again.vocab_size == bpe.vocab_size == 280


def never_read() -> Iterator[str]:
    raise AssertionError("a text was read for a tokenizer that cannot fit")
    yield ""


@pytest.mark.parametrize(
    ("settings", "model_vocab_size", "message"),
    [
        ({"type": "bpe", "vocab_size": 400}, 399, "megastable.model.vocab_size: 399 .* legal is 400 or more"),
        ({"type": "bytes"}, 256, "megastable.model.vocab_size: 256 .* legal is 257 or more"),
        ({"type": "bpe"}, 256, "megastable.data.tokenizer.vocab_size: 256 .* legal is 257 or more"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_read(
    settings: dict[str, Any], model_vocab_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_tokenizer(spec_of(**settings), tiny_model(vocab_size=model_vocab_size), never_read())


def test_a_transformers_vocabulary_that_does_not_fit_is_refused(bpe_folder: Path) -> None:
    spec = spec_of(type="transformers", path=str(bpe_folder))
    with pytest.raises(UserError, match=r"megastable\.model\.vocab_size: 279 .* legal is 280 or more"):
        make_tokenizer(spec, tiny_model(vocab_size=279), never_read())


def test_a_tokenizer_without_an_end_of_sequence_is_refused(bpe: TextTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    spec = spec_of(type="transformers", path=str(tmp_path))
    with pytest.raises(UserError, match=r"megastable\.data\.tokenizer\.path: .* no end-of-sequence token"):
        make_tokenizer(spec, tiny_model(vocab_size=280), never_read())


def test_a_folder_without_a_tokenizer_is_refused_with_its_name(tmp_path: Path) -> None:
    spec = spec_of(type="transformers", path=str(tmp_path))
    with pytest.raises(UserError, match=f"megastable.data.tokenizer.path: .*{tmp_path}"):
        make_tokenizer(spec, tiny_model(), never_read())


def test_the_identity_follows_what_decides_the_ids(bpe: TextTokenizer, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=280)
    assert tokenizer_identity(BpeTokenizerConfig(type="bpe"), model) == tokenizer_identity(
        BpeTokenizerConfig(type="bpe", vocab_size=280), tiny_model(vocab_size=999)
    )
    assert tokenizer_identity(BpeTokenizerConfig(type="bpe"), model) != tokenizer_identity(
        BpeTokenizerConfig(type="bpe"), tiny_model(vocab_size=281)
    )
    bpe.save(tmp_path)
    spec = spec_of(type="transformers", path=str(tmp_path))
    before = tokenizer_identity(spec, model)
    (tmp_path / "weights.safetensors").write_bytes(b"not of the tokenizer")
    assert tokenizer_identity(spec, model) == before
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + "\n")
    assert tokenizer_identity(spec, model) != before


def test_run_files_and_the_registry_know_the_same_tokenizers() -> None:
    assert {tag_of(kind) for kind in kinds_of(TokenizerSection)} == TOKENIZERS.keys()
