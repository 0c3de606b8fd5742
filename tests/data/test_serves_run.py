"""What a run asks of a corpus: enough text for its largest batch and, where it evaluates, text to evaluate on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import load_run_file
from megastable.core.errors import UserError
from megastable.data import check_serves_run, prepare_corpus
from megastable.planning.preflight.preflight import preflight
from megastable.planning.run_plan import RunPlan
from megastable.training.host import look_at_text
from tests.data.data_examples import write_documents
from tests.support.tiny_run import run_dict


def run_file(folder: Path, documents: list[str], fraction: float, eval_interval: int, final: int) -> Path:
    """Write a run of single-sample micro-batches on ``documents``, as bytes, in samples of 16."""
    settings: dict[str, Any] = run_dict(megastable__batch_rampup={"final": final})
    texts = write_documents(folder / "documents", {f"{index}.txt": text for index, text in enumerate(documents)})
    settings["megastable"]["data"] |= {
        "source": {"type": "text", "path": str(texts)},
        "validation_fraction": fraction,
        "cache_dir": str(folder / "cache"),
    }
    settings["megastable"]["training"]["eval_interval"] = eval_interval
    path = folder / "run.json"
    path.write_text(json.dumps(settings))
    return path


def refusal_of_launch(path: Path) -> str:
    """Return the message with which a launch ends before it trains; empty where it trains."""
    run = load_run_file(path, world_size=1)
    sections = run.megastable
    largest = RunPlan.of(run, 1).phases[-1].batch.global_batch_size
    try:
        corpus = prepare_corpus(sections.data, sections.model, show_progress=False)
        check_serves_run(corpus, sections.data, largest, sections.training.eval_interval)
    except UserError as error:
        return str(error)
    return ""


def errors_of_check(path: Path) -> list[str]:
    findings = preflight(path, 1, (), look_at_text)
    return [finding.key for finding in findings if finding.level == "error"]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    fraction=st.sampled_from([0.02, 0.5]),
    eval_interval=st.sampled_from([0, 3]),
    final=st.integers(1, 8),
)
def test_what_the_check_calls_an_error_the_launch_refuses_and_the_launch_refuses_what_cannot_be_done(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], fraction: float, eval_interval: int, final: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = run_file(folder, ["x" * length for length in lengths], fraction, eval_interval, final)
    refused = refusal_of_launch(path)
    if errors_of_check(path):
        assert refused
    if len(lengths) == 1:
        # Nothing is kept for validation: sizes are exact, and the two agree both ways.
        samples = -(-lengths[0] // 16) if lengths[0] >= 16 else 0
        assert bool(refused) == (samples < final or eval_interval > 0)
        assert bool(errors_of_check(path)) == bool(refused)


def test_a_batch_larger_than_the_data_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = run_file(tmp_path, ["x" * 160], 0, 0, final=11)
    assert "largest global batch of 11 samples is larger than the training data, which are 10" in refusal_of_launch(
        path
    )
    assert refusal_of_launch(run_file(tmp_path, ["x" * 160], 0, 0, final=10)) == ""


def test_an_evaluation_without_text_is_refused_with_its_key(tmp_path: Path) -> None:
    path = run_file(tmp_path, ["x" * 160], 0.5, 5, final=1)
    message = refusal_of_launch(path)
    assert message.startswith("megastable.training.eval_interval: 5, but there is no text to evaluate on")
    assert errors_of_check(path) == ["megastable.training.eval_interval"]
