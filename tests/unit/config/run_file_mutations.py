"""Run files as clumsy and hostile people write them: the shipped files, changed at random."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from megastable.config import limits
from tests.unit.config.config_examples import FULL, MINIMAL, SHIPPED

BASES = [MINIMAL, FULL, *(json.loads(path.read_text(encoding="utf-8")) for path in SHIPPED)]
Place = tuple[str | int, ...]

LIMITS = [value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)]
numbers = (
    st.sampled_from([0, 1, 2, 3, 7, 128, 1024, 10**9, 2**31, 2**63, 2**64, 10**19, 10**400])
    | st.sampled_from([*LIMITS, *(limit + 1 for limit in LIMITS)])
    | st.integers(0, 2000)
    | st.integers()
)
fractions = st.floats() | st.sampled_from([5e-324, 1e-300, 1e308, 0.5, -0.0])
ODD_TEXTS = (
    *("\x1b[2J\x1b[31mred", "\u202egpj.exe", "a\x00b", "\ud800", "[red]markup[/red]", "line\nbreak"),
    *("~nobody/data", "~", "a" * 5000, "x/" * 3000, "1e5", "NaN"),
    *("type:(a+)+$", "type:a{99999999999}", "type:.*.*.*", "type:["),
    *("balanced", "parameters", "auto", "stdlib", "text", "bf16", "step", "constant", "A100"),
)
texts = st.text(max_size=12) | st.sampled_from(ODD_TEXTS)
values = st.recursive(
    st.none() | st.booleans() | numbers | fractions | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, prefix: Place = ()) -> Iterator[Place]:
    """Yield the place of every value of a run file, sections and entries of lists included."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*prefix, key)
        yield from places(inner, (*prefix, key))


def nested(depth: int, kind: str) -> Any:
    """Return lists or objects within each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def gentle(value: Any) -> st.SearchStrategy[Any]:
    """Draw a value that might be as legal as the one that is given."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int | float):
        return st.sampled_from([value, value * 2, value * 1000, value // 2 or 1, value + 1, 0])
    return st.just(value)


@st.composite
def mutated_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a run file with one to four changes: a value, a key, a missing key, or nesting."""
    raw = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(list(places(raw)) or [("a",)]))
        section: Any = raw
        for part in path:
            section = section[part]
        change = draw(st.sampled_from(["gentle"] * 8 + ["value", "number", "number", "delete", "rename", "nest"]))
        if change == "delete":
            del section[key]
        elif change == "rename" and isinstance(section, dict):
            section[draw(texts)] = section.pop(key)
        elif change == "nest":
            section[key] = nested(draw(st.sampled_from([1, 5, 40, 300])), draw(st.sampled_from(["list", "object"])))
        elif change == "gentle":
            section[key] = draw(gentle(section[key]))
        else:
            section[key] = draw(numbers if change == "number" else values)
    return raw


def paths_of(raw: Any) -> list[str]:
    """List the dotted paths of a file's keys, as ``--set`` takes them."""
    return [".".join(map(str, place)) for place in places(raw) if not any(isinstance(part, int) for part in place)]


overrides: st.SearchStrategy[list[str]] = (
    st.just([])
    | st.just([])
    | st.lists(
        st.builds(
            "{}={}".format,
            st.sampled_from(paths_of(FULL) + paths_of(BASES[-1])) | texts,
            values.map(json.dumps)
            | texts
            | st.sampled_from(["[" * 2000, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000, ""]),
        )
        | texts,
        max_size=3,
    )
)
