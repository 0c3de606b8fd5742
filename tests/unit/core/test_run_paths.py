"""The names of a run's files, which tools outside this package read too."""

from pathlib import Path

from megastable.core.run_paths import RunPaths


def test_the_names_are_those_of_earlier_versions() -> None:
    paths = RunPaths(Path("runs/x"))
    found = [paths.config, paths.metrics, paths.events, paths.checkpoints]
    assert [str(path) for path in found] == [
        "runs/x/config.json",
        "runs/x/metrics.jsonl",
        "runs/x/events.jsonl",
        "runs/x/checkpoints",
    ]
