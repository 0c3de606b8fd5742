"""What a family of `transformers` is: the switches of our model that its class can express, and whose tensor is whose.

Every tensor of theirs is made of rows of one of ours, in some order, and perhaps transposed: ``Part``. Fused
projections that they split, and heads that they lay out in another order, are other lists of rows. So one table says
both how to write our tensors as theirs and how to read theirs as ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megastable.core.families.model_settings import ModelSettings
from megastable.core.families.their_config import ReadModel, TheirConfig
from megastable.core.pieces import Shard, Span


@dataclass(frozen=True)
class Switch:
    """A key of the model section, and which of its values the family's class can express.

    Attributes:
        preset: what the family sets where the run file gives no value.
        others: further values that a run file may give; None for any.
    """

    preset: Any
    others: tuple[Any, ...] | None = ()

    def allows(self, value: Any) -> bool:
        """Tell whether the class can express ``value``."""
        return self.others is None or value == self.preset or value in self.others

    @property
    def legal(self) -> str:
        """Name the values that the class can express."""
        return " or ".join(_as_json(value) for value in (self.preset, *(self.others or ())))


def _as_json(value: Any) -> str:
    """Write a switch's value as a run file has it, a name without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Condition:
    """A demand of a family's class that no single value of ``key`` can express."""

    key: str
    holds: Callable[[ModelSettings], bool]
    demand: str
    """What the value must be, after "must": ``be num_attention_heads``."""


@dataclass(frozen=True)
class Contradiction:
    """A key of the model section that a family's class cannot express, its value and what it must be."""

    key: str
    value: Any
    demand: str

    def __str__(self) -> str:
        return f"{self.key} is {_as_json(self.value)} and must {self.demand}"


@dataclass(frozen=True)
class Part:
    """A tensor of theirs: rows of one of ours, in their order, transposed where the class keeps (in, out)."""

    name: str
    rows: tuple[Span, ...]
    transposed: bool = False


@dataclass(frozen=True)
class MappedTensor:
    """A whole tensor of ours, and the tensors of theirs that it is made of: each of its rows is in exactly one.

    Attributes:
        name: as a checkpoint names it, such as ``block_0.attention.output.weight``.
        shape: of the whole, without padding.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def shard_of(self, part: Part) -> Shard:
        """Return the rows of this tensor that ``part`` holds, before it is transposed."""
        return Shard(self.shape, 0, part.rows)

    def shape_of(self, part: Part) -> tuple[int, ...]:
        """Return the shape of the tensor of theirs."""
        shape = self.shard_of(part).shape
        return shape[::-1] if part.transposed else shape


@dataclass(frozen=True)
class Family:
    """A family of models, which a class of `transformers` computes as we do.

    Attributes:
        name: in a run file.
        model_type: in config.json.
        class_name: of the language model in `transformers`.
        base_prefix: with which its tensors' names begin; published files of the base model alone lack it.
        switches: key of the model section -> what the class can express of it; a key that is missing is free.
        conditions: further demands of the class.
        tensors: the table: model -> all of our tensors with theirs, a tied head left out.
        head_name: of their head's weight, which stands for the embedding's where they are tied.
        write_config: model -> config.json without its general keys, see ``config_of``.
        read_config: config.json -> our model section; raises ``UserError`` for what we cannot express.
        ignored: ends of names of their tensors that hold no weights.
    """

    name: str
    model_type: str
    class_name: str
    base_prefix: str
    switches: Mapping[str, Switch]
    tensors: Callable[[ModelSettings], Iterator[MappedTensor]]
    write_config: Callable[[ModelSettings], dict[str, Any]]
    read_config: Callable[[TheirConfig], ReadModel]
    head_name: str = "lm_head.weight"
    conditions: tuple[Condition, ...] = ()
    ignored: tuple[str, ...] = ()

    def contradictions(self, model: ModelSettings) -> list[Contradiction]:
        """List what of ``model`` the class cannot express; empty where it computes the same."""
        found = []
        for key, switch in self.switches.items():
            value = getattr(model, key)
            if not switch.allows(value):
                found.append(Contradiction(key, value, f"be {switch.legal}"))
        for condition in self.conditions:
            if not condition.holds(model):
                found.append(Contradiction(condition.key, getattr(model, condition.key), condition.demand))
        return found

    def presets(self) -> dict[str, Any]:
        """Return what the family sets where the run file gives no value."""
        return {key: switch.preset for key, switch in self.switches.items()}

    def aliases(self, model: ModelSettings) -> dict[str, str]:
        """Map each of their names that a file may hold a second time to that of the tensor it is the same as."""
        if not model.tie_embeddings:
            return {}
        embedding = next(self.tensors(model))
        return {self.head_name: embedding.parts[0].name}

    def config_of(self, model: ModelSettings) -> dict[str, Any]:
        """Return config.json, but for token ids and the number format, which are not the model's."""
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
            **self.write_config(model),
        }


ONE_KEY_A_QUERY = Condition(
    "num_key_value_heads",
    lambda model: model.kv_heads == model.num_attention_heads,
    "be num_attention_heads: the class has no grouped keys and values",
)
"""Of the classes that came before grouped-query attention."""

PLAIN = {
    "qk_norm": Switch(False),
    "attention_logit_cap": Switch(None),
    "output_logit_cap": Switch(None),
}
"""What none of the classes has."""
