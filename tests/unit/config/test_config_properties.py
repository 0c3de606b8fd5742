"""Properties over many run files: legal ones round-trip, and no file whatever causes any other error."""

import copy
import json
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import Amount, ConfigError, ModelConfig, RunConfig, run_from_dict
from megastable.config.lr_schedule import types_that_read
from megastable.core.init_std import INIT_SCHEMES
from megastable.core.lr_schedule import BATCH_SCALING_EXPONENTS, LR_SCHEDULES
from tests.unit.config.config_examples import FULL, MINIMAL, faults_of, key_paths, value_at, with_value

PATHS = list(key_paths(FULL))
SOURCE_AND_TOKENIZER = ("megastable.data.source.", "megastable.data.tokenizer.")
LEAVES = [
    path
    for path in PATHS
    # A wrong "type" leaves the other keys of its section without anything to judge them by.
    if not isinstance(value_at(FULL, path), dict) and not path.startswith(SOURCE_AND_TOKENIZER)
]
sizes = st.integers(1, 10**6)
batch_sizes = st.integers(1, 20_000)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["bf16", "hf", "Adam"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "path", "x", "tokens"]), inner, max_size=3)
    ),
    max_leaves=6,
)
amounts = st.one_of(
    st.integers(0, 10**9),
    st.fixed_dictionaries({"samples": st.integers(0, 10**9)}),
    st.fixed_dictionaries({"tokens": st.integers(0, 10**12)}),
    st.fixed_dictionaries({"fraction": st.floats(0, 1)}),
)


@st.composite
def ramps(draw: st.DrawFn) -> dict[str, Any]:
    start, increment, count = draw(batch_sizes), draw(batch_sizes), draw(st.integers(1, 50))
    length = draw(st.sampled_from(["ramp_samples", "samples_per_increment"]))
    linear = {"start": start, "increment": increment, "final": start + count * increment, length: draw(sizes)}
    starts = sorted(draw(st.sets(sizes, max_size=4)))
    batches = sorted(draw(st.lists(batch_sizes, min_size=len(starts) + 1, max_size=len(starts) + 1)))
    steps = {"steps": [list(pair) for pair in zip([0, *starts], batches, strict=True)]}
    return draw(st.sampled_from([linear, steps, {"final": start}]))


@st.composite
def legal_runs(draw: st.DrawFn) -> dict[str, Any]:
    raw = copy.deepcopy(MINIMAL)
    heads, head_dim, groups = draw(st.integers(1, 8)), 2 * draw(st.integers(1, 32)), draw(st.integers(1, 4))
    layers = draw(st.integers(1, 80))
    raw["megastable"]["model"] |= {
        "num_layers": layers,
        "hidden_size": heads * groups * head_dim,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": draw(st.sampled_from([None, heads])),
        "vocab_size": draw(st.integers(257, 300_000)),
        "dropout": draw(st.floats(0, 1, exclude_max=True)),
    }
    raw["megastable"]["pipeline"] = {"num_stages": draw(st.integers(1, layers))}
    raw["megastable"]["batch_rampup"] = draw(ramps())
    lr = draw(st.floats(1e-9, 1))
    raw["optimizer"]["params"]["lr"] = lr
    name = draw(st.sampled_from(list(LR_SCHEDULES)))
    keys = {
        "decay": draw(amounts),
        "min_lr": draw(st.floats(1e-10, lr)),  # not 0, at which a decay without length is refused
        "step_interval": draw(st.none() | amounts),
        "step_factor": draw(st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True)),
    }
    raw["megastable"]["lr_schedule"] = {
        "type": name,
        "warmup": 0,
        "batch_scaling": draw(st.sampled_from(list(BATCH_SCALING_EXPONENTS))),
        **{key: value for key, value in keys.items() if name in types_that_read(key)},
    }
    scheme = draw(st.sampled_from(list(INIT_SCHEMES)))
    raw["megastable"]["init"] = {"scheme": scheme, "std": 0.01 if scheme == "fixed" else None}
    raw[draw(st.sampled_from(["fp16", "bf16", "wandb"]))] = {"enabled": True}
    return raw


