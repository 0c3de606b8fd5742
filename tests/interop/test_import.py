"""What an import refuses, with one message and nothing written; what it writes, and what it says."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megastable.checkpoints.verify import verify
from megastable.config import load_run_file
from megastable.core.errors import UserError
from megastable.interop.their_files import TheirTensors
from tests.interop.moved_models import STEP_0, assert_same_tensors, exported, imported, save_theirs


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The folder of a small Llama."""
    save_theirs(tmp_path / "theirs", "llama")
    return tmp_path / "theirs"


def change_config(folder: Path, **values: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, added: dict[str, torch.Tensor], drop: str = "") -> None:
    """Drop a tensor from the weights, or add some."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(drop, None)
    save_file({**tensors, **added}, path, metadata={"format": "pt"})


def refused(tmp_path: Path, theirs: Path, *overrides: str) -> str:
    """Import what cannot be; return the message, after a look at what was left."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        imported(tmp_path, theirs, *overrides)
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert not [path for path in left if path.is_file()], left
    return str(error.value)


def test_what_is_written_is_whole_and_can_be_read(tmp_path: Path, theirs: Path) -> None:
    run = imported(tmp_path, theirs, "megastable.training.total_steps=7")
    assert verify(tmp_path / "run" / STEP_0) == []
    assert load_run_file(tmp_path / "run.json") == run
    assert run.megastable.training.total_steps == 7
    assert run.megastable.model.family == "llama"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.json", "theirs"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000000"]


def test_a_pickle_is_refused_by_name(tmp_path: Path, theirs: Path) -> None:
    (theirs / "model.safetensors").rename(theirs / "pytorch_model.bin")
    message = refused(tmp_path, theirs)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"tie_word_embeddings": True}, "is not equal to model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "has no place for: model.layers.1."),
        ({"vocab_size": 301}, "has the shape"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_is_not_of_the_weights_or_not_ours_is_refused(
    tmp_path: Path, theirs: Path, values: dict[str, Any], expected: str
) -> None:
    change_config(theirs, **values)
    assert expected in refused(tmp_path, theirs)


def test_tensors_that_are_missing_unknown_or_no_numbers_are_refused(tmp_path: Path, theirs: Path) -> None:
    weights = theirs / "model.safetensors"
    whole = weights.read_bytes()
    change_tensors(theirs, {}, drop="model.norm.weight")
    assert "no tensor model.norm.weight" in refused(tmp_path, theirs)
    weights.write_bytes(whole)
    change_tensors(theirs, {"model.extra.weight": torch.ones(2)})
    assert "no place for: model.extra.weight" in refused(tmp_path, theirs)
    weights.write_bytes(whole)
    change_tensors(theirs, {"model.norm.weight": torch.ones(48, dtype=torch.int64)})
    assert "legal are fp32, bf16 and fp16" in refused(tmp_path, theirs)
    weights.write_bytes(whole)
    change_tensors(theirs, {"model.norm.weight": torch.full((48,), torch.nan)})
    assert "no finite numbers" in refused(tmp_path, theirs)
    weights.write_bytes(whole[:1000])
    assert "model.safetensors cannot be read" in refused(tmp_path, theirs)


def test_each_tensor_is_read_once(tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, read = TheirTensors._read, []

    def counted(self: TheirTensors, place: tuple[str, str]) -> torch.Tensor:
        read.append(place)
        return honest(self, place)

    monkeypatch.setattr(TheirTensors, "_read", counted)
    imported(tmp_path, theirs)
    assert len(read) == len(set(read))


@pytest.mark.parametrize("weight_map", [{"x": "../model.safetensors"}, {"x": 3}, {}, [], None])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, theirs: Path, weight_map: Any) -> None:
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "must have a weight_map" in refused(tmp_path, theirs)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, theirs: Path) -> None:
    for path in theirs.glob("tokenizer*"):
        path.unlink()
    assert "megastable.data.tokenizer.path" in refused(tmp_path, theirs)


def test_what_is_no_folder_of_a_model_is_refused(tmp_path: Path) -> None:
    assert "hf download" in refused(tmp_path, tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "config.json does not exist" in refused(tmp_path, tmp_path / "empty")


def test_faults_of_overrides_are_listed_and_files_that_exist_stay(tmp_path: Path, theirs: Path) -> None:
    message = refused(tmp_path, theirs, "megastable.training.total_stepz=3", "megastable.model.hidden_size=-1")
    assert "total_stepz" in message
    assert "hidden_size" in message
    (tmp_path / "run.json").write_text("mine")
    assert "exists already" in refused(tmp_path, theirs)
    assert (tmp_path / "run.json").read_text() == "mine"


def test_shards_and_a_file_of_the_base_model_alone_are_read(tmp_path: Path) -> None:
    model = save_theirs(tmp_path / "theirs", "gpt2")
    whole = tmp_path / "theirs" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(whole).items()}
    # As published files of GPT-2 have it: a mask that is no weight, and no prefix.
    mask = {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    save_file({**tensors, **mask}, whole, metadata={"format": "pt"})
    imported(tmp_path, tmp_path / "theirs")
    model.save_pretrained(tmp_path / "sharded", max_shard_size=50_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    exported(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "sharded")
    for path in (tmp_path / "theirs").glob("tokenizer*"):
        path.rename(tmp_path / "sharded" / path.name)
    (tmp_path / "again").mkdir()
    imported(tmp_path / "again", tmp_path / "sharded")
    exported(tmp_path / "again" / "run", tmp_path / "again" / "out")
    assert_same_tensors(tmp_path / "again" / "out", tmp_path / "sharded")


def test_a_full_disk_is_one_message_and_leaves_nothing(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megastable.engine.tensor_file.os.write", write)
    assert "cannot be written: No space left on device" in refused(tmp_path, theirs)
