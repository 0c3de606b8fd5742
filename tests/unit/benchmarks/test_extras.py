"""Every script answers --help without the optional packages, which only some of what it does needs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
EXTRAS = {"matplotlib", "plotly", "tensorboard", "wandb"}


def loaded_on_import(path: Path) -> Iterator[str]:
    """Yield the packages that a module imports before any of its functions is called."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module.partition(".")[0]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.name)
def test_a_script_loads_no_extra_before_it_draws(path: Path) -> None:
    assert EXTRAS.isdisjoint(loaded_on_import(path))
