"""Writes the model of a checkpoint as a folder that `transformers` loads: one tensor at a time, without an engine."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.core.errors import UserError
from megastable.core.families.family import Family, MappedTensor
from megastable.core.families.registry import FAMILIES, expressing_families, nearest_family
from megastable.core.flush import flush_to_disk
from megastable.engine.tensor_file import TensorEntry, write_tensor_stream
from megastable.interop.model_card import model_card
from megastable.interop.progress import Progress
from megastable.interop.saved_model import SavedModel, check_whole
from megastable.interop.shards import METADATA, shard_name, split_into_shards, write_index
from megastable.interop.tokenizer import check_tokenizer_fits, find_tokenizer, open_tokenizer
from megastable.interop.transforms import one_of_theirs
from megastable.interop.verification import check_same_logits, wants_verification

PARTIAL_SUFFIX = ".partial"
NUMBER_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name in a run file -> format of weights."""


@dataclass(frozen=True)
class ExportRequest:
    """What the command line asks for.

    Attributes:
        number_format: of the tensors; None for that of the run's weights.
        verify: compare the logits; None where the models fit into memory.
        tokenizer: a folder to take in place of the checkpoint's own.
    """

    out: Path
    number_format: str | None
    max_shard_bytes: int
    verify: bool | None
    tokenizer: Path | None


def export_model(saved: SavedModel, request: ExportRequest, progress: Progress) -> None:
    """Write the folder, compare its model with ours, and give it its name.

    Raises:
        UserError: no class expresses the model; ``out`` exists or cannot be written; the checkpoint is damaged or has
            no tokenizer; a weight is too large for the format.
        DifferentLogitsError: the exported model computes something else.
    """
    family = family_to_export(saved)
    number_format = request.number_format or saved.run.number_format
    if os.path.lexists(request.out):
        raise UserError(f"{request.out} exists already; name a new folder")
    _note_leftovers(request.out, progress)
    files = find_tokenizer(saved, request.tokenizer)
    tokenizer = open_tokenizer(files)
    check_tokenizer_fits(tokenizer, saved)
    check_whole(saved, progress)
    partial = request.out.with_name(f"{request.out.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        partial.mkdir(parents=True)
        weights = _write_weights(saved, family, number_format, request.max_shard_bytes, partial, progress)
        _write_beside(saved, family, number_format, weights, tokenizer, files, request.out.name, partial)
        if wants_verification(saved, request.verify, progress):
            check_same_logits(saved, partial, NUMBER_FORMATS[number_format], progress)
        flush_to_disk(*partial.iterdir(), partial)
        os.rename(partial, request.out)
    except OSError as error:
        raise UserError(f"{request.out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _note_leftovers(out: Path, progress: Progress) -> None:
    """Name unfinished folders of other exports; whether one still runs, perhaps on another host, nobody can tell."""
    for path in sorted(out.parent.glob(f"{glob.escape(out.name)}.*{PARTIAL_SUFFIX}")):
        progress.note(f"{path} is of an export that was killed, or still runs; where none runs, remove it")


def family_to_export(saved: SavedModel) -> Family:
    """Choose the class that expresses the model: the run file's own family, or the one that computes the same.

    Raises:
        UserError: there is none; the switches that are why are named.
    """
    model = saved.model
    if model.family is not None:
        return FAMILIES[model.family]
    families = expressing_families(model)
    if families:
        return families[0]
    nearest, contradictions = nearest_family(model)
    why = "; ".join(f"megastable.model.{contradiction}" for contradiction in contradictions)
    raise UserError(
        f"no class of transformers computes the model of {saved.checkpoint}. The nearest is {nearest.class_name} "
        f'("family": "{nearest.name}"), but {why}'
    )


def _write_weights(
    saved: SavedModel, family: Family, number_format: str, max_shard_bytes: int, folder: Path, progress: Progress
) -> int:
    """Write the tensors in shards with their index; returns the number of weights."""
    dtype = NUMBER_FORMATS[number_format]
    mapped = list(family.tensors(saved.model))
    unknown = saved.manifest.tensors.keys() - {tensor.name for tensor in mapped}
    if unknown:
        raise UserError(f"{saved.checkpoint} has tensors that {family.class_name} has no place for: {sorted(unknown)}")
    entries = [TensorEntry(part.name, dtype, tensor.shape_of(part)) for tensor in mapped for part in tensor.parts]
    total = sum(entry.num_bytes for entry in entries)
    tensors = _their_tensors(saved, mapped, dtype, progress.begin("writing the tensors", total))
    shards = split_into_shards(entries, max_shard_bytes)
    for index, shard in enumerate(shards):
        write_tensor_stream(folder / shard_name(index, len(shards)), shard, islice(tensors, len(shard)), METADATA)
    write_index(folder, shards)
    return total // dtype.itemsize


def _their_tensors(
    saved: SavedModel, mapped: list[MappedTensor], dtype: torch.dtype, advance: Callable[[int], None]
) -> Iterator[Tensor]:
    """Yield their tensors in the order of the table, with no more than one of ours in memory."""
    for tensor in mapped:
        ours = saved.tensor(tensor.name)
        if tuple(ours.shape) != tensor.shape:
            raise UserError(
                f"{saved.checkpoint}: {tensor.name} has the shape {list(ours.shape)}, and its run file asks for "
                f"{list(tensor.shape)}"
            )
        for part in tensor.parts:
            theirs = _rounded(one_of_theirs(ours, tensor, part), dtype, part.name)
            # Before, because after the last one nobody asks for more.
            advance(theirs.numel() * theirs.element_size())
            yield theirs


def _rounded(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Round to a format.

    Raises:
        UserError: a weight is no finite number in it.
    """
    rounded = tensor.to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        largest = float(tensor.abs().max())
        if largest < float("inf"):
            raise UserError(
                f"--dtype: {name} has a weight of size {largest:g}, too large for the format; legal are bf16 and fp32"
            )
        raise UserError(f"{name} has weights that are no finite numbers; export an earlier checkpoint")
    return rounded


def _write_beside(
    saved: SavedModel,
    family: Family,
    number_format: str,
    num_weights: int,
    tokenizer: Any,
    tokenizer_files: dict[str, bytes],
    title: str,
    folder: Path,
) -> None:
    """Write what lies beside the weights: config, generation config, tokenizer and model card."""
    end = tokenizer.eos_token_id
    ids = {"bos_token_id": _first_known(tokenizer.bos_token_id, end), "eos_token_id": end, "pad_token_id": None}
    transformers_version = {"transformers_version": version("transformers")}
    dtype_name = str(NUMBER_FORMATS[number_format]).removeprefix("torch.")  # as a config.json has it: float32
    config = {
        **family.config_of(saved.model), **ids, "use_cache": True, "dtype": dtype_name, "torch_dtype": dtype_name,
        **transformers_version,
    }  # fmt: skip
    generation = {key: value for key, value in ids.items() if value is not None} | transformers_version
    for name, content in tokenizer_files.items():
        (folder / name).write_bytes(content)
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    card = model_card(saved, family, number_format, num_weights, title)
    (folder / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")


def _first_known(first: int | None, second: int | None) -> int | None:
    return second if first is None else first
