"""A tokenizer of one section, one kind and one line works wherever text is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.config import load_run_file
from megastable.core.errors import UserError
from megastable.data import prepare_corpus
from tests.data.data_examples import prepare_single, write_documents
from tests.support.toy_tokenizer import lengths_tokenizer_registered

QUICKSTART = Path(__file__).parents[2] / "ds_configs" / "quickstart.json"


@pytest.fixture(autouse=True)
def _added() -> Iterator[None]:
    with lengths_tokenizer_registered():
        yield


def run_file(tmp_path: Path, documents: Path, **tokenizer: Any) -> Path:
    """Write the quickstart on the lengths of words."""
    settings = json.loads(QUICKSTART.read_text())
    settings["megastable"]["data"] = {
        "source": {"type": "text", "path": str(documents)},
        "tokenizer": {"type": "lengths"} | tokenizer,
        "cache_dir": str(tmp_path / "cache"),
    }
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents", {"a.txt": "one three eleven " * 2000, "b.txt": "four " * 9})


def test_the_check_reviews_a_run_with_it(tmp_path: Path, documents: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(run_file(tmp_path, documents)), "--world-size", "2"])
    assert result.exit_code == 0, result.output


def test_a_corpus_is_tokenised_by_it_and_cached_by_its_identity(tmp_path: Path, documents: Path) -> None:
    folders = set()
    for longest in (20, 5):
        sections = load_run_file(run_file(tmp_path, documents, longest=longest), world_size=2).megastable
        corpus = prepare_single(sections.data, sections.model)
        assert corpus.vocab_size == longest + 1
        assert corpus.train.tokens[:4].tolist() == [3, 5, min(6, longest), 3]
        folders.add(corpus.tokenizer_path)
    assert len(folders) == 2


def test_one_that_does_not_fit_the_model_is_refused(tmp_path: Path, documents: Path) -> None:
    sections = load_run_file(run_file(tmp_path, documents, longest=10**6), world_size=2).megastable
    with pytest.raises(UserError, match=r"megastable\.model\.vocab_size: .* legal is 1000001 or more"):
        prepare_corpus(sections.data, sections.model, show_progress=False)