@given(legal_runs())
@settings(max_examples=50, deadline=None)
def test_legal_runs_round_trip(raw: dict[str, Any]) -> None:
    run = run_from_dict(raw)
    for exclude_none, exclude_unset in ((False, False), (True, False), (False, True)):
        dumped = run.model_dump(mode="json", by_alias=True, exclude_none=exclude_none, exclude_unset=exclude_unset)
        assert run_from_dict(json.loads(json.dumps(dumped))) == run


@given(st.sampled_from(PATHS), json_values, st.sampled_from([MINIMAL, FULL]))
@settings(max_examples=120, deadline=None)
def test_any_value_anywhere_is_legal_or_a_named_fault(path: str, value: Any, base: dict[str, Any]) -> None:
    try:
        run = run_from_dict(with_value(base, path, value))
    except ConfigError as error:
        assert error.faults
        assert str(error)
    else:
        assert isinstance(run, RunConfig)


@given(st.dictionaries(st.sampled_from([*FULL, "x", "train_batch_size"]), json_values, max_size=4))
@settings(max_examples=50, deadline=None)
def test_any_object_is_legal_or_a_named_fault(raw: dict[str, Any]) -> None:
    try:
        run_from_dict(raw)
    except ConfigError as error:
        assert error.faults


@given(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=6, unique=True))
@settings(max_examples=50, deadline=None)
def test_every_one_of_several_wrong_values_is_named(paths: list[str]) -> None:
    raw = FULL
    for path in paths:
        raw = with_value(raw, path, [[None]])
    named = [fault.path for fault in faults_of(raw)]
    assert all(any(name.startswith(path) for name in named) for path in paths)


@given(st.integers(0, 1000), st.integers(0, 10**9))
def test_a_written_fraction_is_exact(thousandths: int, total: int) -> None:
    amount = Amount(fraction=thousandths / 1000)
    assert amount.to_samples(total, 2048) == thousandths * total // 1000


@given(st.floats(0, 1), st.integers(0, 10**12))
def test_a_fraction_is_within_the_run(fraction: float, total: int) -> None:
    samples = Amount(fraction=fraction).to_samples(total, 1)
    assert 0 <= samples <= total
    assert abs(samples - Fraction(str(fraction)) * total) < 1


@given(st.integers(0, 10**13), st.integers(1, 10**5))
def test_tokens_are_counted_in_whole_samples(tokens: int, seq_length: int) -> None:
    samples = Amount(tokens=tokens).to_samples(1, seq_length)
    assert samples * seq_length <= tokens < (samples + 1) * seq_length


def test_blooms_warmup_tokens_are_its_samples() -> None:
    assert Amount(tokens=375_000_000).to_samples(220_000_000, 2048) == 183_105


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**MINIMAL["megastable"]["model"], **changes})


@given(st.integers(1, 300_000), st.integers(1, 1024))
def test_padded_vocab_is_the_next_multiple(vocab_size: int, multiple: int) -> None:
    padded = model(vocab_size=vocab_size, vocab_padding_multiple=multiple).padded_vocab_size
    assert padded % multiple == 0
    assert vocab_size <= padded < vocab_size + multiple


@given(st.integers(1, 20_000))
def test_default_ffn_sizes(hidden_size: int) -> None:
    assert model(hidden_size=hidden_size).ffn_size == 4 * hidden_size
    gated = model(hidden_size=hidden_size, activation="swiglu").ffn_size
    assert gated % 64 == 0
    assert 0 <= gated - Fraction(8, 3) * hidden_size < 64
    assert model(hidden_size=hidden_size, activation="swiglu", ffn_hidden_size=5).ffn_size == 5


def test_llamas_ffn_size() -> None:
    assert model(hidden_size=4096, num_attention_heads=32, activation="swiglu").ffn_size == 10_944


def test_heads() -> None:
    shape = model(hidden_size=128, num_attention_heads=8)
    assert (shape.kv_heads, shape.head_dim) == (8, 16)
    assert model(num_attention_heads=4, num_key_value_heads=2).kv_heads == 2
