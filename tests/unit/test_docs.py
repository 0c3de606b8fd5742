"""The pages that people read first: links that resolve, files and names that exist, keys and commands of today."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from megastable.cli.main import app

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
ROOTS = (REPOSITORY, REPOSITORY / "megastable")
"""Where a path in the text may start: pages say ``engine/weight_update.py`` for ``megastable/engine/…``."""
TOP_FOLDERS = {path.name for root in ROOTS for path in root.iterdir() if path.is_dir()} - {"runs"}
"""What a run has written here is no part of the repository."""
OPTIONS_OF_OTHERS = {
    "--device", "--hostfile", "--include_path", "--kill-on-bad-exit", "--local-dir", "--log_level", "--master_addr",
    "--max-restarts", "--model", "--model_args", "--nnodes", "--no_ssh", "--node_rank", "--nproc_per_node",
    "--num_gpus", "--quiet", "--rampup-batch-size", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id",
    "--signal", "--signals-to-handle", "--standalone", "--tasks",
}  # fmt: skip
"""Of srun and sbatch, torchrun, ``deepspeed``, Megatron-LM, ``hf`` and ``lm_eval``."""
MOST_README_LINES = 120
MOST_README_COLUMNS = 125
"""Of prose and code; a row of a table cannot be broken."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def code_blocks(page: Path) -> list[str]:
    """Return the text of every fenced block."""
    return re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the text without its fenced blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Return the targets of all links and pictures that lead to a file or a heading of this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if "://" not in target]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def names_in_code(page: Path) -> list[str]:
    """Return what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def commands(page: Path) -> Iterator[str]:
    """Yield every shell command of the page's blocks and code spans, continuation lines joined."""
    for text in [*code_blocks(page), *names_in_code(page)]:
        for line in text.replace("\\\n", " ").splitlines():
            yield from (command.strip() for command in line.split("&&"))


@every_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@every_page
def test_every_file_that_is_named_exists_and_defines_what_is_said_of_it(page: Path) -> None:
    wrong = []
    for name in names_in_code(page):
        found = re.fullmatch(r"([\w.-]+/[\w./-]*\w)(?:: (\w+))?", name)
        if found is None or found[1].split("/")[0] not in TOP_FOLDERS:
            continue
        files = [root / found[1] for root in ROOTS if (root / found[1]).exists()]
        if not files or not (found[2] is None or defines(files[0], found[2])):
            wrong.append(name)
    assert not wrong


def defines(module: Path, name: str) -> bool:
    """Tell whether the module has a variable, function or class of the name."""
    return re.search(rf"^(?:def |class )?{name}\b", module.read_text(encoding="utf-8"), re.MULTILINE) is not None


@cache
def schema() -> dict[str, Any]:
    """Return the shipped JSON Schema, which another test holds equal to the code's."""
    text = (REPOSITORY / "ds_configs" / "run_file.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def has_key(path: str) -> bool:
    """Tell whether a run file can hold the key at this path; of a section with several kinds, any kind's."""
    places = [schema()]
    for name in path.split("."):
        places = [place["properties"][name] for place in _resolved(places) if name in place.get("properties", {})]
    return bool(places)


def _resolved(places: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for place in places:
        if "$ref" in place:
            yield from _resolved([schema()["$defs"][place["$ref"].rsplit("/", 1)[-1]]])
        for alternatives in ("anyOf", "oneOf", "allOf"):
            yield from _resolved(place.get(alternatives, []))
        yield place


@every_page
def test_every_key_of_the_run_file_that_is_named_exists(page: Path) -> None:
    sections = schema()["$defs"]["MegastableConfig"]["properties"]
    unknown = []
    for name in names_in_code(page):
        key = re.match(r"(megastable\.)?([a-z_]+\.[a-z_.0-9]*[a-z0-9])(?=$|[:=\s])", name)
        # `monitors.interval` is short for `megastable.monitors.interval`; a method or a file is no key
        if key is None or not (key[1] or key[2].split(".")[0] in sections) or "(" in name:
            continue
        if not has_key(f"megastable.{key[2]}"):
            unknown.append(name)
    assert not unknown


@every_page
def test_every_key_that_is_set_on_a_command_line_exists(page: Path) -> None:
    keys = re.findall(r"--set ([a-z][\w.]*)=", page.read_text(encoding="utf-8"))
    assert not [key for key in keys if not has_key(key)]


@cache
def options_of_commands() -> dict[str, set[str]]:
    """Return the options of every ``megastable`` command, by its one or two words."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    found = {}
    for name, command in group.commands.items():
        inner = {f"{name} {second}": each for second, each in getattr(command, "commands", {}).items()}
        for words, each in (inner or {name: command}).items():
            found[words] = {
                "--help",
                *(option for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)),
            }
    return found


@cache
def options_of_scripts() -> frozenset[str]:
    """Return the options that the launch script and the benchmarks define, as their source spells them."""
    scripts = [*(REPOSITORY / "launch").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    return frozenset(
        option for script in scripts for option in re.findall(r'"(--[\w-]+)"', script.read_text(encoding="utf-8"))
    )


@every_page
def test_every_megastable_command_and_its_options_exist(page: Path) -> None:
    wrong = []
    for command in commands(page):
        words = command.split()
        if len(words) < 2 or words[0] != "megastable" or words[1].startswith("-"):
            continue
        options = {word for word in words if word.startswith("--")}
        name = words[1] if words[1] in options_of_commands() else " ".join(words[1:3])
        if name not in options_of_commands() or options - options_of_commands()[name]:
            wrong.append(command)
    assert not wrong


@every_page
def test_every_option_that_is_named_exists(page: Path) -> None:
    known = options_of_scripts().union(OPTIONS_OF_OTHERS, *options_of_commands().values())
    text = "\n".join(commands(page))
    assert not [option for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text) if option not in known]


def test_the_two_commands_of_the_readme_are_what_ci_runs() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", " ").replace("--quiet ", "")
    ran = [" ".join(line.split()) for line in script.splitlines()]
    first_block = code_blocks(README)[0].splitlines()
    assert len(first_block) == 2
    for line in first_block:
        for command in line.split(" && "):
            assert any(f"{line} ".startswith(f"{command} ") for line in ran), command


def test_the_readme_fits_on_two_screens() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_README_LINES
    assert not [line for line in lines if len(line) > MOST_README_COLUMNS and not line.startswith("|")]


def test_the_index_lists_every_page_once() -> None:
    index = REPOSITORY / "docs" / "README.md"
    listed = [target for target in links(index) if "/" not in target]
    assert sorted(listed) == sorted(page.name for page in index.parent.glob("*.md") if page != index)
