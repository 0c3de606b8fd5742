"""The JSON Schema of a run file, for editors and other checkers."""

from __future__ import annotations

from typing import Any

from megastable.config.run_config import RunConfig


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
