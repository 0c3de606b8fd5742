"""Every run file that ships is legal, round-trips, and is accepted by the schema that ships beside it."""

import json
from pathlib import Path

import jsonschema
import pytest

from megastable.config import RunConfig, json_schema, load_run_file, run_from_dict
from megastable.config.section import Section, keys_of, section_types
from tests.unit.config.config_examples import FULL, MINIMAL, SCHEMA_FILE, SHIPPED, faults_of, with_value

each_shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
MEND_SCHEMA = "the schema file is not that of the code; mend it: megastable schema > ds_configs/run_file.schema.json"


def test_all_four_ship() -> None:
    assert {path.stem for path in SHIPPED} >= {"gpt2_125m_fp16", "gpt_1.3b_bf16", "bloom_176b", "quickstart"}


@each_shipped
@pytest.mark.parametrize("exclude_none", [True, False], ids=["no nulls", "nulls"])
@pytest.mark.parametrize("exclude_unset", [True, False], ids=["given keys", "all keys"])
def test_dump_loads_to_an_equal_run(path: Path, exclude_none: bool, exclude_unset: bool) -> None:
    run = load_run_file(path)
    dumped = run.model_dump(mode="json", by_alias=True, exclude_none=exclude_none, exclude_unset=exclude_unset)
    assert run_from_dict(dumped) == run


@each_shipped
def test_schema_accepts(path: Path) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(path.read_text()))


@each_shipped
def test_names_the_schema_beside_it(path: Path) -> None:
    assert load_run_file(path).schema_reference == f"./{SCHEMA_FILE.name}"


def test_schema_file_is_up_to_date() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema(), MEND_SCHEMA


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert "$id" not in json_schema()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train_batch_size", 2048),
        ("megastable.model.num_layer", 3),
        ("megastable.model.dropout", 1.0),
        ("megastable.lr_schedule.type", "exponential"),
        ("megastable.lr_schedule.warmup", -1),
        ("megastable.lr_schedule.step_factor", 1),
        ("megastable.lr_schedule.batch_scaling", "cube"),
        ("megastable.init.scheme", "normal"),
        ("megastable.data.source", {"type": "stdlib", "path": "x"}),
        ("zero_optimization.stage", 2),
    ],
)
def test_schema_refuses_what_loading_refuses(path: str, value: object) -> None:
    raw = with_value(MINIMAL, path, value)
    assert faults_of(raw)
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(raw)


@pytest.mark.parametrize("raw", [MINIMAL, FULL], ids=["minimal", "full"])
def test_examples_pass_both(raw: dict[str, object]) -> None:
    assert faults_of(raw) == ()
    jsonschema.Draft202012Validator(json_schema()).validate(raw)


def all_sections(section: type[Section] = RunConfig) -> set[type[Section]]:
    inner = [kind for field in section.model_fields.values() for kind in section_types(field.annotation)]
    return {section}.union(*map(all_sections, inner))


def name_of(section: type[Section]) -> str:
    return section.__name__


SECTIONS: list[type[Section]] = sorted(all_sections(), key=name_of)


@pytest.mark.parametrize("section", SECTIONS, ids=name_of)
def test_every_key_is_described(section: type[Section]) -> None:
    assert section.__doc__
    for key, field in keys_of(section).items():
        assert field.description, key
    assert section.model_config["extra"] == "forbid"
    assert section.model_config["frozen"]


def test_bloom_is_the_run_that_was() -> None:
    (path,) = (path for path in SHIPPED if path.stem == "bloom_176b")
    run = load_run_file(path)
    own = run.megastable
    ramp = own.batch_rampup
    assert (ramp.start, ramp.increment, ramp.final, ramp.ramp_samples) == (192, 16, 2048, 9_765_625)
    assert (run.train_micro_batch_size_per_gpu, ramp.micro_batch_size_steps) == (1, ((784, 2),))
    assert (own.model.num_layers, own.model.hidden_size, own.model.num_attention_heads) == (70, 14336, 112)
    assert (own.model.seq_length, own.model.padded_vocab_size, own.model.head_dim) == (2048, 250_880, 128)
    total = own.training.total_samples
    assert total == 220_000_000
    assert own.lr_schedule.warmup.to_samples(total, 2048) == 183_105
    assert own.lr_schedule.decay.to_samples(total, 2048) == 200_000_000
    assert (run.optimizer.params.lr, own.lr_schedule.min_lr) == (6e-5, 6e-6)
    assert (run.bf16.enabled, run.data_types.grad_accum_dtype) == (True, "fp32")
    assert (own.init.scheme, own.init.std) == ("fixed", 0.0048)
