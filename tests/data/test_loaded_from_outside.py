"""Folders of tokenizers and datasets that are broken or bring code: one message, nothing runs, nothing is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megastable.config import SourceConfig, TokenizerConfig
from megastable.core.errors import UserError
from megastable.data.sources import open_source
from megastable.data.text_tokenizers import make_tokenizer
from tests.data.data_examples import tiny_model, write_documents

MARK = "code_ran"
CODE = f"open({MARK!r}, 'w').close()\n"
ROW = '{"text": "some"}\n'

TOKENIZERS: dict[str, dict[str, str]] = {
    "code of a tokenizer": {
        "own.py": CODE,
        "tokenizer_config.json": json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", None]}}),
    },
    "code of a model": {
        "own.py": CODE,
        "config.json": json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}),
    },
    "no tokens": {
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
    },
    "a list": {"tokenizer.json": "{", "tokenizer_config.json": "[]"},
    "a number": {"tokenizer_config.json": "3"},
}
DATASETS: dict[str, tuple[dict[str, str], str]] = {
    "script": ({"folder.py": CODE}, "RuntimeError: Dataset scripts are no longer supported"),
    "broken card": ({"README.md": "---\nconfigs: [a: b: c\n---\n", "train.jsonl": ROW}, "ParserError: "),
    "card of another form": (
        {"README.md": "---\nconfigs: 3\n---\n", "train.jsonl": ROW},
        "Expected configs to be a list",
    ),
    "nothing": ({}, "doesn't contain any data files"),
    "an empty file": ({"train.jsonl": ""}, ""),
    "no JSON": ({"train.jsonl": "{x"}, "JSON parse error"),
    "only a header": ({"train.csv": "text\n"}, "no data"),
    "no folder of datasets": ({"state.json": "[]"}, "neither a `Dataset` directory"),
}


@pytest.fixture(autouse=True)
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the questions that are asked on the terminal, each of which is answered with yes."""
    asked: list[str] = []

    def answer(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize("files", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used_is_one_message(
    tmp_path: Path, files: dict[str, str], questions: list[str]
) -> None:
    folder = write_documents(tmp_path / "folder", files)
    spec = TypeAdapter(TokenizerConfig).validate_python({"type": "transformers", "path": str(folder)})
    with pytest.raises(UserError, match=r"^megastable\.data\.tokenizer\.path: ") as refused:
        make_tokenizer(spec, tiny_model(), [])
    message = str(refused.value)
    assert str(folder) in message and "\n" not in message
    assert not (tmp_path / MARK).exists()
    assert questions == []
    if "AutoTokenizer" in files.get("tokenizer_config.json", ""):
        assert "has code of its own, which is not run" in message


@pytest.mark.parametrize(("files", "why"), DATASETS.values(), ids=DATASETS)
def test_a_dataset_that_cannot_be_opened_is_one_message(tmp_path: Path, files: dict[str, str], why: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_documents(folder, files)
    spec = TypeAdapter(SourceConfig).validate_python({"type": "hf", "path": str(folder)})
    with pytest.raises(UserError, match=r"^megastable\.data\.source\.path: datasets cannot open ") as refused:
        open_source(spec)
    message = str(refused.value)
    assert why in message and "\n" not in message and "list index out of range" not in message
    assert not (tmp_path / MARK).exists()
