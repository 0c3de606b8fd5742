"""The house of CONTRIBUTING.md: floors, the one importer of DeepSpeed, and what stays out of torch's reach."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megastable"
FLOORS = {
    "core": 0,
    "config": 1,
    "planning": 2,
    "model": 2,
    "data": 2,
    "monitors": 2,
    "checkpoints": 2,
    "engine": 3,
    "training": 4,
    "interop": 4,
    "cli": 5,
}
ENGINE_ONLY = ("deepspeed", "torch.distributed")
HEAVY = ("torch", "deepspeed", "numpy")
TIME_LIMIT_SECONDS = 60

MODULES = sorted(PACKAGE.rglob("*.py"))
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))


def imports_of(source: str, package: str = "") -> Iterator[str]:
    """Full names of all that ``source`` imports, wherever the import stands in it.

    Counted as well: relative imports (``package`` is the module's), imports by a function with a constant name, and
    ``torch.distributed`` used as an attribute of an imported ``torch``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec", "resolve_name"):
                yield str(node.args[0].value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def is_within(name: str, package: str) -> bool:
    """True where ``name`` is ``package`` or lies in it."""
    return name == package or name.startswith(f"{package}.")


def room_of(name: str) -> str:
    """The room of a full module name; empty for ``megastable`` itself."""
    return name.split(".")[1] if "." in name else ""


@cache
def imports_of_file(path: Path) -> frozenset[str]:
    """What one file of the package or of launch/ imports."""
    package = ".".join(path.parent.relative_to(REPOSITORY).parts)
    return frozenset(imports_of(path.read_text(encoding="utf-8"), package))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("import torch\ndef f():\n    torch.distributed.barrier()", "torch.distributed"),
        ("def f():\n    from deepspeed import comm", "deepspeed.comm"),
        ("if TYPE_CHECKING:\n    import deepspeed", "deepspeed"),
        ("importlib.import_module('deepspeed.comm')", "deepspeed.comm"),
        ("from ..training import loop", "megastable.training.loop"),
        ("from . import loop", "megastable.model.loop"),
        ("from megastable import training", "megastable.training"),
    ],
)
def test_no_way_of_importing_is_overlooked(source: str, expected: str) -> None:
    assert expected in set(imports_of(source, package="megastable.model"))


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= FLOORS.keys()
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py"}


