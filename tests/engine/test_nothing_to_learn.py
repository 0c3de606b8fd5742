"""A global batch of prompts alone: skipped and said, and neither momentum nor weight decay moves a weight."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from megastable.checkpoints.folder import folder_name
from tests.support.launches import metrics, untimed, write_run_file
from tests.support.scripts import train_and_resume


def weights(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, by file and name."""
    folder = run_dir / "checkpoints" / folder_name(step)
    found = {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    assert found
    return found


def test_a_batch_without_a_token_to_learn_from_is_skipped_and_said(tmp_path: Path) -> None:
    pairs = [{"prompt": "a long question " * 20, "completion": f"yes {number}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run_file = write_run_file(tmp_path, megastable__checkpoint={"save_interval": 1})
    settings = json.loads(run_file.read_text())
    settings["megastable"]["data"]["source"] = {
        "type": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "prompt_key": "prompt",
        "completion_key": "completion",
    }
    run_file.write_text(json.dumps(settings))
    whole, resumed = train_and_resume(run_file, tmp_path, 3, 2)
    rows = metrics(whole)
    assert untimed(metrics(resumed)) == untimed(rows)
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert 0 < len(skipped) < len(rows)
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    said = [event["step"] for event in events if event["kind"] == "nothing_to_learn"]
    assert said == skipped
    assert {event["kind"] for event in events} == {"nothing_to_learn"}, "nothing else is wrong"
    for step in range(2, len(rows) + 1):
        before, after = weights(whole, step - 1), weights(whole, step)
        same = all(np.array_equal(before[name], after[name]) for name in before)
        assert same == (step in skipped)
