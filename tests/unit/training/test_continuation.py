"""What may differ between a checkpoint and the run that continues it: each key by its meaning, and how it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastable.checkpoints.manifest import Manifest
from megastable.config import ModelConfig, RunConfig, load_run_file
from megastable.config.run_config import differences, run_as_dict
from megastable.core.errors import UserError
from megastable.core.layout import ParallelLayout
from megastable.core.records import TrainingState
from megastable.planning.run_plan import number_of_devices, run_layout
from megastable.training.continuation import (
    ALLOWABLE,
    MODEL_FREE,
    MODEL_HABITS,
    MODEL_ITSELF,
    check_allowable,
    check_continues,
    check_same_corpus,
    events_of_resume,
    nothing_left,
)
from tests.support.checkpoints import ONE_PROCESS, manifest_of
from tests.support.tiny_run import tiny_run

RUN_FILES = Path(__file__).parents[3] / "ds_configs"
SHIPPED = sorted(path for path in RUN_FILES.glob("*.json") if not path.name.endswith(".schema.json"))
SAVED = TrainingState(step=10, consumed_samples=100, applied_samples=90, consumed_tokens=1600, skipped_steps=1)

Changes = tuple[dict[str, Any], dict[str, Any]]
"""Changes of the tiny run before the checkpoint, and now."""


def saved(run: RunConfig, layout: ParallelLayout = ONE_PROCESS) -> Manifest:
    """Return the manifest of a checkpoint of ``run`` as it comes back from its file."""
    return Manifest.model_validate_json(manifest_of(run, SAVED, layout).model_dump_json())


def warnings_of(manifest: Manifest, run: RunConfig, allowed: Sequence[str] = ()) -> list[str]:
    """Check that a run in one process continues the checkpoint; returns what is warned of."""
    warnings: list[str] = []
    check_continues(manifest, run, ONE_PROCESS, allowed, warnings.append)
    return warnings


def refusal_of(manifest: Manifest, run: RunConfig, allowed: Sequence[str] = ()) -> list[str]:
    """Return the lines that refuse it."""
    with pytest.raises(UserError) as caught:
        check_continues(manifest, run, ONE_PROCESS, allowed, warn=lambda text: None)
    head, *lines = str(caught.value).splitlines()
    assert head == "This run cannot continue the checkpoint:"
    return [line.strip() for line in lines]


def model(**changes: Any) -> dict[str, Any]:
    """Return changes of the model."""
    return {f"megastable__model__{key}": value for key, value in changes.items()}


# The model itself

OTHER_MODELS: dict[str, Changes] = {
    "activation": ({}, model(activation="swiglu")),
    "embedding_norm": ({}, model(embedding_norm=True)),
    "ffn_hidden_size": ({}, model(ffn_hidden_size=64)),
    "hidden_size": ({}, model(hidden_size=64)),
    "linear_biases": ({}, model(linear_biases=False)),
    "norm": ({}, model(norm="rmsnorm")),
    "num_attention_heads": ({}, model(num_attention_heads=2)),
    "num_key_value_heads": (model(num_key_value_heads=2), {}),
    "num_layers": ({}, model(num_layers=5)),
    "parallel_residual": ({}, model(parallel_residual=True)),
    "position_embedding": ({}, model(position_embedding="alibi")),
    "qk_norm": (model(qk_norm=True), {}),
    "tie_embeddings": ({}, model(tie_embeddings=False)),
    "vocab_size": ({}, model(vocab_size=299)),
}


def test_every_key_of_the_model_has_a_meaning_and_those_of_the_model_itself_a_row_here() -> None:
    assert sorted([*MODEL_ITSELF, *MODEL_HABITS, *MODEL_FREE]) == sorted(ModelConfig.model_fields)
    assert OTHER_MODELS.keys() == set(MODEL_ITSELF)


@pytest.mark.parametrize("key", OTHER_MODELS)
def test_another_model_is_refused_by_name_whatever_is_allowed(key: str) -> None:
    before, now = OTHER_MODELS[key]
    for allowed in ((), ALLOWABLE):
        lines = refusal_of(saved(tiny_run(**before)), tiny_run(**now), allowed)
        (line,) = [line for line in lines if line.startswith(f"megastable.model.{key}: ")]
        assert " in the checkpoint, " in line
        assert line.endswith("; the weights are of the model that they were trained with")


AS_TINY = {"activation": "gelu", "rotary_fraction": 1.0, "parallel_residual": False, "tie_embeddings": True}
"""What the family would set otherwise."""

SAME_MODELS: dict[str, Changes] = {
    "heads written out": ({}, model(num_key_value_heads=4)),
    "heads left out": (model(num_key_value_heads=4), {}),
    "inner width written out": ({}, model(ffn_hidden_size=128)),
    "another padding": ({}, model(vocab_padding_multiple=8)),
    "another backend": ({}, model(attention="math")),
    "compiled": ({}, model(compile=True)),
    "named after a family": ({}, model(family="gpt_neox", **AS_TINY)),
}


@pytest.mark.parametrize("name", SAME_MODELS)
def test_the_same_model_in_other_words_continues(name: str) -> None:
    before, now = SAME_MODELS[name]
    (warning,) = warnings_of(saved(tiny_run(**before)), tiny_run(**now))
    assert warning.startswith("changed since the checkpoint: megastable.model.")


def test_a_checkpoint_from_before_a_key_of_the_model_continues_at_its_default() -> None:
    values = run_as_dict(tiny_run())
    for key in ("linear_biases", "parallel_residual", "rotary_fraction"):
        del values["megastable"]["model"][key]
    del values["megastable"]["data"]["packing"]
    manifest = saved(tiny_run()).model_copy(update={"run": values})
    assert warnings_of(manifest, tiny_run()) == []
    (line,) = refusal_of(manifest, tiny_run(megastable__model__linear_biases=False))
    assert line.startswith("megastable.model.linear_biases: True in the checkpoint, False now")


def test_a_model_of_another_version_is_compared_as_it_is_written() -> None:
    values = run_as_dict(tiny_run())
    manifest = saved(tiny_run()).model_copy(update={"run": values})
    values["megastable"]["model"]["no_such_key"] = 1
    lines = refusal_of(manifest, tiny_run(**model(num_key_value_heads=4)), ["megastable.model.no_such_key"])
    assert [line.split(":")[0] for line in lines] == ["megastable.model.num_key_value_heads"]
    del values["megastable"]["model"]
    (line,) = refusal_of(manifest, tiny_run())
    assert line.startswith("megastable.model: None in the checkpoint")


# What is fixed by habit

HABITS: dict[str, list[Changes]] = {
    "megastable.data.validation_fraction": [({}, {"megastable__data__validation_fraction": 0.123})],
    "megastable.data.packing": [({}, {"megastable__data__packing": "reset"})],
    "megastable.init": [
        ({}, {"megastable__init": {"scheme": "fixed", "std": 0.02}}),
        ({"megastable__init": {"scheme": "fixed", "std": 0.02}}, {"megastable__init": {"scheme": "fixed", "std": 0.1}}),
    ],
    "megastable.training.seed": [({}, {"megastable__training__seed": 8})],
    "megastable.model.attention_logit_cap": [({}, model(attention_logit_cap=50.0))],
    "megastable.model.dropout": [({}, model(dropout=0.1)), (model(dropout=0.1), model(dropout=0.2))],
    "megastable.model.norm_eps": [({}, model(norm_eps=1e-6))],
    "megastable.model.output_logit_cap": [(model(output_logit_cap=30.0), {})],
    "megastable.model.rotary_base": [({}, model(rotary_base=500_000.0))],
    "megastable.model.rotary_fraction": [({}, model(rotary_fraction=0.5))],
    "megastable.model.seq_length": [({}, model(seq_length=32))],
}


def test_every_habit_has_a_row_here() -> None:
    assert {*HABITS, "megastable.data"} == set(ALLOWABLE), "another text is refused once its tokens are known"


@pytest.mark.parametrize(("key", "changes"), [(key, changes) for key, rows in HABITS.items() for changes in rows])
def test_a_habit_is_broken_by_name_only(key: str, changes: Changes) -> None:
    before, now = (tiny_run(**values) for values in changes)
    lines = refusal_of(saved(before), now)
    assert lines and all(line.startswith(key) for line in lines)
    assert all(line.endswith(f"; --allow-change {key} allows it") for line in lines)
    others = [other for other in ALLOWABLE if not key.startswith(other)]
    assert refusal_of(saved(before), now, others) == lines
    check_allowable([key])
    warnings = warnings_of(saved(before), now, [*others, key])
    assert len(warnings) == len(lines) and all(f"checkpoint: {key}" in text for text in warnings)


def test_learned_positions_make_their_number_a_part_of_the_model() -> None:
    before, now = (model(position_embedding="learned", **more) for more in ({}, {"seq_length": 32}))
    (line,) = refusal_of(saved(tiny_run(**before)), tiny_run(**now), ALLOWABLE)
    assert line.startswith("megastable.model.seq_length: 16 in the checkpoint, 32 now; the weights are of the model")


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("megastable.model.hidden_size", "nothing allows to change"),
        ("megastable.model", "nothing allows to change"),
        ("optimizer.params.lr", "must be one of megastable.data, "),
        ("megastable.pipeline.num_stages", "others need no permission"),
        ("megastable.training.sed", "megastable.training.seed"),
        ("", "must be one of"),
        ("\x1b[2J", r"\x1b[2J"),
    ],
)
def test_what_cannot_be_allowed_is_refused_by_name(key: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        check_allowable(["megastable.training.seed", key])
    assert part in str(caught.value) and str(caught.value).startswith("--allow-change ")


# What is free

FREE: dict[str, Changes] = {
    "optimizer.params.lr": ({}, {"optimizer__params__lr": 0.005}),
    "gradient_clipping": ({}, {"gradient_clipping": 1.0}),
    "train_micro_batch_size_per_gpu": ({}, {"train_micro_batch_size_per_gpu": 2}),
    "megastable.batch_rampup.samples_per_increment": ({}, {"megastable__batch_rampup__samples_per_increment": 24}),
    "megastable.lr_schedule.min_lr": ({}, {"megastable__lr_schedule__min_lr": 0.0}),
    "megastable.training.total_steps": ({}, {"megastable__training__total_steps": 9}),
    "megastable.training.eval_interval": ({}, {"megastable__training__eval_interval": 3}),
    "megastable.training.loss_chunk_tokens": ({}, {"megastable__training__loss_chunk_tokens": 64}),
    "megastable.checkpoint.save_interval": ({}, {"megastable__checkpoint__save_interval": 77}),
    "megastable.logging.interval": ({}, {"megastable__logging__interval": 77}),
    "fp16.initial_scale_power": ({}, {"fp16__initial_scale_power": 5}),
    # The layout, and which layers a stage has.
    "megastable.pipeline.num_stages": ({}, {"megastable__pipeline__num_stages": 2}),
    "megastable.pipeline.partition": ({}, {"megastable__pipeline__partition": "uniform"}),
    "megastable.pipeline.activation_checkpointing": ({}, {"megastable__pipeline__activation_checkpointing": True}),
    "megastable.tensor_parallel.size": ({}, {"megastable__tensor_parallel": {"size": 2}}),
    "megastable.tensor_parallel.sequence_parallel": (
        {"megastable__tensor_parallel": {"size": 2}},
        {"megastable__tensor_parallel": {"size": 2, "sequence_parallel": True}},
    ),
    "megastable.training.world_size": ({"megastable__training__world_size": 4}, {}),
    # The precision.
    "fp16.enabled": ({}, {"fp16__enabled": True}),
    "bf16.enabled": ({"bf16__enabled": True}, {}),
    "data_types.grad_accum_dtype": (
        {"bf16__enabled": True},
        {"bf16__enabled": True, "data_types__grad_accum_dtype": "fp32"},
    ),
    # Where the tokens come from.
    "megastable.data.source.path": (
        {"megastable__data__source": {"type": "text", "path": "here"}},
        {"megastable__data__source": {"type": "text", "path": "moved"}},
    ),
    "megastable.data.tokenizer.vocab_size": (
        {"megastable__data__tokenizer": {"type": "bpe", "vocab_size": 300}},
        {"megastable__data__tokenizer": {"type": "bpe"}},
    ),
    "megastable.data.cache_dir": ({}, {"megastable__data__cache_dir": "cache"}),
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_an_unchanged_run_continues_without_a_word(path: Path) -> None:
    run = load_run_file(path)
    layout = run_layout(run, number_of_devices(run, None)[0])
    warnings: list[str] = []
    check_continues(saved(run, layout), run, layout, (), warnings.append)
    assert warnings == []


@pytest.mark.parametrize("key", FREE)
def test_any_other_change_is_reported_with_both_values(key: str) -> None:
    before, now = (tiny_run(**values) for values in FREE[key])
    (warning,) = warnings_of(saved(before), now)
    ((changed, old, new),) = differences(run_as_dict(before), run_as_dict(now))
    assert changed == key
    assert warning == f"changed since the checkpoint: {key} was {old!r}, is {new!r}"


@pytest.mark.parametrize("layout", [ParallelLayout(1, 3), ParallelLayout(4, 2), ParallelLayout(2, 2, 2)])
def test_any_layout_continues_and_is_named(layout: ParallelLayout) -> None:
    pipeline = {"num_stages": layout.num_stages}
    run = tiny_run(megastable__pipeline=pipeline, megastable__tensor_parallel={"size": layout.tensor_parallel_size})
    warnings: list[str] = []
    check_continues(saved(tiny_run()), run, layout, (), warnings.append)
    named = {text.split("checkpoint: ")[1].split(" was")[0] for text in warnings}
    assert "data_parallel_size" in named
    assert ("megastable.pipeline.num_stages" in named) == (layout.num_stages > 1)
    assert ("megastable.tensor_parallel.size" in named) == (layout.tensor_parallel_size > 1)


def test_all_reasons_are_named_at_once_beside_what_is_free() -> None:
    changed = tiny_run(**model(hidden_size=64), megastable__training__seed=8, optimizer__params__lr=0.02)
    warnings: list[str] = []
    with pytest.raises(UserError) as caught:
        check_continues(saved(tiny_run()), changed, ParallelLayout(1, 2), (), warnings.append)
    text = str(caught.value)
    assert "megastable.model.hidden_size: 32 in the checkpoint, 64 now" in text
    assert "megastable.training.seed: 7 in the checkpoint, 8 now" in text
    assert "optimizer" not in text
    assert [warning.split()[4] for warning in warnings] == ["data_parallel_size", "optimizer.params.lr"]


# The tokens


@pytest.mark.parametrize("allowed", [["megastable.data"], ["megastable.data.validation_fraction"]])
def test_tokens_decide_and_another_text_is_allowed_by_name(allowed: list[str]) -> None:
    manifest = saved(tiny_run())
    warnings: list[str] = []
    check_same_corpus(manifest, "tokens", (), warnings.append)
    with pytest.raises(UserError, match=r"not the one it was trained on.*--allow-change megastable\.data"):
        check_same_corpus(manifest, "others", ["megastable.training.seed"], warnings.append)
    assert warnings == []
    check_same_corpus(manifest, "others", allowed, warnings.append)
    assert warnings == ["changed since the checkpoint: megastable.data (its tokens) was 'tokens', is 'others'"]


# What is said


@pytest.mark.parametrize(
    ("skipped", "says"),
    [([[40, 60]], "past all of [40, 60]"), ([[90, 120]], "past the first 10 of"), ([[100, 120]], None)],
)
def test_samples_that_are_left_out_too_late_are_told_by_name(skipped: list[list[int]], says: str | None) -> None:
    manifest = saved(tiny_run())
    now = tiny_run(megastable__training__skip_samples=skipped)
    told = [line for line in warnings_of(manifest, now) if line.startswith("megastable.training.skip_samples: the run")]
    assert len(told) == (says is not None)
    assert says is None or says in told[0]
    # Left out from before, they were.
    before = saved(tiny_run(megastable__training__skip_samples=skipped))
    assert not any("the run is at sample" in line for line in warnings_of(before, now))


def test_a_resume_is_an_event_and_so_is_all_that_changed(tmp_path: Path) -> None:
    manifest = saved(tiny_run())
    checkpoint = tmp_path / "step_00000010"
    for name in ("step_00000010", "step_00000009", "step_00000011", "step_00000012.partial"):
        (tmp_path / name).mkdir()
    now = tiny_run(optimizer__params__lr=0.02)
    events = list(events_of_resume(checkpoint, manifest, now, ParallelLayout(1, 2), "others", tmp_path))
    assert {(event.step, event.consumed_samples) for event in events} == {(10, 100)}
    assert [event.kind for event in events] == ["resume", "changed", "changed", "changed", "passed_over"]
    assert [(event.data["key"], event.data["old"], event.data["new"]) for event in events[1:4]] == [
        ("data_parallel_size", 1, 2),
        ("optimizer.params.lr", 0.01, 0.02),
        ("megastable.data (its tokens)", "tokens", "others"),
    ]
    assert "step_00000011" in events[4].text
    elsewhere = list(events_of_resume(checkpoint, manifest, tiny_run(), ONE_PROCESS, "tokens", tmp_path / "other"))
    assert [event.kind for event in elsewhere] == ["resume"]


def test_nothing_left_names_how_far_the_run_is_in_what_its_length_is_given() -> None:
    checkpoint = Path("step_00000010")
    for changes, expected in (
        ({"total_steps": 11}, None),
        ({"total_steps": 10}, "is at step 10, and the run has 10 steps"),
        ({"total_steps": 3}, "is at step 10, and the run has 3 steps"),
        ({"total_samples": 101}, None),
        ({"total_samples": 100}, "is at sample 100, and the run has 100 samples"),
    ):
        training = tiny_run(megastable__training=changes).megastable.training
        said = nothing_left(checkpoint, SAVED, training)
        assert (said is None) == (expected is None)
        if said is not None and expected is not None:
            assert expected in said and said.endswith(f"raise megastable.training.{next(iter(changes))}")
    longer = tiny_run(megastable__training={"total_samples": 100}).megastable.training
    assert nothing_left(checkpoint, replace(SAVED, consumed_samples=99), longer) is None
