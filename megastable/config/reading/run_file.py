"""Loading a run file.

The JSON Schema of a run file, for editors and other checkers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megastable.config.reading.checking import check
from megastable.config.reading.faults import NO_VALUE, ConfigError, Fault, UnreadableRunFileError
from megastable.config.reading.text import apply_overrides, parse_json
from megastable.config.run_config import RunConfig


def load_run_file(path: Path | str, overrides: Sequence[str] = (), world_size: int | None = None) -> RunConfig:
    """Read and check a run file.

    Args:
        path: a JSON file with DeepSpeed's keys and a section "megastable".
        overrides: ``path.to.key=value`` each; the path is the file's own, the value JSON or a bare string.
        world_size: processes that it is launched on; None leaves out what depends on their number.

    Raises:
        UnreadableRunFileError: the file cannot be read or is not JSON.
        ConfigError: it holds faults; all of them are listed.
    """
    source = str(path)
    raw, faults = _read(Path(path))
    if not isinstance(raw, dict):
        raise UnreadableRunFileError(source, [Fault("", NO_VALUE, "the file must hold a JSON object: {...}")])
    return _checked(raw, source, overrides, faults, world_size)


def run_from_dict(
    raw: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "run", world_size: int | None = None
) -> RunConfig:
    """Check a run that is already parsed, such as a dumped ``RunConfig``; ``raw`` is left as it is.

    Raises:
        ConfigError: as ``load_run_file``; ``source`` stands in for the file's name.
    """
    # A copy through JSON: overrides write into it, and tuples of a Python caller become lists.
    return _checked(json.loads(json.dumps(raw)), source, overrides, [], world_size)


def _checked(
    raw: dict[str, Any], source: str, overrides: Sequence[str], faults: Sequence[Fault], world_size: int | None
) -> RunConfig:
    all_faults = [*faults, *apply_overrides(raw, overrides)]
    run, found = check(raw, world_size)
    all_faults += found
    if run is None or all_faults:
        raise ConfigError(source, all_faults)
    return run


def _read(path: Path) -> tuple[Any, list[Fault]]:
    try:
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
    except (ValueError, RecursionError) as error:
        message = f"is not valid JSON: {error}"
    raise UnreadableRunFileError(str(path), [Fault("", NO_VALUE, message)])


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a run file. It holds what one key must obey; the rules between keys and
    the reasons for refused keys only show when the file is loaded.
    """
    schema = RunConfig.model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "megastable run file",
    }
