"""A file with faults: all of them at once, each with its path, its value and what is legal."""

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megastable.config import ConfigError, RunConfig, load_run_file, run_from_dict
from megastable.config.data import SourceSection, TokenizerSection
from megastable.config.deepspeed_keys import ACCUMULATION_DTYPES
from megastable.config.section import Section, keys_of, kinds_of, section_types, tag_of
from megastable.core.errors import UserError
from megastable.core.init_std import INIT_SCHEMES
from megastable.core.lr_schedule import BATCH_SCALING_EXPONENTS, LR_SCHEDULES
from tests.unit.config.config_examples import FULL, MINIMAL, faults_of, key_paths, value_at, with_value, written


def error_text(path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_file(path, overrides)
    return str(caught.value)


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    raw = with_value(MINIMAL, "train_batch_size", 2048)
    raw = with_value(raw, "optimizer.params.lr", "1e-3")
    raw = with_value(raw, "megastable.model.hiden_size", 128)
    raw = with_value(raw, "megastable.training.eval_samples", 0)
    raw = with_value(raw, "megastable.pipeline.num_stages", 6)
    path = written(tmp_path, raw)
    assert error_text(path).splitlines() == [
        f"{path}: 5 faults",
        "  megastable.model.hiden_size = 128: unknown key; did you mean hidden_size?",
        "  train_batch_size = 2048: refused: the ramp decides it for every step; write megastable.batch_rampup.final",
        '  optimizer.params.lr = "1e-3": must be a number, without quotes',
        "  megastable.training.eval_samples = 0: must be greater than or equal to 1",
        "  megastable.pipeline.num_stages = 6: must be at most megastable.model.num_layers (4) + 1: "
        "every stage needs a layer with weights of its own",
    ]


def test_the_error_is_a_user_error_and_can_travel_between_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        run_from_dict(MINIMAL, ["megastable.model.dropout=1"])
    assert isinstance(caught.value, UserError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert caught.value.faults


@pytest.mark.parametrize("path", list(key_paths(FULL)))
def test_a_typo_at_any_depth_names_the_nearest_key(path: str) -> None:
    *parents, key = path.split(".")
    wrong = typo(key, siblings=set(value_at(FULL, ".".join(parents))) if parents else set(FULL))
    raw = copy.deepcopy(FULL)
    section = value_at(raw, ".".join(parents)) if parents else raw
    section[wrong] = section.pop(key)
    (fault,) = faults_of(raw)
    if key == "type" and parents[-1] in {"source", "tokenizer"}:
        # Without its type, the section's other keys cannot be judged either.
        assert fault.path == ".".join(parents)
        assert f'did you mean "type" by "{wrong}"?' in fault.message
    else:
        assert fault.path == ".".join([*parents, wrong])
        assert fault.message == f"unknown key; did you mean {key}?"


def typo(key: str, siblings: set[str]) -> str:
    """The key with two neighbours swapped or, where that gives another key, a letter doubled."""
    rng = random.Random(key)
    places = [index for index in range(len(key) - 1) if key[index] != key[index + 1]]
    index = rng.choice(places)
    swapped = key[:index] + key[index + 1] + key[index] + key[index + 2 :]
    return swapped if swapped not in siblings and len(key) > 4 else key + key[-1]


def test_a_typo_does_not_hide_the_value_and_is_shown_as_written() -> None:
    faults = faults_of(MINIMAL, ["megastable.training.eval_sample=0"])
    assert [fault.path for fault in faults] == ["megastable.training.eval_sample"] * 2


def test_a_key_in_the_wrong_section_is_told_where_it_belongs() -> None:
    (fault,) = faults_of(with_value(MINIMAL, "num_layers", 4))
    assert fault.message == "unknown key here; did you mean megastable.model.num_layers?"


def test_a_key_like_no_other_is_told_what_is_legal() -> None:
    (fault,) = faults_of(with_value(MINIMAL, "megastable.logging.zzz", 4))
    assert fault.message == "unknown key; legal keys here are interval"


def test_unknown_keys_of_a_typed_section_are_told_that_types_keys() -> None:
    source = {"type": "hf", "path": "x", "text_colum": "y"}
    (fault,) = faults_of(with_value(MINIMAL, "megastable.data.source", source))
    assert (fault.path, fault.message) == (
        "megastable.data.source.text_colum",
        "unknown key; did you mean text_column?",
    )


def types_of(section: type[Section]) -> str:
    """The types that a section may have, as a message lists them."""
    return '"type" must be ' + " or ".join(json.dumps(tag_of(kind)) for kind in kinds_of(section))


@pytest.mark.parametrize(
    ("path", "value", "legal"),
    [
        ("train_micro_batch_size_per_gpu", True, "whole number"),
        ("train_micro_batch_size_per_gpu", "3", "whole number"),
        ("train_micro_batch_size_per_gpu", 0, "greater than or equal to 1"),
        ("zero_optimization.reduce_bucket_size", 5e8, "write 500000000"),
        ("gradient_clipping", True, "number"),
        ("gradient_clipping", "1.0", "number"),
        ("gradient_clipping", -1, 'from 0 to 1,000,000, or "auto"'),
        ("gradient_clipping", float("nan"), 'from 0 to 1,000,000, or "auto"'),
        ("gradient_clipping", float("inf"), 'from 0 to 1,000,000, or "auto"'),
        ("optimizer.params.weight_decay", -1, "greater than or equal to 0"),
        ("optimizer.params.weight_decay", float("nan"), "finite"),
        ("optimizer.params.lr", 0, "greater than 0"),
        ("optimizer.params.lr", float("inf"), "finite"),
        ("optimizer.params.betas", [0.9, 1.0], "less than 1"),
        ("optimizer.params.betas", [0.9], "too short"),
        ("optimizer.params.betas", [0.9, 0.9, 0.9], "at most 2 entries"),
        ("optimizer.params.betas", 0.9, "list"),
        ("fp16", None, "section"),
        ("fp16.enabled", 1, "true or false"),
        ("fp16.enabled", "true", "true or false"),
        ("megastable", [], "section"),
        ("megastable.lr_schedule.stable", 0.8, "whole number of samples"),
        ("megastable.lr_schedule.step_interval", {}, "exactly one"),
        ("megastable.lr_schedule.step_factor", 1, "less than 1"),
        ("megastable.lr_schedule.step_factor", 0, "greater than 0"),
        ("megastable.lr_schedule.warmup", 0.05, "whole number of samples"),
        ("megastable.lr_schedule.warmup", -1, "whole number of samples"),
        ("megastable.lr_schedule.warmup", True, "whole number of samples"),
        ("megastable.lr_schedule.warmup", {}, "exactly one"),
        ("megastable.lr_schedule.warmup", {"samples": 1, "tokens": 2}, "exactly one"),
        ("megastable.lr_schedule.warmup.fraction", 1.5, "less than or equal to 1"),
        ("megastable.batch_rampup.steps", [[0, 0]], "greater than or equal to 1"),
        ("megastable.data.source", {"type": "web"}, types_of(SourceSection)),
        ("megastable.data.source", {"path": "x"}, types_of(SourceSection)),
        ("megastable.data.tokenizer", {"type": "words"}, types_of(TokenizerSection)),
        ("megastable.data.source", {"type": "text"}, "is required: A file, a folder"),
        ("megastable.training.seed", 2**32, "less than or equal to 4294967295"),
    ],
)
def test_value_fault_says_what_is_legal(path: str, value: object, legal: str) -> None:
    (fault,) = faults_of(with_value(MINIMAL, path, value))
    assert fault.path.startswith(path)
    assert legal in fault.message


def named_choices(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Paths of all keys with a fixed set of legal names, and the names: those of a registry and those of a list."""
    properties = section.model_json_schema(by_alias=True)["properties"]
    for key, field in keys_of(section).items():
        for schema in (properties[key], *properties[key].get("anyOf", ())):
            if "enum" in schema:
                yield prefix + key, schema["enum"]
        for kind in section_types(field.annotation):
            yield from named_choices(kind, f"{prefix}{key}.")


CHOICES = dict(named_choices())


def test_the_keys_that_name_an_entry_of_a_registry_are_among_the_choices() -> None:
    assert CHOICES["megastable.lr_schedule.type"] == list(LR_SCHEDULES)
    assert CHOICES["megastable.lr_schedule.batch_scaling"] == list(BATCH_SCALING_EXPONENTS)
    assert CHOICES["megastable.init.scheme"] == list(INIT_SCHEMES)
    assert CHOICES["megastable.model.norm"]
    assert CHOICES["optimizer.type"] == ["AdamW", "Adam"]
    assert CHOICES["communication_data_type"] == list(ACCUMULATION_DTYPES)


@pytest.mark.parametrize("path", CHOICES)
@pytest.mark.parametrize("changed", [str.swapcase, lambda name: f"{name}_"], ids=["case", "longer"])
def test_a_name_that_is_none_is_refused_with_all_legal_ones(path: str, changed: Callable[[str], str]) -> None:
    (fault,) = faults_of(with_value(MINIMAL, path, changed(CHOICES[path][0])))
    assert fault.path == path
    assert all(repr(name) in fault.message for name in CHOICES[path])


@pytest.mark.parametrize("path", [path for path in key_paths(MINIMAL) if path != "megastable.training.total_samples"])
def test_a_missing_key_is_named(path: str) -> None:
    raw = copy.deepcopy(MINIMAL)
    *parents, key = path.split(".")
    section = value_at(raw, ".".join(parents)) if parents else raw
    del section[key]
    if path == "megastable.batch_rampup.final":
        path = "megastable.batch_rampup"
    if path == "megastable.data.source.type":
        path = "megastable.data.source"
    (fault,) = faults_of(raw)
    assert fault.path == path


def test_long_values_are_cut() -> None:
    (fault,) = faults_of(with_value(MINIMAL, "gradient_clipping", "x" * 1000))
    assert len(str(fault)) < 200
