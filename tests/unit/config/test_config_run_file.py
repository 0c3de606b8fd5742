"""Reading a run file, and overriding its keys."""

import subprocess
import sys
from pathlib import Path

import pytest

from megastable.config import ConfigError, load_run_file, run_from_dict
from tests.unit.config.config_examples import MINIMAL, RUN_FILES, faults_of, with_value, written


def refusal(path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_file(path, overrides)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    run = load_run_file(written(tmp_path, MINIMAL))
    assert run.train_micro_batch_size_per_gpu == 1
    assert run.clip_norm == 1.0
    assert run.optimizer.params.betas == (0.9, 0.95)
    assert run.zero_optimization.stage == 1
    assert run.bf16.immediate_grad_update
    assert run.megastable.lr_schedule.warmup.fraction == 0.05
    assert run.megastable.lr_schedule.decay.fraction == 1.0
    assert run.megastable.init.scheme == "megatron_530b"
    assert run.megastable.data.tokenizer.type == "bpe"
    assert run.megastable.training.seed == 1234


def test_missing_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.json")


def test_folder(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{\n  "optimizer": {"type": "AdamW",}\n}', "line 2, column 33"),
        ("{\n  // a comment\n}", "line 2, column 3"),
        ("", "line 1, column 1"),
        ('{"a": 1}\n{"b": 2}', "line 2, column 1"),
    ],
)
def test_not_json(tmp_path: Path, text: str, place: str) -> None:
    assert place in refusal(written(tmp_path, text))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_not_an_object(tmp_path: Path, text: str) -> None:
    assert "must hold a JSON object" in refusal(written(tmp_path, text))


@pytest.mark.parametrize("depth", [33, 500, 100_000])
def test_json_that_is_nested_deeper_than_any_run_file(tmp_path: Path, depth: int) -> None:
    brackets = "[" * depth + "]" * depth
    says = "must not be nested deeper than 32 brackets"
    assert says in refusal(written(tmp_path, f'{{"optimizer": {brackets}}}'))
    (fault,) = [
        fault for fault in faults_of(MINIMAL, (f"train_micro_batch_size_per_gpu={brackets}",)) if says in str(fault)
    ]
    assert fault.path == "train_micro_batch_size_per_gpu"
    assert says in str(faults_of(MINIMAL, (".".join(["a"] * depth) + "=1",))[0])


def test_a_number_that_python_does_not_read(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(written(tmp_path, f'{{"a": {"9" * 5000}}}'))


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert "UTF-8" in refusal(path)


def test_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_run_file(path) == run_from_dict(MINIMAL)


def test_repeated_keys_are_faults_wherever_they_stand(tmp_path: Path) -> None:
    text = written(tmp_path, MINIMAL).read_text()
    text = text.replace('"num_layers": 4', '"num_layers": 4, "num_layers": 5').replace(
        '{"opt', '{"fp16": {}, "fp16": {}, "opt'
    )
    with pytest.raises(ConfigError) as caught:
        load_run_file(written(tmp_path, text))
    assert [(fault.path, fault.message) for fault in caught.value.faults] == [
        ("fp16", "given twice; remove one of them"),
        ("megastable.model.num_layers", "given twice; remove one of them"),
    ]


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("megastable.model.num_layers=6", "megastable.model.num_layers", 6),
        ("optimizer.params.lr=1e-4", "optimizer.params.lr", 1e-4),
        ("megastable.lr_schedule.type=linear", "megastable.lr_schedule.type", "linear"),
        ('megastable.lr_schedule.type="linear"', "megastable.lr_schedule.type", "linear"),
        ("bf16.enabled=true", "bf16.enabled", True),
        ("megastable.model.ffn_hidden_size=null", "megastable.model.ffn_hidden_size", None),
        (
            "megastable.batch_rampup.micro_batch_size_steps=[[16, 2]]",
            "megastable.batch_rampup.micro_batch_size_steps",
            [[16, 2]],
        ),
        (
            'megastable.data.source={"type": "text", "path": "a=b"}',
            "megastable.data.source",
            {"type": "text", "path": "a=b"},
        ),
        ("tensorboard.output_path=a=b", "tensorboard.output_path", "a=b"),
        ("tensorboard.output_path=", "tensorboard.output_path", ""),
        ("$schema=x", "$schema", "x"),
    ],
)
def test_override_is_the_same_as_an_edit(tmp_path: Path, override: str, path: str, value: object) -> None:
    loaded = load_run_file(written(tmp_path, MINIMAL), [override])
    assert loaded == run_from_dict(with_value(MINIMAL, path, value))


def test_the_last_override_holds() -> None:
    assert run_from_dict(MINIMAL, ["gradient_clipping=2", "gradient_clipping=3"]).clip_norm == 3
    assert run_from_dict(MINIMAL, ["gradient_clipping=auto"]).clip_norm == 0.5


def test_overrides_mend_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, with_value(MINIMAL, "megastable.training.total_steps", 5))
    assert load_run_file(path, ["megastable.training.total_samples=null"]).megastable.training.total_steps == 5


@pytest.mark.parametrize("override", ["gradient_clipping", "=3", "a..b=3", ".a=3", ""])
def test_override_without_a_path_or_value(override: str) -> None:
    (fault,) = faults_of(MINIMAL, [override])
    assert repr(override) in fault.message


def test_override_into_a_value() -> None:
    (fault,) = faults_of(MINIMAL, ["optimizer.params.lr.x=3"])
    assert fault.path == "optimizer.params.lr"
    assert "not a section" in fault.message


def test_override_faults_stand_beside_the_files(tmp_path: Path) -> None:
    text = refusal(written(tmp_path, with_value(MINIMAL, "wandb.enable", True)), ("oops", "train_batch_size=3"))
    assert "3 faults" in text


def test_the_dict_is_left_as_it_is() -> None:
    raw = with_value(MINIMAL, "wandb.group", None)
    before = repr(raw)
    run_from_dict(raw, ["wandb.group=x"])
    assert repr(raw) == before


def test_loading_needs_no_heavy_package() -> None:
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'deepspeed', 'numpy', 'transformers', 'datasets']))"
    )
    load = f"from megastable.config import load_run_file; load_run_file({str(RUN_FILES / 'quickstart.json')!r})"
    subprocess.run([sys.executable, "-c", f"{blocked}; {load}"], check=True, cwd=RUN_FILES.parent, timeout=60)