@every_module
def test_a_room_imports_only_lower_floors_or_itself(path: Path) -> None:
    own_room = path.relative_to(PACKAGE).parts[0]
    if own_room == "__init__.py":
        assert not imports_of_file(path) - {"__future__.annotations"}
        return
    used = {room_of(name) for name in imports_of_file(path) if is_within(name, "megastable")} - {"", "__version__"}
    assert {room for room in used if room != own_room and FLOORS[room] >= FLOORS[own_room]} == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count as well: they hide a circle, and do not open it."""
    names = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in MODULES}
    used = {
        name: {other for other in names if other != name and any(is_within(i, other) for i in imports_of_file(path))}
        for name, path in names.items()
    }
    # A file that imports nothing of the rest is in no circle; without it the next ones are free.
    while free := [name for name, others in used.items() if not others]:
        for name in free:
            del used[name]
        for others in used.values():
            others.difference_update(free)
    assert used == {}


def test_launch_imports_its_command_line_and_what_leads_a_run_only() -> None:
    (path,) = (REPOSITORY / "launch").glob("*.py")
    used = {name for name in imports_of_file(path) if is_within(name, "megastable")}
    assert used
    # A script reads its command line as every script does.
    allowed = ("megastable.training.entry", "megastable.training.start", "megastable.core.scripts")
    assert all(any(is_within(name, module) for module in allowed) for name in used)
    others = {name.split(".")[0] for name in imports_of_file(path)} - {"megastable"}
    assert others <= sys.stdlib_module_names


@every_module
def test_deepspeed_and_torch_distributed_are_the_engines_alone(path: Path) -> None:
    if path.is_relative_to(PACKAGE / "engine"):
        return
    used = {name for name in imports_of_file(path) for package in ENGINE_ONLY if is_within(name, package)}
    assert used == set()


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda path: path.name)
def test_core_imports_the_standard_library_and_itself(path: Path) -> None:
    for name in imports_of_file(path):
        assert name.split(".")[0] in sys.stdlib_module_names or is_within(name, "megastable.core"), name


def test_no_room_for_odds_and_ends() -> None:
    names = {"utils", "util", "helpers", "misc", "common"}
    assert [path for path in PACKAGE.rglob("*") if path.stem in names] == []


def test_the_package_itself_holds_the_version_and_nothing_else() -> None:
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    kinds = [ast.unparse(node).split(" = ")[0] for node in body if not isinstance(node, ast.Expr)]
    assert kinds == ["__version__"]


def public_definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and their public methods, with their names; nested functions are nobody's API."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node, f"{prefix}{node.name}.")


@every_module
def test_every_public_function_and_class_has_a_docstring(path: Path) -> None:
    definitions = public_definitions(ast.parse(path.read_text(encoding="utf-8")))
    assert [name for name, node in definitions if not ast.get_docstring(node)] == []  # type: ignore[arg-type]


# Imports in a process of its own


def run_python(*options: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script from the repository root."""
    return subprocess.run(
        [sys.executable, *options, "-c", script],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


BLOCK_HEAVY = f"""
import importlib, pkgutil, sys
for name in {HEAVY!r}:
    sys.modules[name] = None

def import_all(package):
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def test_blocking_blocks() -> None:
    finished = run_python(script=BLOCK_HEAVY + "import numpy")
    assert "ModuleNotFoundError" in finished.stderr


def test_core_needs_no_installed_package_at_all() -> None:
    script = BLOCK_HEAVY + "import_all('megastable.core')\nassert 'megastable.core.batch_rampup' in sys.modules"
    finished = run_python("-S", script=script)
    assert finished.returncode == 0, finished.stderr


def test_config_needs_neither_torch_nor_deepspeed_nor_numpy() -> None:
    script = BLOCK_HEAVY + "import_all('megastable.config')\nassert 'megastable.config.reading.run_file' in sys.modules"
    finished = run_python(script=script)
    assert finished.returncode == 0, finished.stderr


def test_checkpoints_need_neither_torch_nor_deepspeed_nor_numpy() -> None:
    script = BLOCK_HEAVY + "import_all('megastable.checkpoints')\nassert 'megastable.checkpoints.verify' in sys.modules"
    finished = run_python(script=script)
    assert finished.returncode == 0, finished.stderr


PLAN_AND_RUN = """
from pathlib import Path
from megastable.training.entry import run_command
from megastable.training.start import RunRequest
from megastable.planning.run_plan import RunPlan
from megastable.config import load_run_file

run_file = Path("ds_configs/quickstart.json")
print("steps", RunPlan.of(load_run_file(run_file), world_size=2).length.total_steps)
print("exit code", run_command(RunRequest(run_file, OVERRIDES, run_dir=Path(RUN_DIR))))
"""


def plan_and_run(run_dir: Path, overrides: list[str]) -> subprocess.CompletedProcess[str]:
    """Plan the quickstart on two processes, then run it in this single one, both without torch."""
    return run_python(script=f"{BLOCK_HEAVY}\nRUN_DIR, OVERRIDES = {str(run_dir)!r}, {overrides!r}\n{PLAN_AND_RUN}")


def test_a_run_is_planned_and_refused_without_torch(tmp_path: Path) -> None:
    """One process for two stages: everything up to the plan runs, the user gets one message, nothing is written."""
    finished = plan_and_run(tmp_path / "run", overrides=[])
    assert finished.returncode == 0, finished.stderr
    assert "steps " in finished.stdout
    assert "exit code 2" in finished.stdout
    assert "world size 1 is not megastable.pipeline.num_stages (2)" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "run").exists()


def test_torch_is_the_first_thing_that_a_planned_run_needs(tmp_path: Path) -> None:
    """The same with one stage gets past the plan, and only there fails for want of torch; nothing is written."""
    finished = plan_and_run(tmp_path / "run", overrides=["megastable.pipeline.num_stages=1"])
    assert finished.returncode == 1
    assert "from megastable.training.build import train" in finished.stderr
    assert not (tmp_path / "run").exists()


def test_the_command_needs_neither_torch_nor_deepspeed_nor_numpy() -> None:
    finished = run_python(script=BLOCK_HEAVY + "import_all('megastable.cli')")
    assert finished.returncode == 0, finished.stderr
