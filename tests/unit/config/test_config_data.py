"""Text sources and tokenizers: each is one section, chosen by its type."""

import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from megastable.config import json_schema, run_from_dict
from megastable.config.data import SourceSection, TokenizerSection
from megastable.config.section import Section, keys_of, kinds_of, tag_of
from tests.unit.config.config_examples import MINIMAL, RUN_FILES, faults_of, with_value

KINDS: list[tuple[str, type[Section]]] = [
    *(("megastable.data.source", kind) for kind in kinds_of(SourceSection)),
    *(("megastable.data.tokenizer", kind) for kind in kinds_of(TokenizerSection)),
]
each_kind = pytest.mark.parametrize(("path", "kind"), KINDS, ids=[kind.__name__ for _, kind in KINDS])


def least(kind: type[Section]) -> dict[str, Any]:
    """A section of that kind with nothing but its type and the keys that it requires, which are text but for one."""
    required = [key for key, field in keys_of(kind).items() if field.is_required()]
    values: dict[str, Any] = {"sources": [{"name": "x", "weight": 1, "source": {"type": "stdlib"}}]}
    return {key: values.get(key, "x") for key in required} | {"type": tag_of(kind)}


@each_kind
def test_the_type_chooses_the_section(path: str, kind: type[Section]) -> None:
    raw = with_value(with_value(MINIMAL, "megastable.data.tokenizer", {"type": "bytes"}), path, least(kind))
    run = run_from_dict(raw)
    assert type(getattr(run.megastable.data, path.rpartition(".")[2])) is kind
    assert run_from_dict(run.model_dump(mode="json", by_alias=True)) == run
    jsonschema.Draft202012Validator(json_schema()).validate(raw)


@each_kind
def test_a_section_refuses_what_another_type_would_read(path: str, kind: type[Section]) -> None:
    raw = with_value(MINIMAL, "megastable.data.tokenizer", {"type": "bytes"})
    raw = with_value(raw, path, {**least(kind), "zzz": 1})
    (fault,) = faults_of(raw)
    assert (fault.path, fault.message) == (
        f"{path}.zzz",
        f"unknown key; legal keys here are {', '.join(keys_of(kind))}",
    )
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(raw)


def blend(*parts: dict[str, Any]) -> dict[str, Any]:
    raw = with_value(MINIMAL, "megastable.data.tokenizer", {"type": "bytes"})
    return with_value(raw, "megastable.data.source", {"type": "blend", "sources": list(parts)})


WEB = {"name": "web", "weight": 7, "source": {"type": "jsonl", "path": "web"}}


@pytest.mark.parametrize(
    ("part", "path", "message"),
    [
        (WEB | {"wieght": 1}, "wieght", "did you mean weight?"),
        (WEB | {"weight": 0}, "weight", "must be greater than 0"),
        (WEB | {"weight": True}, "weight", "must be a number"),
        (WEB | {"name": "a b"}, "name", "must match the pattern"),
        (WEB | {"source": {"type": "blend", "sources": [WEB]}}, "source", '"type" must be "stdlib" or "text"'),
        (WEB | {"source": {"type": "jsonl"}}, "source.path", "is required: A file, a folder"),
        (
            WEB | {"source": {"type": "jsonl", "path": "x", "text_kye": "y"}},
            "source.text_kye",
            "did you mean text_key?",
        ),
        ("web", "", "must be a section"),
    ],
)
def test_a_fault_of_a_part_of_a_blend_is_named_with_its_place(part: Any, path: str, message: str) -> None:
    (fault,) = faults_of(blend(WEB | {"name": "other"}, part))
    assert fault.path == f"megastable.data.source.sources[1].{path}".rstrip(".")
    assert message in fault.message


def test_types_are_not_given_twice() -> None:
    for base in (SourceSection, TokenizerSection):
        tags = [tag_of(kind) for kind in kinds_of(base)]
        assert len(tags) == len(set(tags)) > 1


NEW_SECTION = """
import json, sys
from typing import Literal
from pydantic import Field
from megastable.config import MegastableConfig, RunConfig, json_schema, run_from_dict
from megastable.config.data import DataConfig, {base}

class New({base}):
    '''What somebody has added.'''
    type: Literal["new"] = Field(description="New.")
    depth: int = Field(ge=1, description="How deep.")

# Only because the section stands outside data.py, behind the schema that is already built.
for section in (DataConfig, MegastableConfig, RunConfig):
    section.model_rebuild(force=True)
run = run_from_dict(json.load(sys.stdin), ['megastable.data.{key}={{"type": "new", "depth": 3}}'])
assert run.megastable.data.{key}.depth == 3
assert "New" in json_schema()["$defs"]
print(run.megastable.data.model_dump_json())
"""


@pytest.mark.parametrize(("base", "key"), [("SourceSection", "source"), ("TokenizerSection", "tokenizer")])
def test_a_new_section_is_all_that_the_schema_needs(base: str, key: str) -> None:
    # In a process of its own: a subclass stays known to its base for as long as it lives.
    finished = subprocess.run(
        [sys.executable, "-c", NEW_SECTION.format(base=base, key=key)],
        input=json.dumps(MINIMAL), capture_output=True, text=True, timeout=60, cwd=RUN_FILES.parent,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)[key] == {"type": "new", "depth": 3}
