"""The registry of rules: every rule can be reached, and none runs before the rules that it needs hold."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megastable.config
from megastable.config import ConfigError, Fault, RunConfig, run_from_dict
from megastable.config.cross_rules import LaunchedRun
from megastable.config.reading import checking
from megastable.config.rules import RULES, Rule, RuleFunction, broken_rules
from megastable.config.run_config import MegastableConfig
from megastable.config.section import Section, keys_of, section_types
from tests.unit.config.config_examples import MINIMAL
from tests.unit.config.test_config_rules import CASES, Case


@dataclass
class Watched:
    """Keeps a record of which rules of a registry ran, in order, and how many faults each of them found."""

    rules: Sequence[Rule]
    found: dict[str, int] = field(default_factory=dict)

    def watched(self) -> tuple[Rule, ...]:
        """Return the same rules, each of which records itself when it runs."""
        wrapped = {rule.function: self._recording(rule.function) for rule in self.rules}
        return tuple(Rule(wrapped[rule.function], tuple(wrapped[need] for need in rule.needs)) for rule in self.rules)

    def _recording(self, function: RuleFunction) -> RuleFunction:
        @functools.wraps(function)
        def record(**sections: Section) -> Iterator[Fault]:
            faults = list(function(**sections))
            assert function.__name__ not in self.found, f"{function.__name__} ran twice"
            self.found[function.__name__] = len(faults)
            return iter(faults)

        return record


def run_watched(overrides: Sequence[str], world_size: int | None) -> tuple[Watched, tuple[Fault, ...]]:
    """Check the minimal run with ``overrides``, and record which rules ran."""
    watched = Watched(RULES)
    with pytest.MonkeyPatch.context() as patch:
        rules = watched.watched()
        patch.setattr(checking, "broken_rules", lambda sections: broken_rules(sections, rules))
        try:
            run_from_dict(MINIMAL, overrides, world_size=world_size)
        except ConfigError as error:
            return watched, error.faults
    return watched, ()


def check_needs(rules: Sequence[Rule], found: dict[str, int], has_sections: dict[str, bool]) -> None:
    """Assert that exactly those rules ran whose sections were valid and whose needs had run before without a fault."""
    order = list(found)
    for rule in rules:
        name = rule.function.__name__
        needs = [need.__name__ for need in rule.needs]
        may_run = has_sections[name] and all(found.get(need) == 0 for need in needs)
        assert (name in found) == may_run, name
        if name in found:
            assert all(order.index(need) < order.index(name) for need in needs), name


def test_a_rule_stands_behind_the_rules_that_it_needs() -> None:
    before: set[RuleFunction] = set()
    for rule in RULES:
        assert before.issuperset(rule.needs), rule.function.__name__
        assert rule.function not in before, rule.function.__name__
        before.add(rule.function)


def test_no_rule_is_unreachable() -> None:
    watched, faults = run_watched((), world_size=1)
    assert faults == ()
    assert list(watched.found) == [rule.function.__name__ for rule in RULES]


def test_without_a_launch_only_the_rules_of_a_launch_do_not_run() -> None:
    watched, _ = run_watched((), world_size=None)
    launch = {rule.function.__name__ for rule in RULES if LaunchedRun in rule.sections.values()}
    assert launch
    assert list(watched.found) == [rule.function.__name__ for rule in RULES if rule.function.__name__ not in launch]


def test_a_rule_reads_sections_that_a_file_has() -> None:
    fields = [*keys_of(RunConfig).values(), *keys_of(MegastableConfig).values()]
    readable = {LaunchedRun, *(kind for each in fields for kind in section_types(each.annotation))}
    for rule in RULES:
        assert rule.sections, rule.function.__name__
        assert readable.issuperset(rule.sections.values()), rule.function.__name__


def test_every_function_that_is_a_rule_is_registered() -> None:
    modules = pkgutil.walk_packages(megastable.config.__path__, "megastable.config.")
    definitions = [value for module in modules for value in vars(importlib.import_module(module.name)).values()]
    found = {
        value
        for value in definitions
        if inspect.isfunction(value)
        and value.__annotations__.get("return") == "Iterator[Fault]"
        and not value.__name__.startswith("_")  # helpers of rules
    }
    assert found == {broken_rules, *(rule.function for rule in RULES)}


@given(st.lists(st.sampled_from(CASES), min_size=1, max_size=5), st.none() | st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_in_a_broken_run_exactly_the_rules_run_that_can_judge(cases: list[Case], world_size: int | None) -> None:
    overrides = [override for case in cases for override in case.broken]
    watched, faults = run_watched(overrides, world_size)
    # All cases have valid sections, so that only the launch can be missing.
    has_sections = {
        rule.function.__name__: world_size is not None or LaunchedRun not in rule.sections.values() for rule in RULES
    }
    check_needs(RULES, watched.found, has_sections)
    assert sum(watched.found.values()) == len(faults)


class Left(Section):
    """Stands for a section of a file."""


class Right(Section):
    """Stands for another section of the file."""


READS: list[dict[str, type[Section]]] = [{"left": Left}, {"right": Right}, {"left": Left, "right": Right}]


@st.composite
def registries(draw: st.DrawFn) -> list[Rule]:
    """Draw rules that need any rules before them, read any sections, and find no, one or two faults."""
    rules: list[Rule] = []
    for index in range(draw(st.integers(1, 8))):
        kinds = draw(st.sampled_from(READS))
        function = toy_rule(f"rule_{index}", kinds, num_faults=draw(st.sampled_from([0, 0, 1, 2])))
        needs = draw(st.sets(st.sampled_from(range(index)))) if index else set()
        rules.append(Rule(function, tuple(rules[need].function for need in sorted(needs))))
    return rules


def toy_rule(name: str, kinds: dict[str, type[Section]], num_faults: int) -> RuleFunction:
    """Make a rule of that name that reads those sections and always finds so many faults."""

    def rule(**sections: Section) -> Iterator[Fault]:
        assert {key: type(section) for key, section in sections.items()} == kinds
        return iter([Fault(name, number, "broken") for number in range(num_faults)])

    rule.__name__ = name
    rule.__annotations__ = {**kinds, "return": Iterator[Fault]}
    return rule


@given(registries(), st.sets(st.sampled_from([Left, Right])))
@settings(deadline=None)
def test_in_any_registry_exactly_the_rules_run_that_can_judge(rules: list[Rule], valid: set[type[Section]]) -> None:
    watched = Watched(rules)
    faults = list(broken_rules({kind: kind() for kind in valid}, watched.watched()))
    check_needs(rules, watched.found, {rule.function.__name__: valid >= set(rule.sections.values()) for rule in rules})
    names = [rule.function.__name__ for rule in rules]
    assert [fault.path for fault in faults] == [name for name in names for _ in range(watched.found.get(name, 0))]
