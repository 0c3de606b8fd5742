"""Checking a parsed run file: unknown keys, then values, then the rules between keys; every fault is collected.

A misspelt key is taken for its nearest legal key while the rest is checked, so that one typo does not cause further
faults (a missing key, a default that breaks a rule) and does not hide any.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megastable.config.cross_rules import LaunchedRun
from megastable.config.limits import LARGEST_BATCH
from megastable.config.reading.faults import NO_VALUE, Fault
from megastable.config.reading.messages import (
    Path,
    Place,
    dotted,
    message_for,
    nearest_key,
    paths_elsewhere,
    place_of,
)
from megastable.config.refused_keys import REFUSED_KEYS
from megastable.config.rules import RULES, broken_rules
from megastable.config.run_config import MegastableConfig, RunConfig
from megastable.config.section import Section, keys_of, section_types
from megastable.core.records import FRESH, TrainingState


def check(
    raw: Mapping[str, Any], world_size: int | None = None, state: TrainingState = FRESH
) -> tuple[RunConfig | None, list[Fault]]:
    """Return the run and no faults, or None and all faults that can be found without fixing one first.

    Args:
        world_size: processes that it is launched on, where that is known.
        state: how far the run is that it continues.
    """
    faults: list[Fault] = []
    cleaned = copy.deepcopy(dict(raw))
    written_as: dict[Path, str] = {}
    run, errors = _validate(cleaned)
    # In rounds: a section behind a misspelt key is checked, and its own typos found, only once the key is mended.
    while unknown := [error for error in errors if error["type"] == "extra_forbidden"]:
        for error in unknown:
            place = place_of(error["loc"])
            faults.append(Fault(_as_written(place.path, written_as), error["input"], _key_message(place)))
            _mend_key(cleaned, place, written_as)
        run, errors = _validate(cleaned)
    faults += [_value_fault(error, written_as) for error in errors]
    faults += broken_rules({**_valid_sections(cleaned), **_launched_run(cleaned, world_size, state)}, RULES)
    if faults:
        return None, faults
    return run, faults


def faults_of_change(run: RunConfig, changed: Mapping[str, Mapping[str, Any]]) -> list[Fault]:
    """Return the faults that a sound run has with other values of some keys.

    They are those of ``check``, where the number of processes is not known. Only the changed sections and the rules
    that read them are looked at, so that thousands of variants of a run can be judged in a second.

    Args:
        changed: section of "megastable" -> key -> new value.
    """
    sections = _sections_of(run)
    faults: list[Fault] = []
    for name, values in changed.items():
        section: Section = getattr(run.megastable, name)
        kind = type(section)
        raw = {**section.model_dump(mode="json", by_alias=True, exclude_none=True), **values}
        try:
            sections[kind] = kind.model_validate_json(json.dumps(raw))
        except ValidationError as error:
            del sections[kind]
            for detail in error.errors(include_url=False):
                detail["loc"] = ("megastable", name, *detail["loc"])
                faults.append(_value_fault(detail, {}))
    kinds = {type(getattr(run.megastable, name)) for name in changed}
    concerned = [rule for rule in RULES if not kinds.isdisjoint(rule.sections.values())]
    others = {rule.function for rule in RULES if rule not in concerned}
    return [*faults, *broken_rules(sections, concerned, others)]


def _validate(raw: Mapping[str, Any]) -> tuple[RunConfig | None, list[ErrorDetails]]:
    try:
        # Through JSON, because pydantic's strict mode takes lists for tuples from JSON only.
        return RunConfig.model_validate_json(json.dumps(raw)), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _key_message(place: Place) -> str:
    reason = REFUSED_KEYS.get(dotted(place.path))
    if reason is not None:
        return f"refused: {reason}"
    nearest = nearest_key(place)
    if nearest is not None:
        return f"unknown key; did you mean {nearest}?"
    elsewhere = paths_elsewhere(place)
    if elsewhere:
        return f"unknown key here; did you mean {' or '.join(elsewhere)}?"
    return f"unknown key; legal keys here are {', '.join(place.legal_keys)}"


def _mend_key(raw: dict[str, Any], place: Place, written_as: dict[Path, str]) -> None:
    """Rename the key to its nearest legal one, or drop it where no key is near or that one is given as well."""
    *parent, key = place.path
    section: Any = raw
    for part in parent:
        section = section[part]
    value = section.pop(key)
    if dotted(place.path) in REFUSED_KEYS:
        return
    nearest = nearest_key(place)
    if nearest is not None and nearest not in section:
        section[nearest] = value
        written_as[(*parent, nearest)] = str(key)


def _as_written(path: Path, written_as: Mapping[Path, str]) -> str:
    """Return the dotted path with every mended key as the file spells it, where the user can find it."""
    return dotted(tuple(written_as.get(path[: index + 1], part) for index, part in enumerate(path)))


def _value_fault(error: ErrorDetails, written_as: Mapping[Path, str]) -> Fault:
    place = place_of(error["loc"])
    # Of a missing key, pydantic's input is the section around it.
    value = NO_VALUE if error["type"] == "missing" else error["input"]
    return Fault(_as_written(place.path, written_as), value, message_for(error, place))


def _valid_sections(raw: Mapping[str, Any]) -> dict[type[Section], Section]:
    """Return the sections that are valid on their own, as rules need them; those left out stand with their defaults."""
    own = raw.get("megastable")
    found = dict(_valid_fields(RunConfig, raw))
    if isinstance(own, dict):
        found.update(_valid_fields(MegastableConfig, own))
    return found


def _sections_of(run: RunConfig) -> dict[type[Section], Section]:
    """Return the sections of a valid run by their types, as ``_valid_sections`` does of what is read."""
    return {
        kind: getattr(owner, name)
        for owner in (run, run.megastable)
        for name, field in type(owner).model_fields.items()
        for kind in section_types(field.annotation)
        if getattr(owner, name) is None or isinstance(getattr(owner, name), kind)
    }


def _valid_fields(owner: type[Section], raw: Mapping[str, Any]) -> Iterator[tuple[type[Section], Section]]:
    for key, field in keys_of(owner).items():
        for kind in section_types(field.annotation):
            # A misspelt section has been mended by now, so a section that is not there was really left out.
            if key not in raw and not field.is_required():
                yield kind, field.get_default(call_default_factory=True)
            elif key in raw:
                try:
                    yield kind, kind.model_validate_json(json.dumps(raw[key]))
                except ValidationError:
                    continue  # Its faults are already listed by the check of the whole file.


def _launched_run(raw: Mapping[str, Any], world_size: int | None, state: TrainingState) -> dict[type[Section], Section]:
    key = "train_micro_batch_size_per_gpu"
    size = raw.get(key, RunConfig.model_fields[key].default)
    # An illegal size is listed already, and no batch can be divided by it. type(): true is 1 to Python.
    if world_size is None or type(size) is not int or not 1 <= size <= LARGEST_BATCH:
        return {}
    launched = LaunchedRun(
        world_size=world_size,
        micro_batch_size=size,
        first_step=state.step,
        first_sample=state.consumed_samples,
    )
    return {LaunchedRun: launched}
