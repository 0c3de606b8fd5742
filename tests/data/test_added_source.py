"""A text source of one section, one class and one line works wherever a source is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megastable.cli.main import app
from megastable.config import load_run_file
from megastable.core.batch_rampup import Batch
from megastable.data import SampleOrder, prepare_corpus, training_micro_batches
from megastable.planning.preflight.preflight import preflight
from megastable.planning.preflight.review import Finding, LocalText
from megastable.training.host import look_at_text
from tests.data.data_examples import prepare_single
from tests.support.toy_source import counting_source_registered

QUICKSTART = Path(__file__).parents[2] / "ds_configs" / "quickstart.json"


@pytest.fixture
def added() -> Iterator[None]:
    with counting_source_registered():
        yield


def run_file(tmp_path: Path, **source: Any) -> Path:
    """Write the quickstart on numbers."""
    settings = json.loads(QUICKSTART.read_text())
    settings["megastable"]["data"] = {
        "source": {"type": "counting"} | source,
        "tokenizer": {"type": "bytes"},
        "cache_dir": str(tmp_path / "cache"),
    }
    path = tmp_path / "numbers.json"
    path.write_text(json.dumps(settings))
    return path


def findings_about_text(path: Path) -> list[Finding]:
    findings = preflight(path, 2, (), look_at_text)
    assert "megastable.model.vocab_size" not in {finding.key for finding in findings}
    return [finding for finding in findings if finding.key.startswith("megastable.data")]


def test_before_it_is_added_its_type_is_refused(tmp_path: Path) -> None:
    (finding,) = findings_about_text(run_file(tmp_path, num_documents=5))
    assert finding.level == "error"


@pytest.mark.usefixtures("added")
def test_its_text_is_counted(tmp_path: Path) -> None:
    found = look_at_text(load_run_file(run_file(tmp_path, num_documents=2)).megastable.data.source)
    assert found == LocalText(2, 2 * 3 * len("0 is followed by 1. "))


@pytest.mark.usefixtures("added")
def test_a_size_that_is_not_known_is_not_judged(tmp_path: Path) -> None:
    path = run_file(tmp_path, num_documents=2, size_is_known=False)
    assert look_at_text(load_run_file(path).megastable.data.source) is None
    assert findings_about_text(path) == []


def test_a_source_that_may_download_is_left_alone_by_a_check(tmp_path: Path) -> None:
    with counting_source_registered(may_download=True):
        assert findings_about_text(run_file(tmp_path, num_documents=0)) == []


@pytest.mark.usefixtures("added")
def test_the_check_reviews_a_run_on_it(tmp_path: Path) -> None:
    assert findings_about_text(run_file(tmp_path, num_documents=100_000)) == []
    (short,) = findings_about_text(run_file(tmp_path, num_documents=10))
    assert "training tokens are less than the 3,970 of one step" in short.message
    (missing,) = findings_about_text(run_file(tmp_path, num_documents=0))
    assert "0 documents are no text" in missing.message


@pytest.mark.usefixtures("added")
def test_the_commands_take_it(tmp_path: Path) -> None:
    path = run_file(tmp_path, num_documents=100_000)
    checked = CliRunner().invoke(app, ["check", str(path), "--world-size", "2"])
    assert checked.exit_code == 0, checked.output
    planned = CliRunner().invoke(app, ["plan", str(path), "--devices", "2"])
    assert planned.exit_code == 0, planned.output


@pytest.mark.usefixtures("added")
def test_a_corpus_is_made_of_it_and_trained_on(tmp_path: Path) -> None:
    sections = load_run_file(run_file(tmp_path, num_documents=100), world_size=2).megastable
    corpus = prepare_single(sections.data, sections.model)
    documents = np.split(corpus.train.tokens, np.flatnonzero(corpus.train.tokens == corpus.eod_id) + 1)
    assert len(documents) - 1 == 98
    assert bytes(documents[3][:-1].tolist()).decode().startswith("3 is followed by 4. ")
    assert prepare_corpus(sections.data, sections.model, show_progress=False).tokenizer_path == corpus.tokenizer_path

    order = SampleOrder(len(corpus.train), seed=1)
    items = list(training_micro_batches(corpus.train, order, Batch(4, 2, 2), 0, 0, 1))
    assert [tuple(input_ids.shape) for input_ids, _ in items] == [(2, sections.model.seq_length)] * 2
