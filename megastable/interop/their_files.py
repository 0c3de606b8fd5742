"""The folder of a model of `transformers`: its config.json, and its tensors one at a time. Data alone is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.checkpoints.json_file import object_in, text_in
from megastable.core.errors import UserError
from megastable.core.families.family import Family
from megastable.core.families.model_settings import ModelSettings
from megastable.engine.checkpoint_tensors import opened
from megastable.interop.shards import INDEX_NAME, WEIGHTS_NAME

CONFIG_NAME = "config.json"
MOST_BYTES = 2**28
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.ckpt.index", "tf_model.h5", "flax_model.msgpack")
"""Weights in other formats; the first two can run code."""
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name in a safetensors file -> torch's name."""


def read_their_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        UserError: the folder is none of a model, or the file is not a JSON object.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder; a model of the hub is fetched with: hf download NAME --local-dir FOLDER"
        )
    try:
        return object_in(text_in(folder / CONFIG_NAME, MOST_BYTES))
    except UserError as error:
        raise UserError(f"{folder} is no folder of a transformers model: {CONFIG_NAME} {error}") from error


class TheirTensors(Mapping[str, Tensor]):
    """The tensors in a folder's safetensors files, by the names of the class, each read when it is asked for.

    Raises:
        UserError: the folder has no such files, or they hold something else than the class has.
    """

    def __init__(self, folder: Path, family: Family, model: ModelSettings) -> None:
        self._folder = folder
        places = {_full_name(name, family): (file, name) for file, name in _names_in(folder)}
        aliases = family.aliases(model)
        self._places = {
            name: place for name, place in places.items() if name not in aliases and not name.endswith(family.ignored)
        }
        known = {part.name for mapped in family.tensors(model) for part in mapped.parts}
        unknown = sorted(self._places.keys() - known)
        if unknown:
            raise UserError(
                f"{folder} has tensors that {family.class_name} has no place for: {', '.join(unknown[:5])}"
                f"{f', and {len(unknown) - 5} more' if len(unknown) > 5 else ''}"
            )
        for name, original in aliases.items():
            self._check_alias(places, name, original)
        self.formats = {self._format_of(place) for place in self._places.values()}
        """Of the numbers, by torch's names."""

    def _check_alias(self, places: Mapping[str, tuple[str, str]], name: str, original: str) -> None:
        """Refuse a second copy of a tied tensor that is none."""
        if name in places and original in places and not torch.equal(self._read(places[name]), self[original]):
            raise UserError(
                f"{self._folder}: {name} is not equal to {original}, and {CONFIG_NAME} ties them "
                "(tie_word_embeddings); set that to false where the head has weights of its own"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _read(self, place: tuple[str, str]) -> Tensor:
        file_name, name = place
        with opened(self._folder / file_name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _format_of(self, place: tuple[str, str]) -> str:
        """Look a tensor's format up in the head of its file, without reading its numbers.

        Raises:
            UserError: it is none of floats that we read.
        """
        file_name, name = place
        with opened(self._folder / file_name) as file:
            found = file.get_slice(name).get_dtype()
        number_format = FLOATS.get(found)
        if number_format is None:
            raise UserError(f"{self._folder / file_name}: {name} is {found}; legal are fp32, bf16 and fp16")
        return number_format


def _full_name(name: str, family: Family) -> str:
    """Return the name in the class of a tensor, whose file may be one of the base model alone."""
    if name.startswith(family.base_prefix) or name == family.head_name:
        return name
    return family.base_prefix + name


def _names_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and the name of every tensor in the folder."""
    for file_name in _file_names(folder):
        with opened(folder / file_name) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                yield file_name, name


def _file_names(folder: Path) -> list[str]:
    if (folder / INDEX_NAME).exists():
        try:
            weight_map = object_in(text_in(folder / INDEX_NAME, MOST_BYTES)).get("weight_map")
        except UserError as error:
            raise UserError(f"{folder}: {INDEX_NAME} {error}") from error
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        # A path would lead out of the folder.
        if not names or not all(
            isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names
        ):
            raise UserError(f"{folder}: {INDEX_NAME} must have a weight_map from tensors to files of the folder")
        return sorted(names)
    if (folder / WEIGHTS_NAME).exists():
        return [WEIGHTS_NAME]
    others = [name for name in PICKLES if (folder / name).exists()]
    if others:
        raise UserError(
            f"{folder} has its weights as {others[0]}, a format that can run code or is not read here; legal is "
            f"{WEIGHTS_NAME}. Where you trust the file: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise UserError(f"{folder} has no {WEIGHTS_NAME} and no {INDEX_NAME}: there are no weights to read")
