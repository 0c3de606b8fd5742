"""An exported folder: what is in it, what it proves of itself, and what is refused with nothing left behind."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megastable.config import DataConfig
from megastable.core.errors import UserError
from megastable.engine.tensor_file import TensorEntry
from megastable.interop import export, held_out_text
from megastable.interop.saved_model import SavedModel, open_saved_model
from megastable.interop.shards import parse_size, split_into_shards
from megastable.interop.transforms import one_of_theirs
from megastable.interop.verification import DifferentLogitsError
from tests.data.data_examples import text_data
from tests.data.test_indexed_source import DOCUMENTS, prepared, write_pair
from tests.interop.moved_models import (
    STEP_0,
    Notes,
    assert_same_tensors,
    exported,
    imported,
    save_theirs,
    tensors_in,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied GPT-2 of transformers, and a run that it was imported to."""
    made = tmp_path_factory.mktemp("gpt2")
    save_theirs(made / "theirs", "gpt2")
    imported(made, made / "theirs")
    return made


def test_the_folder_is_opened_by_transformers_alone(folder: Path, tmp_path: Path) -> None:
    out = exported(folder / "run", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id == 256
    text = "Grüße\r\n\tx"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = torch.tensor([tokenizer.encode(text)])
    expected = AutoModelForCausalLM.from_pretrained(folder / "theirs")(ids).logits
    assert torch.equal(model(ids).logits, expected)


def test_a_tied_head_and_the_padding_of_the_vocabulary_are_not_in_the_files(folder: Path, tmp_path: Path) -> None:
    tensors = tensors_in(exported(folder / "run", tmp_path / "out"))
    assert "lm_head.weight" not in tensors
    assert tensors["transformer.wte.weight"].shape == (300, 48)


def test_shards_and_their_index_are_as_transformers_writes_them(folder: Path, tmp_path: Path) -> None:
    out = exported(folder / "run", tmp_path / "out", max_shard_bytes=60_000)
    assert_same_tensors(out, folder / "theirs")
    model = AutoModelForCausalLM.from_pretrained(folder / "theirs")
    model.save_pretrained(tmp_path / "expected", max_shard_size=60_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    expected = json.loads((tmp_path / "expected" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == expected["metadata"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    for name, file_name in index["weight_map"].items():
        with safe_open(out / file_name, framework="pt") as file:
            assert name in file.keys()  # noqa: SIM118 - it is no dictionary
            assert file.metadata() == {"format": "pt"}
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 70_000


def test_the_card_has_the_facts_of_the_run(folder: Path, tmp_path: Path) -> None:
    card = (exported(folder / "run", tmp_path / "out") / "README.md").read_text()
    for fact in ("GPT2LMHeadModel", "| step | 0 |", '"family": "gpt2"', "library_name: transformers", "stdlib"):
        assert fact in card


@pytest.mark.parametrize(("number_format", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_sixteen_bits_are_compared_as_they_were_rounded(
    folder: Path, tmp_path: Path, number_format: str, dtype: torch.dtype
) -> None:
    notes = Notes()
    out = exported(folder / "run", tmp_path / "out", notes, number_format=number_format, verify=True)
    theirs = tensors_in(folder / "theirs")
    for name, tensor in tensors_in(out).items():
        assert torch.equal(tensor, theirs[name].to(dtype))
    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype
    assert any("verified" in text for text in notes.texts)


def flipped_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one tensor be written upside down."""
    honest = one_of_theirs

    def broken(ours: torch.Tensor, mapped: Any, part: Any) -> torch.Tensor:
        tensor = honest(ours, mapped, part)
        return tensor.flip(0) if part.name == "transformer.h.1.attn.c_attn.weight" else tensor

    monkeypatch.setattr(export, "one_of_theirs", broken)


def wrong_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let config.json have another epsilon than the norms."""
    honest = export._write_beside

    def broken(*arguments: Any) -> None:
        honest(*arguments)
        path = arguments[-1] / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "layer_norm_epsilon": 1e-2}))

    monkeypatch.setattr(export, "_write_beside", broken)


@pytest.mark.parametrize("break_it", [flipped_tensor, wrong_config])
def test_a_model_that_computes_something_else_is_an_error_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_it(monkeypatch)
    with pytest.raises(DifferentLogitsError, match="computes something else: largest difference") as error:
        exported(folder / "run", tmp_path / "out", verify=True)
    assert error.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_by_default_the_logits_are_compared_where_both_models_fit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    exported(folder / "run", tmp_path / "small", notes, verify=None)
    assert notes.texts[-1].startswith("verified: ")
    free = SimpleNamespace(available=2**18)
    monkeypatch.setattr("megastable.interop.verification.psutil.virtual_memory", lambda: free)
    exported(folder / "run", tmp_path / "large", notes, verify=None)
    assert notes.texts[-1].startswith("not verified: both models would take about")


def test_the_text_is_said_to_be_random_where_the_validation_documents_are_not_here(folder: Path) -> None:
    saved = open_saved_model(folder / "run", lambda text: None)
    text = held_out_text.held_out_text(saved)
    assert "random tokens" in text.name
    assert text.token_ids.shape == (2, 16)
    assert int(text.token_ids.max()) < 300


def trained_on(saved: SavedModel, data: DataConfig, fingerprint: str) -> SavedModel:
    """Say of a checkpoint that it was trained on a corpus."""
    sections = saved.run.megastable.model_copy(update={"data": data})
    return SavedModel(
        saved.checkpoint,
        saved.manifest.model_copy(update={"corpus_fingerprint": fingerprint}),
        saved.run.model_copy(update={"megastable": sections}),
    )


def test_the_validation_documents_of_a_pair_are_found_until_it_changes(folder: Path, tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    corpus = prepared(pair, tmp_path / "cache", validation_fraction=0.5)
    source = {"type": "indexed", "path": str(pair)}
    data = text_data(pair, tmp_path / "cache", source=source, validation_fraction=0.5)
    saved = trained_on(open_saved_model(folder / "run", lambda text: None), data, corpus.fingerprint)
    text = held_out_text.held_out_text(saved)
    assert "tokens of the validation documents" in text.name
    assert text.token_ids.flatten().tolist() == corpus.validation.tokens[:32].tolist()
    later = (tmp_path / "pair.bin").stat().st_mtime + 60
    os.utime(tmp_path / "pair.bin", (later, later))
    assert "random tokens" in held_out_text.held_out_text(saved).name
    (tmp_path / "pair.bin").unlink()
    assert "random tokens" in held_out_text.held_out_text(saved).name


def test_of_a_blend_it_is_said_that_no_documents_are_looked_up(folder: Path, tmp_path: Path) -> None:
    part = {"name": "a", "weight": 1.0, "source": {"type": "stdlib"}}
    data = text_data(tmp_path, tmp_path / "cache", source={"type": "blend", "sources": (part,)})
    saved = trained_on(open_saved_model(folder / "run", lambda text: None), data, "blended")
    assert "random tokens (of a blend of sources" in held_out_text.held_out_text(saved).name


def test_what_a_killed_export_has_left_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out[1].7.partial").mkdir()
    (tmp_path / "other.7.partial").mkdir()
    notes = Notes()
    exported(folder / "run", tmp_path / "out[1]", notes)
    assert [text for text in notes.texts if "killed" in text] == [
        f"{tmp_path / 'out[1].7.partial'} is of an export that was killed, or still runs; where none runs, remove it"
    ]


def test_what_exists_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        exported(folder / "run", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_that_no_class_computes_is_refused_by_its_switch(tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "llama")
    imported(tmp_path, tmp_path / "theirs")
    saved = open_saved_model(tmp_path / "run", lambda text: None)
    model = saved.model.model_copy(update={"family": None, "qk_norm": True})
    sections = saved.run.megastable.model_copy(update={"model": model})
    changed = type(saved)(saved.checkpoint, saved.manifest, saved.run.model_copy(update={"megastable": sections}))
    with pytest.raises(UserError, match=r"LlamaForCausalLM .*megastable\.model\.qk_norm is true and must be false"):
        export.family_to_export(changed)


def test_a_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "gpt2")
    imported(tmp_path, tmp_path / "theirs")
    path = tmp_path / "run" / STEP_0 / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="its content has changed"):
        exported(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("written_bytes", [0, 100_000])
def test_a_full_disk_is_one_message_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int
) -> None:
    honest, left = os.write, [written_bytes]

    def write(descriptor: int, data: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return honest(descriptor, data)

    monkeypatch.setattr("megastable.engine.tensor_file.os.write", write)
    with pytest.raises(UserError, match=r"out cannot be written: No space left on device"):
        exported(folder / "run", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_the_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", "llama")
    with torch.no_grad():
        theirs.model.norm.weight[0] = 1e6
    theirs.save_pretrained(tmp_path / "theirs")
    imported(tmp_path, tmp_path / "theirs")
    with pytest.raises(UserError, match=r"--dtype: model\.norm\.weight has a weight of size 1e\+06"):
        exported(tmp_path / "run", tmp_path / "out", number_format="fp16")
    exported(tmp_path / "run", tmp_path / "out", number_format="bf16")


def test_a_checkpoint_without_a_tokenizer_takes_one_that_is_named(folder: Path, tmp_path: Path) -> None:
    saved = open_saved_model(folder / "run", lambda text: None)
    bare = saved.manifest.model_copy(
        update={"files": {name: file for name, file in saved.manifest.files.items() if name.endswith(".safetensors")}}
    )
    without = type(saved)(saved.checkpoint, bare, saved.run)
    request = export.ExportRequest(tmp_path / "out", None, 10**9, False, None)
    with pytest.raises(UserError, match="with --tokenizer"):
        export.export_model(without, request, Notes())
    named = export.ExportRequest(tmp_path / "out", None, 10**9, False, folder / "theirs")
    export.export_model(without, named, Notes())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("ab") == [97, 98]
    # Beside the tokenizer, the named folder has the weights of a model.
    assert_same_tensors(tmp_path / "out", folder / "theirs")


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("7", 7), ("1KiB", 1024)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-1GB", "1.5GB", "5XB", "0MB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--max-shard-size .*: must be a whole number of a unit"):
        parse_size(text)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own() -> None:
    entries = [TensorEntry(str(size), torch.uint8, (size,)) for size in (4, 4, 30, 4, 4, 4)]
    shards = split_into_shards(entries, 10)
    assert [[entry.num_bytes for entry in shard] for shard in shards] == [[4, 4], [30], [4, 4], [4]]
