"""Whole runs on every kind of source: trained, evaluated, and resumed to the same numbers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_indexed_source import DOCUMENTS, write_pair
from tests.support.launches import metrics, untimed, write_run_file
from tests.support.scripts import train_and_resume

TEXTS = [f"{number}: {'the cat and the hat ' * (number % 5 + 2)}" for number in range(40)]
MORE_DOCUMENTS = [[*f"number {number} of {'many ' * (number % 7)}".encode(), 256] for number in range(60)]


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Write text for every kind of source, and return their sections."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "rows").mkdir()
    (folder / "rows/rows.jsonl").write_text(rows)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    kinds: dict[str, dict[str, Any]] = {
        "jsonl": {"type": "jsonl", "path": str(folder / "rows.jsonl.gz")},
        "indexed": {"type": "indexed", "path": str(write_pair(folder / "pair", [*DOCUMENTS, *MORE_DOCUMENTS]))},
        "stream": {"type": "hf", "path": str(folder / "rows"), "stream_rows": 35},
        "synthetic": {"type": "synthetic", "num_documents": 50, "words_per_document": 20},
    }
    weights = {"jsonl": 3.5, "indexed": 1, "stream": 2, "synthetic": 0.5}
    parts = [{"name": name, "weight": weights[name], "source": source} for name, source in kinds.items()]
    return {**kinds, "blend": {"type": "blend", "sources": parts}}


SLOW = pytest.mark.slow
"""A blend has all the others in it."""


@pytest.mark.parametrize("kind", [pytest.param("indexed", marks=SLOW), pytest.param("stream", marks=SLOW), "blend"])
def test_a_run_on_it_is_evaluated_and_resumed_to_the_same_numbers(tmp_path: Path, kind: str) -> None:
    run_file = write_run_file(
        tmp_path,
        megastable__checkpoint={"save_interval": 2},
        megastable__training__eval_interval=2,
        megastable__training__eval_samples=8,
    )
    settings = json.loads(run_file.read_text())
    settings["megastable"]["data"]["source"] = sources(tmp_path)[kind]
    run_file.write_text(json.dumps(settings))
    whole, resumed = train_and_resume(run_file, tmp_path, 2, 2)
    rows = metrics(whole)
    assert untimed(metrics(resumed)) == untimed(rows)
    evaluated = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [2, 4, 6, 8]
    if kind != "blend":
        assert not any("eval_losses" in row for row in rows)
        return
    shares = {"jsonl": 0.5, "indexed": 1 / 7, "stream": 2 / 7, "synthetic": 0.5 / 7}
    for row in evaluated:
        assert list(row["eval_losses"]) == list(shares)
        mean = sum(shares[name] * loss for name, loss in row["eval_losses"].items())
        assert row["eval_loss"] == pytest.approx(mean, rel=1e-12)
        assert len(set(row["eval_losses"].values())) == 4
    assert not any("epoch" in row for row in rows), "each source has its own"
