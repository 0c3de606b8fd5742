"""Whatever is wrong with a checkpoint is found and named in one message: no traceback, and nothing is accepted."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.checkpoints.folder import complete_manifest, newest_complete, step_folders
from megastable.checkpoints.manifest import MANIFEST_NAME, read_manifest
from megastable.checkpoints.verify import verify
from megastable.core.errors import UserError
from tests.unit.checkpoints.checkpoint_examples import FIRST, make_checkpoint
from tests.unit.checkpoints.damages import (
    OF_THE_CONTENT,
    OF_THE_FILES,
    OF_THE_MANIFEST,
    Damage,
    sealed,
    values_in,
)

NOBODY = 65534
LONGEST_MESSAGE = 600


def each_of(*tables: dict[str, tuple[Damage, str]]) -> pytest.MarkDecorator:
    """Try every damage of the tables."""
    cases = [pytest.param(*case, id=name) for table in tables for name, case in table.items()]
    return pytest.mark.parametrize(("damage", "named"), cases)


def message_of(error: pytest.ExceptionInfo[UserError]) -> str:
    """The text of an error, which is one line that a terminal takes."""
    text = str(error.value)
    assert text.isprintable()
    assert len(text) < LONGEST_MESSAGE
    return text


@each_of(OF_THE_MANIFEST, OF_THE_FILES)
def test_a_damage_is_named_and_passed_over(tmp_path: Path, damage: Damage, named: str) -> None:
    intact, damaged = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    damage(damaged)
    with pytest.raises(UserError) as caught:
        complete_manifest(damaged)
    assert str(damaged) in message_of(caught)
    assert named in message_of(caught)
    (fault,) = verify(damaged)
    assert fault == message_of(caught)
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == intact
    assert warnings == [f"{fault}; falling back to an older checkpoint"]


@each_of(OF_THE_CONTENT)
def test_what_sizes_do_not_show_is_found_by_checksums(tmp_path: Path, damage: Damage, named: str) -> None:
    folder = make_checkpoint(tmp_path, 10)
    damage(folder)
    complete_manifest(folder)
    (fault,) = verify(folder)
    assert f"{folder} is damaged: {named} has the checksum" in fault


@contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's right to read everything, where the tests run as root."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into; pytest's own lies below one that is closed."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("closed", ["", MANIFEST_NAME, FIRST])
def test_what_may_not_be_read_is_named(open_folder: Path, closed: str) -> None:
    folder = make_checkpoint(open_folder, 10)
    (folder / closed).chmod(0)
    with as_nobody():
        (fault,) = verify(folder)
    (folder / closed).chmod(0o755)
    assert str(folder) in fault
    assert "Permission denied" in fault
    assert (closed or MANIFEST_NAME) in fault


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_a_folder_of_checkpoints_that_may_not_be_read_is_named(open_folder: Path, mode: int) -> None:
    make_checkpoint(open_folder / "checkpoints", 10)
    (open_folder / "checkpoints").chmod(mode)
    with as_nobody(), pytest.raises(UserError) as caught:
        step_folders(open_folder / "checkpoints")
    (open_folder / "checkpoints").chmod(0o755)
    assert message_of(caught) == f"{open_folder / 'checkpoints'} cannot be read: Permission denied"


# Any value anywhere

odd_values: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, -1, 0, 1, 7, 8.5, 2**63, 10**18, float("nan"), float("inf"), "", "x", "\0", "../x", [], {}]
) | st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*path, key)
        yield from places_in(inner, (*path, key))


@st.composite
def mutations(draw: st.DrawFn, values: dict[str, Any]) -> dict[str, Any]:
    """Put an odd value at a place of a manifest, or take the value away, or add one beside it."""
    values = json.loads(json.dumps(values))
    *path, last = draw(st.sampled_from([place for place in places_in(values) if place != ("checksum",)]))
    inner: Any = values
    for part in path:
        inner = inner[part]
    way = draw(st.sampled_from(["replace", "remove", "add"]))
    if way == "remove":
        del inner[last]
    elif way == "add" and isinstance(inner, dict):
        inner[draw(st.text(max_size=5))] = draw(odd_values)
    else:
        inner[last] = draw(odd_values)
    return values


def read_or_refuse(text: str) -> Any:
    """The manifest with this text; None where it is refused, with one message."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "step_00000010"
        folder.mkdir()
        (folder / MANIFEST_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            return read_manifest(folder)
        except UserError as error:
            assert str(error).isprintable()
            assert len(str(error)) < LONGEST_MESSAGE
            assert str(error).startswith(f"{folder} is no whole checkpoint: {MANIFEST_NAME} ")
            return None


def test_any_change_is_refused_or_is_a_manifest_that_obeys_every_rule(tmp_path: Path) -> None:
    whole = values_in(make_checkpoint(tmp_path, 10))

    @settings(max_examples=150, deadline=None)
    @given(values=mutations(whole))
    def check(values: dict[str, Any]) -> None:
        if json.dumps(values) != json.dumps(whole):
            # Under the old checksum no change is accepted.
            assert read_or_refuse(json.dumps(values)) is None
        manifest = read_or_refuse(sealed(values))
        if manifest is not None:
            # What is accepted is what was written: no value was read as another one.
            for key in ("loss", "eval_loss"):  # a number, with or without a point
                values[key] = values[key] if values[key] is None else float(values[key])
            del values["checksum"]
            # What checkpoints may lack that were written before samples could be left out.
            values["state"] = {"left_out_samples": 0, "rollbacks": [], **values["state"]}
            assert json.dumps(manifest.model_dump(), sort_keys=True) == json.dumps(values, sort_keys=True)
            assert manifest.state.step == 10

    check()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_manifest(Path(name))
        message_of(caught)
