"""Tiny models that move: a folder of transformers, an import of it, and checkpoints that real engines write of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megastable.config import RunConfig, run_as_dict
from megastable.data.text_tokenizers import BytesTokenizer
from megastable.interop.export import ExportRequest, export_model
from megastable.interop.import_model import ImportRequest, import_model
from megastable.interop.saved_model import open_saved_model
from tests.interop.their_models import their_model

STEP_0 = Path("checkpoints") / "step_00000000"


class Notes:
    """A progress that remembers what was said, and how far each piece of work came."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}

    def begin(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a piece of work."""
        self.totals[what], self.done[what] = total, 0

        def advance(amount: int) -> None:
            self.done[what] += amount

        return advance

    def note(self, text: str) -> None:
        """Remember a line."""
        self.texts.append(text)


def save_theirs(folder: Path, family: str, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    """Save a random model as its class does, with a tokenizer of bytes beside it; returns the model."""
    theirs = their_model(family, **keys).to(dtype)
    theirs.save_pretrained(folder)
    BytesTokenizer().save(folder)
    return theirs


def imported(folder: Path, theirs: Path, *overrides: str) -> RunConfig:
    """Import a model to ``folder/run`` and ``folder/run.json``."""
    request = ImportRequest(theirs, folder / "run.json", folder / "run" / "checkpoints", None, None, list(overrides))
    return import_model(request, Notes())


def exported(model: Path, out: Path, notes: Notes | None = None, **wanted: Any) -> Path:
    """Export a run or a checkpoint, by default without the comparison of logits."""
    asked: dict[str, Any] = {"number_format": None, "max_shard_bytes": 10**9, "verify": False, "tokenizer": None}
    progress = notes or Notes()
    export_model(open_saved_model(model, progress.note), ExportRequest(out, **{**asked, **wanted}), progress)
    return out


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder's safetensors files."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    return found


def assert_same_tensors(found: Path, expected: Path) -> None:
    """Compare two folders of models, to the bit."""
    ours, theirs = tensors_in(found), tensors_in(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def resave(checkpoint: str, folder: str, overrides: list[str]) -> str:
    """Load a checkpoint into the engine of another layout, and save that; on every rank."""
    from tests.support.steps import build_engine, load, save_now

    saved = open_saved_model(Path(checkpoint), lambda text: None)
    run = _changed(saved.run, overrides)
    _, engine = build_engine(run)
    state = load(engine, Path(checkpoint))
    tokenizer = {name: (saved.checkpoint / name).read_bytes() for name in saved.manifest.tokenizer_files}
    return str(save_now(engine, Path(folder), state, run=run_as_dict(run), tokenizer=tokenizer))


def _changed(run: RunConfig, overrides: list[str]) -> RunConfig:
    from megastable.config import run_from_dict

    return run_from_dict(run_as_dict(run), overrides)
