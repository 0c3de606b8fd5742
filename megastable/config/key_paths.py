"""Where the keys of a run file stand: pydantic's error locations as paths of the file, and the nearest legal key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic.fields import FieldInfo

from megastable.config.run_config import RunConfig
from megastable.config.section import Section

Path = tuple[str | int, ...]

LEAST_LIKENESS: Final = 0.6
"""difflib ratio from which a key counts as a misspelling of another."""


@dataclass(frozen=True)
class Place:
    """A key of the file: its path, and the section class that it belongs to (None inside lists)."""

    path: Path
    owner: type[Section] | None


def place_of(location: Sequence[str | int]) -> Place:
    """Turn a pydantic error location into a path of the file.

    pydantic puts the tag of a section with a "type" into the location, where the file has no such key.
    """
    path: list[str | int] = []
    owner: type[Section] | None = None
    candidates: tuple[type[Section], ...] = (RunConfig,)
    for part in location:
        if len(candidates) > 1:
            candidates = tuple(kind for kind in candidates if tag_of(kind) == part)
            continue
        path.append(part)
        owner = candidates[0] if candidates else None
        field = keys_of(owner).get(str(part)) if owner else None
        candidates = section_types(field.annotation) if field else ()
    return Place(tuple(path), owner)


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The section's fields by the names that they have in the file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_types(annotation: Any) -> tuple[type[Section], ...]:
    """The section classes that a field may hold; empty for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(kind for part in get_args(annotation) for kind in section_types(part))


def tag_of(section: type[Section]) -> str:
    """The "type" that chooses this section among several."""
    (tag,) = get_args(section.model_fields["type"].annotation)
    return str(tag)


def dotted(path: Path) -> str:
    """The path as it is printed and as an override writes it; list positions in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def nearest_key(place: Place) -> str | None:
    """The legal key of the same section that the place's unknown key is most like."""
    legal = list(keys_of(place.owner)) if place.owner else []
    matches = difflib.get_close_matches(str(place.path[-1]), legal, n=1, cutoff=LEAST_LIKENESS)
    return matches[0] if matches else None


def paths_elsewhere(place: Place) -> list[str]:
    """Dotted paths of the keys of other sections with exactly the place's name."""
    paths = (dotted(path) for path in _all_paths(RunConfig, ()) if path[-1] == place.path[-1])
    return list(dict.fromkeys(paths))


def _all_paths(section: type[Section], prefix: Path) -> Iterator[Path]:
    for key, field in keys_of(section).items():
        yield (*prefix, key)
        for inner in section_types(field.annotation):
            yield from _all_paths(inner, (*prefix, key))
