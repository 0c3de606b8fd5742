"""The registry of rules: every rule can be reached, and none runs before the rules that it needs hold."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megastable.config
from megastable.config import (
    ConfigError,
    Fault,
    RunConfig,
    batch_rampup,
    cross_rules,
    model,
    run_from_dict,
    stages,
    training,
)
from megastable.config.cross_rules import LaunchedRun
from megastable.config.reading import checking
from megastable.config.rules import RULES, Rule, RuleFunction, broken_rules
from megastable.config.run_config import MegastableConfig
from megastable.config.section import Section, keys_of, section_types
from megastable.core.errors import UserError
from tests.unit.config.config_examples import MINIMAL
from tests.unit.config.test_config_rules import CASES, Case


@dataclass
class Watched:
    """Runs the rules of a registry, and records which ran, in order, and how many faults each of them found."""

    rules: Sequence[Rule]
    sections: Collection[type[Section]] = ()
    found: dict[str, int] = field(default_factory=dict)

    def broken_rules(self, sections: Mapping[type[Section], Section], _: Sequence[Rule] = ()) -> Iterator[Fault]:
        """Yield what ``broken_rules`` does, for the rules of this object."""
        self.sections = sections.keys()
        wrapped = {rule.function: self._recording(rule.function) for rule in self.rules}
        return broken_rules(
            sections,
            [Rule(wrapped[rule.function], tuple(wrapped[need] for need in rule.needs)) for rule in self.rules],
        )

    def _recording(self, function: RuleFunction) -> RuleFunction:
        @functools.wraps(function)
        def record(**sections: Section) -> Iterator[Fault]:
            faults = list(function(**sections))
            assert function.__name__ not in self.found, f"{function.__name__} ran twice"
            self.found[function.__name__] = len(faults)
            return iter(faults)

        return record


def run_watched(
    overrides: Sequence[str], world_size: int | None, rules: Sequence[Rule] = RULES
) -> tuple[Watched, tuple[Fault, ...]]:
    """Check the minimal run with ``overrides``, and record which rules ran."""
    watched = Watched(rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "broken_rules", watched.broken_rules)
        try:
            run_from_dict(MINIMAL, overrides, world_size=world_size)
        except ConfigError as error:
            return watched, error.faults
    return watched, ()


def check_needs(watched: Watched) -> None:
    """Assert that exactly those rules ran whose sections were valid and whose needs had run before without a fault."""
    found = watched.found
    order = list(found)
    for rule in watched.rules:
        name = rule.function.__name__
        needs = [need.__name__ for need in rule.needs]
        has_sections = set(rule.sections.values()) <= set(watched.sections)
        assert (name in found) == (has_sections and all(found.get(need) == 0 for need in needs)), name
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
@settings(max_examples=80, deadline=None)
def test_in_a_broken_run_exactly_the_rules_run_that_can_judge(cases: list[Case], world_size: int | None) -> None:
    overrides = [override for case in cases for override in case.broken]
    watched, faults = run_watched(overrides, world_size)
    check_needs(watched)
    assert sum(watched.found.values()) <= len(faults)


@dataclass(frozen=True)
class Need:
    """A rule, one that it needs, and overrides that break the latter and would make the former fail or report too."""

    rule: RuleFunction
    need: RuleFunction
    overrides: tuple[str, ...]
    world_size: int = 1

    def __str__(self) -> str:
        return f"{self.rule.__name__}-{self.need.__name__}"


def of_batches(need: RuleFunction, *overrides: str) -> Need:
    return Need(cross_rules.batches_divide_among_replicas, need, overrides)


STAGES = "megastable.pipeline.num_stages"
PARTITION = "megastable.pipeline.partition"
RAMP = "megastable.batch_rampup"
AUTO = (f"{RAMP}.micro_batch_size=auto", f"{RAMP}.calibration=A100")
LR = "megastable.lr_schedule"
MICRO = "train_micro_batch_size_per_gpu=5"  # which the batches of none of these ramps divide by
NEEDS = (
    Need(model.rotary_needs_even_head_dim, model.heads_divide_hidden_size, ("megastable.model.hidden_size=126",)),
    Need(stages.every_stage_has_weights, stages.no_more_stages_than_layers, (f"{STAGES}=6",), world_size=6),
    Need(
        stages.every_stage_has_weights,
        stages.block_counts_make_the_model,
        (f"{STAGES}=3", f"{PARTITION}=[4, 0, 0, 0]"),
        world_size=3,
    ),
    Need(stages.every_stage_has_weights, stages.type_matches_a_class, (f"{STAGES}=2", f"{PARTITION}=type:linear"), 2),
    Need(
        stages.every_stage_has_weights,
        stages.deepspeed_finds_the_cut,
        ("megastable.model.num_layers=260", f"{STAGES}=100", f"{PARTITION}=type:norm"),
        world_size=100,
    ),
    Need(
        cross_rules.some_step_has_a_learning_rate,
        cross_rules.warmup_ends_before_decay,
        (f"{LR}.warmup=1", f"{LR}.decay=0"),
    ),
    Need(
        cross_rules.accumulation_fits_the_format,
        cross_rules.one_number_format,
        ("fp16.enabled=true", "bf16.enabled=true", "data_types.grad_accum_dtype=bf16"),
    ),
    Need(
        cross_rules.stable_ends_between,
        cross_rules.warmup_ends_before_decay,
        (f"{LR}.type=warmup_stable_decay", f"{LR}.warmup=50", f"{LR}.stable=45", f"{LR}.decay=40"),
    ),
    Need(
        batch_rampup.auto_tries_few_splits,
        batch_rampup.ramp_has_one_form,
        (
            f'{RAMP}={{"start": 1, "increment": 1, "final": 900}}',
            *AUTO,
            "megastable.model.num_layers=20",
            f"{STAGES}=20",
        ),
        world_size=20,
    ),
    Need(
        batch_rampup.auto_tries_few_splits,
        batch_rampup.ramp_reaches_final,
        (
            f'{RAMP}={{"start": 1, "increment": 1, "final": 2000, "ramp_samples": 9}}',
            *AUTO,
            "megastable.model.num_layers=20",
            f"{STAGES}=20",
        ),
        world_size=20,
    ),
    of_batches(batch_rampup.ramp_has_one_form, f"{RAMP}={{}}"),
    of_batches(
        batch_rampup.ramp_reaches_final,
        f'{RAMP}={{"start": 8, "increment": 10, "final": 32, "ramp_samples": 9}}',
        MICRO,
    ),
    of_batches(batch_rampup.ramp_steps_rise, f'{RAMP}={{"steps": []}}'),
    of_batches(batch_rampup.micro_batch_steps_rise, f"{RAMP}.micro_batch_size_steps=[[16, 2], [16, 5]]"),
    of_batches(batch_rampup.auto_chooses_every_size, *AUTO, f"{RAMP}.micro_batch_size_steps=[[16, 5]]"),
    of_batches(cross_rules.auto_starts_from_one_sample, *AUTO, MICRO),
    of_batches(training.one_run_length, "megastable.training.total_steps=1000", MICRO),
    of_batches(cross_rules.processes_are_whole_replicas, f"{STAGES}=2"),
)


def test_every_need_has_a_case() -> None:
    declared = {(rule.function, need) for rule in RULES for need in rule.needs}
    assert {(case.rule, case.need) for case in NEEDS} == declared


@pytest.mark.parametrize("case", NEEDS, ids=str)
def test_a_rule_is_silent_where_one_that_it_needs_is_broken(case: Need) -> None:
    watched, _ = run_watched(case.overrides, case.world_size)
    assert {name for name, count in watched.found.items() if count} == {case.need.__name__}
    assert case.rule.__name__ not in watched.found


@pytest.mark.parametrize("case", NEEDS, ids=str)
def test_without_the_need_the_rule_fails_or_reports_as_well(case: Need) -> None:
    without = [Rule(rule.function, tuple(need for need in rule.needs if need != case.need)) for rule in RULES]
    try:
        watched, _ = run_watched(case.overrides, case.world_size, without)
    except (AssertionError, IndexError, ValueError, UserError):
        return
    assert watched.found[case.rule.__name__] > 0


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
    faults = list(watched.broken_rules({kind: kind() for kind in valid}))
    check_needs(watched)
    names = [rule.function.__name__ for rule in rules]
    assert [fault.path for fault in faults] == [name for name in names for _ in range(watched.found.get(name, 0))]
