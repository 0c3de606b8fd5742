"""Reads a model of `transformers` as a run file and a checkpoint of step 0, from which any layout trains on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.checkpoints.folder import PARTIAL_SUFFIX, folder_name, publish
from megastable.checkpoints.manifest import (
    NO_CORPUS,
    LayoutRecord,
    Manifest,
    PieceRecord,
    StateRecord,
    TensorRecord,
    recorded_versions,
    write_manifest,
)
from megastable.checkpoints.tokenizer_files import read_tokenizer_files, write_tokenizer_files
from megastable.config import RunConfig, TransformersTokenizerConfig, run_as_dict, run_from_dict
from megastable.config.reading.run_file import apply_overrides
from megastable.core.errors import UserError
from megastable.core.families.family import Family, MappedTensor
from megastable.core.families.registry import FAMILIES, read_config
from megastable.core.families.their_config import NotExpressibleError
from megastable.core.records import FRESH
from megastable.data.text_tokenizers import make_tokenizer
from megastable.engine.checkpoint_tensors import KINDS, MASTER, file_name, tensor_key
from megastable.engine.tensor_file import TensorEntry, write_tensor_stream
from megastable.interop.progress import Progress
from megastable.interop.their_files import TheirTensors, read_their_config
from megastable.interop.transforms import to_ours

FILE_NAME = file_name(rank=0)
"""As one process would have written it."""
SIXTEEN_BIT = {"bfloat16", "float16"}


@dataclass(frozen=True)
class ImportRequest:
    """What the command line asks for.

    Attributes:
        run_file: to be written.
        checkpoints: of the run folder, to which the checkpoint goes.
        text: text files to train on; None for the standard library, to try things out.
        tokenizer: its folder; None for that of the model.
        overrides: keys of the run file, as ``--set`` has them.
    """

    folder: Path
    run_file: Path
    checkpoints: Path
    text: str | None
    tokenizer: Path | None
    overrides: list[str]


def import_model(request: ImportRequest, progress: Progress) -> RunConfig:
    """Write both, the run file last.

    Returns:
        The run of the file.

    Raises:
        UserError: the folder is none of a model that we compute; a file exists or cannot be written.
    """
    if os.path.lexists(request.run_file):
        raise UserError(f"{request.run_file} exists already; name a new file")
    config = read_their_config(request.folder)
    try:
        read = read_config(config)
    except NotExpressibleError as error:
        raise UserError(f"{request.folder}: {error}") from error
    for remark in read.remarks:
        progress.note(f"{request.folder}: {remark}")
    family = FAMILIES[read.section["family"]]
    section = {**read.section, "dropout": 0.0}
    if read.section.get("dropout", 0.0) > 0:
        progress.note(
            f"{request.folder}: config.json has a dropout of {read.section['dropout']:g}; the run file has none, as "
            f"pre-training does without. To keep it: --set megastable.model.dropout={read.section['dropout']:g}"
        )
    raw = _run_file(request, family, section)
    # Faults of overrides are found, and listed with all others, by the check.
    run = run_from_dict(raw, request.overrides, source=str(request.run_file))
    theirs = TheirTensors(request.folder, family, run.megastable.model)
    if theirs.formats & SIXTEEN_BIT:
        # The masters hold the values exactly. bf16 takes fp16's without overflow, and needs no loss scale.
        raw["bf16"] = {"enabled": True}
        run = run_from_dict(raw, request.overrides, source=str(request.run_file))
    apply_overrides(raw, request.overrides)
    try:
        _write(request, raw, run, theirs, progress)
    except OSError as error:
        raise UserError(f"{error.filename or request.run_file} cannot be written: {error.strerror or error}") from error
    return run


def _run_file(request: ImportRequest, family: Family, section: Mapping[str, Any]) -> dict[str, Any]:
    """Write the run file as a person would: what the family sets by itself is left out."""
    presets = family.presets()
    model = {key: value for key, value in section.items() if key not in presets or value != presets[key]}
    source = {"type": "stdlib"} if request.text is None else {"type": "text", "path": request.text}
    tokenizer = request.tokenizer or request.folder
    return {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "megastable": {
            "model": model,
            "batch_rampup": {"final": 8},
            "lr_schedule": {"type": "cosine", "warmup": {"fraction": 0.05}, "min_lr": 1e-5},
            "data": {
                "source": source,
                "tokenizer": {"type": "transformers", "path": os.path.abspath(tokenizer)},
            },
            "training": {"total_steps": 100},
        },
    }


def _write(
    request: ImportRequest, raw: dict[str, Any], run: RunConfig, theirs: TheirTensors, progress: Progress
) -> None:
    final = request.checkpoints / folder_name(FRESH.step)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    unfinished = request.run_file.with_name(f"{request.run_file.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        # First, because it costs nothing to find out that it cannot be written.
        unfinished.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        tokenizer = _tokenizer_files(run)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_checkpoint(partial, run, theirs, tokenizer, progress)
        publish(partial, final)
        os.replace(unfinished, request.run_file)
    finally:
        unfinished.unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)


def _tokenizer_files(run: RunConfig) -> dict[str, bytes]:
    """Open the tokenizer as the run will, and return its files.

    Raises:
        UserError: there is none, it cannot end a document, or it does not fit the model.
    """
    spec = run.megastable.data.tokenizer
    if not isinstance(spec, TransformersTokenizerConfig):
        return {}  # a run that trains one of its own; the embedding has to learn it
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(spec, run.megastable.model, []).save(Path(folder))
        return read_tokenizer_files(Path(folder))


def _write_checkpoint(
    folder: Path, run: RunConfig, theirs: TheirTensors, tokenizer: Mapping[str, bytes], progress: Progress
) -> None:
    model = run.megastable.model
    assert model.family is not None
    mapped = list(FAMILIES[model.family].tensors(model))
    entries = [
        TensorEntry(tensor_key(kind, tensor.name), torch.float32, (_num_elements(tensor),))
        for tensor in mapped
        for kind in KINDS
    ]
    advance = progress.begin("writing the checkpoint", sum(entry.num_bytes for entry in entries))
    record = write_tensor_stream(folder / FILE_NAME, entries, _our_tensors(theirs, mapped, advance))
    manifest = Manifest(
        state=StateRecord.of(FRESH),
        layout=LayoutRecord(num_stages=1, data_parallel_size=1, tensor_parallel_size=1),
        run=run_as_dict(run),
        corpus_fingerprint=NO_CORPUS,
        versions=recorded_versions(),
        # Or it would warn that the first loss is not ln(vocabulary).
        monitors={"first_loss": {"weights_are_fresh": False}},
        loss_scaler=None,
        optimizer_steps=0,
        loss=None,
        eval_loss=None,
        files={FILE_NAME: record, **write_tokenizer_files(folder, tokenizer)},
        tensors={tensor.name: _tensor_record(tensor) for tensor in mapped},
    )
    write_manifest(manifest, folder)


def _num_elements(tensor: MappedTensor) -> int:
    return int(torch.Size(tensor.shape).numel())


def _tensor_record(tensor: MappedTensor) -> TensorRecord:
    piece = PieceRecord(file=FILE_NAME, dim=0, ranges=((0, tensor.shape[0]),), start=0, stop=_num_elements(tensor))
    return TensorRecord(shape=tensor.shape, pieces=(piece,))


def _our_tensors(theirs: TheirTensors, mapped: list[MappedTensor], advance: Callable[[int], None]) -> Iterator[Tensor]:
    """Yield weight and zero moments of each of our tensors, with no more than one of them in memory."""
    for tensor in mapped:
        weights = to_ours(theirs, tensor).float().view(-1)
        if not bool(torch.isfinite(weights).all()):
            raise UserError(f"{tensor.name} has weights that are no finite numbers")
        for kind in KINDS:
            values = weights if kind == MASTER else torch.zeros_like(weights)
            advance(values.numel() * values.element_size())
            yield values
