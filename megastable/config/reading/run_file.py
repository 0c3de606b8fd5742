"""Loading a run file: its text, the overrides of the command line, and the JSON Schema that editors check it by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megastable.config.limits import DEEPEST_NESTING
from megastable.config.reading.checking import check
from megastable.config.reading.faults import LONGEST_SHOWN_VALUE, NO_VALUE, ConfigError, Fault, UnreadableRunFileError
from megastable.config.run_config import RunConfig
from megastable.core.records import FRESH, TrainingState


def load_run_file(
    path: Path | str, overrides: Sequence[str] = (), world_size: int | None = None, state: TrainingState = FRESH
) -> RunConfig:
    """Read and check a run file.

    Args:
        path: a JSON file with DeepSpeed's keys and a section "megastable".
        overrides: ``path.to.key=value`` each; the path is the file's own, the value JSON or a bare string.
        world_size: processes that it is launched on; None leaves out what depends on their number.
        state: how far the run is that it continues: only the batches that are left have to divide.

    Raises:
        UnreadableRunFileError: the file cannot be read or is not JSON.
        ConfigError: it holds faults; all of them are listed.
    """
    source = str(path)
    raw, faults = _read(Path(path))
    if not isinstance(raw, dict):
        raise UnreadableRunFileError(source, [Fault("", NO_VALUE, "the file must hold a JSON object: {...}")])
    return _checked(raw, source, overrides, faults, world_size, state)


def run_from_dict(
    raw: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "run",
    world_size: int | None = None,
    state: TrainingState = FRESH,
) -> RunConfig:
    """Check a run that is already parsed, such as a dumped ``RunConfig``; ``raw`` is left as it is.

    Raises:
        ConfigError: as ``load_run_file``; ``source`` stands in for the file's name.
    """
    # A copy through JSON: overrides write into it, and tuples of a Python caller become lists.
    return _checked(json.loads(json.dumps(raw)), source, overrides, [], world_size, state)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a run file.

    It holds what one key must obey; the rules between keys and the reasons for refused keys only show when the file is
    loaded.
    """
    schema = RunConfig.model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "megastable run file",
    }


def _checked(
    raw: dict[str, Any],
    source: str,
    overrides: Sequence[str],
    faults: Sequence[Fault],
    world_size: int | None,
    state: TrainingState,
) -> RunConfig:
    all_faults = [*faults, *apply_overrides(raw, overrides)]
    run, found = check(raw, world_size, state)
    all_faults += found
    if run is None or all_faults:
        raise ConfigError(source, all_faults)
    return run


def _read(path: Path) -> tuple[Any, list[Fault]]:
    try:
        # "-sig": editors on Windows begin a file with a byte-order mark, which JSON does not know.
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start})"
    except json.JSONDecodeError as error:
        message = (
            f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg} "
            "(comments and trailing commas are not JSON)"
        )
    except NestedTooDeepError as error:
        message = str(error)
    except ValueError as error:
        # Numbers of more digits than Python reads, and what no path can hold.
        message = f"cannot be read: {error}"
    raise UnreadableRunFileError(str(path), [Fault("", NO_VALUE, message)])


class NestedTooDeepError(Exception):
    """Refuses JSON with more brackets within brackets than any run file has."""

    def __str__(self) -> str:
        return f"must not be nested deeper than {DEEPEST_NESTING} brackets"


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as the pairs that the text has, repeated keys included."""


def parse_json(text: str, prefix: str = "") -> tuple[Any, list[Fault]]:
    """Parse ``text``; the faults name every repeated key, with ``prefix`` as the path of the whole value.

    Raises:
        json.JSONDecodeError: not JSON.
        ValueError: a number too long to read.
        NestedTooDeepError: brackets within brackets, deeper than Python's parser or ``DEEPEST_NESTING`` goes.
    """
    faults: list[Fault] = []
    # Left to itself, json.loads silently keeps the last of two equal keys.
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except RecursionError as error:
        # The parser gives up where the interpreter's stack ends, which depends on who calls.
        raise NestedTooDeepError from error
    return _without_repeated_keys(pairs, prefix, faults, DEEPEST_NESTING), faults


def _without_repeated_keys(value: Any, path: str, faults: list[Fault], levels_left: int) -> Any:
    """Turn pairs into dictionaries at every depth, and add a fault for every repeated key to ``faults``.

    Raises:
        NestedTooDeepError: lists and objects in more than ``levels_left`` levels.
    """
    # All that reads the values later (pydantic, json.dumps, copy.deepcopy) may rely on this bound.
    if isinstance(value, list) and levels_left == 0:
        raise NestedTooDeepError
    if isinstance(value, _Pairs):
        result: dict[str, Any] = {}
        for name, item in value:
            key = _as_text(name, path, faults)
            item_path = f"{path}.{key}".removeprefix(".")
            plain_item = _without_repeated_keys(item, item_path, faults, levels_left - 1)
            if key in result:
                faults.append(Fault(item_path, plain_item, "given twice; remove one of them"))
            result[key] = plain_item
        return result
    if isinstance(value, str):
        return _as_text(value, path, faults)
    if isinstance(value, list):
        return [
            _without_repeated_keys(item, f"{path}[{index}]", faults, levels_left - 1)
            for index, item in enumerate(value)
        ]
    return value


def _as_text(text: str, path: str, faults: list[Fault]) -> str:
    """Return ``text``; where it is none, add a fault, and return it with marks in place of what no encoding holds."""
    # JSON can write half of a surrogate pair as an escape, which neither a file name nor pydantic takes.
    whole = text.encode("utf-8", "replace").decode("utf-8")
    if whole != text:
        faults.append(Fault(path, text, "is no text: it holds half of a surrogate pair"))
    return whole


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Fault]:
    """Write each override into ``raw``, in order, making sections where they are missing; return the faults.

    A value is read as JSON, or as a bare string where it is not JSON: ``lr=1e-4`` is a number, ``type=cosine`` text.
    """
    faults: list[Fault] = []
    for override in overrides:
        # What a shell hands over that is no UTF-8 stands for nothing that a run file can hold.
        path, equals, text = _as_text(override, "", faults).partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            faults.append(Fault("", NO_VALUE, f"override {_cut(override)}: must be path.to.key=value"))
            continue
        # Each name of the path makes a section within a section, as deep as brackets would.
        if len(keys) > DEEPEST_NESTING:
            faults.append(Fault("", NO_VALUE, f"override {_cut(override)}: {NestedTooDeepError()}"))
            continue
        value, value_faults = _read_value(text, path)
        faults += value_faults + _write(raw, keys, value)
    return faults


def _read_value(text: str, path: str) -> tuple[Any, list[Fault]]:
    try:
        return parse_json(text, path)
    except NestedTooDeepError as error:
        return None, [Fault(path, NO_VALUE, str(error))]
    except ValueError:
        # So that nobody has to quote quotes in a shell: type=cosine instead of 'type="cosine"'.
        return text, []


def _cut(override: str) -> str:
    """Quote an override, cut where it is long."""
    if len(override) > LONGEST_SHOWN_VALUE:
        override = override[: LONGEST_SHOWN_VALUE - 3] + "..."
    return repr(override)


def _write(raw: dict[str, Any], keys: list[str], value: Any) -> list[Fault]:
    section = raw
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            message = f"is not a section, so override {'.'.join(keys)} cannot be written into it"
            return [Fault(".".join(keys[:depth]), inner, message)]
        section = inner
    section[keys[-1]] = value
    return []
