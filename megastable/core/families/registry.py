"""The registry of the families, and the choice among them for a model or a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastable.core.families.bloom import BLOOM
from megastable.core.families.family import Contradiction, Family
from megastable.core.families.gpt2 import GPT2
from megastable.core.families.gpt_neox import GPT_NEOX
from megastable.core.families.llama import LLAMA
from megastable.core.families.model_settings import ModelSettings
from megastable.core.families.their_config import NotExpressibleError, ReadModel, TheirConfig

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, BLOOM, LLAMA, GPT_NEOX)}
"""Name in a run file -> family. To add one: a file with its definition, and its place in this line."""


def expressing_families(model: ModelSettings) -> list[Family]:
    """List the families whose class computes what ``model`` does."""
    return [family for family in FAMILIES.values() if not family.contradictions(model)]


def nearest_family(model: ModelSettings) -> tuple[Family, list[Contradiction]]:
    """Return the family that contradicts ``model`` in the fewest keys, and the contradictions.

    Of several the one with the model's positions: they change what its weights have learnt, the rest may be a detail.
    """

    def distance(pair: tuple[Family, list[Contradiction]]) -> tuple[int, bool]:
        keys = [contradiction.key for contradiction in pair[1]]
        return len(keys), "position_embedding" in keys

    return min(((family, family.contradictions(model)) for family in FAMILIES.values()), key=distance)


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Choose the family of a config.json.

    Raises:
        NotExpressibleError: it is of another type of model; the legal ones are listed.
    """
    kind = config.get("model_type")
    for family in FAMILIES.values():
        if family.model_type == kind:
            return family
    legal = ", ".join(family.model_type for family in FAMILIES.values())
    raise NotExpressibleError(f"config.json: model_type is {kind!r}: must be one of {legal}")


def read_config(config: Mapping[str, Any]) -> ReadModel:
    """Return the model section of a run file, its family included, that computes what a config.json asks for.

    Raises:
        NotExpressibleError: it asks for what we cannot compute; key, value and what is legal are named.
    """
    family = family_of_config(config)
    read = family.read_config(TheirConfig(config))
    # Rows that pad their vocabulary are rows of the model, and ours is padded beyond them where that is faster.
    return ReadModel({"family": family.name, **family.presets(), **read.section}, read.remarks)
