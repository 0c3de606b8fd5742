"""The keys in which two runs differ, each with both values."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.run_config import differences

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

json_values = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from(["a", "b"]),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("xyz"), json_values, max_size=3)


def value_at(values: Any, path: str) -> Any:
    """Find the value at a dotted path; None where the path ends earlier."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


@quick
@given(objects)
def test_a_value_does_not_differ_from_itself(values: dict[str, Any]) -> None:
    assert list(differences(values, json.loads(json.dumps(values)))) == []


@quick
@given(objects, objects)
def test_differences_name_where_and_what(old: dict[str, Any], new: dict[str, Any]) -> None:
    found = list(differences(old, new))
    for path, before, after in found:
        assert before == value_at(old, path)
        assert after == value_at(new, path)
        assert before != after
    assert [(path, after, before) for path, before, after in found] == list(differences(new, old))
    merged = json.loads(json.dumps(old))
    for path, _, after in found:
        *parents, key = path.split(".")
        section = merged
        for parent in parents:
            section = section[parent]
        section[key] = after
    assert list(differences(merged, new)) == []


def test_a_missing_key_stands_as_none() -> None:
    assert list(differences({"a": {"b": 1}}, {"a": {}, "c": 2})) == [("a.b", 1, None), ("c", None, 2)]
