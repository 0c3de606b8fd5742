"""What a family of `transformers` is: the switches of our model that its class can express, and whose tensor is whose.

Every tensor of theirs is made of rows of one of ours, in some order, and perhaps transposed: ``Part``. Fused
projections that they split, and heads that they lay out in another order, are other lists of rows. So one table says
both how to write our tensors as theirs and how to read theirs as ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megastable.core.errors import UserError
from megastable.core.pieces import Shard, Span


class ModelSettings(Protocol):
    """The keys of a run file's model section that a family reads; ``config.ModelConfig`` has them all."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def position_embedding(self) -> str: ...
    @property
    def rotary_base(self) -> float: ...
    @property
    def rotary_fraction(self) -> float: ...
    @property
    def norm(self) -> str: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def activation(self) -> str: ...
    @property
    def linear_biases(self) -> bool: ...
    @property
    def parallel_residual(self) -> bool: ...
    @property
    def embedding_norm(self) -> bool: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def dropout(self) -> float: ...


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
    """Write a switch's value as a run file has it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


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
class ReadModel:
    """The model section that a config.json asks for, and what of the file it leaves out, one sentence each."""

    section: dict[str, Any]
    remarks: tuple[str, ...] = ()


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


class NotExpressibleError(UserError):
    """A config.json asks for what our model cannot compute."""


@dataclass(frozen=True)
class TheirConfig:
    """A config.json under reading, which remembers no state: every method names the key that it refuses."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a whole number from 1, under the first of its ``names`` that is there."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refused(name, value, "must be a whole number from 1")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number, under the first of its ``names`` that is there."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(name, value, "must be a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise _refused(name, value, "must be true or false")
        return value

    def chosen(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return our name of the value, which has to be among the ``choices``."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise _refused(name, value, f"must be {' or '.join(choices)}; nothing else is built here")
        return choices[value]

    def must_be(self, name: str, expected: Any) -> None:
        """Refuse any value but ``expected``, which is what the class takes a missing key for."""
        value = self.values.get(name, expected)
        if value != expected:
            raise _refused(name, value, f"must be {_as_json(expected)}; nothing else is built here")

    def one_dropout(self, *names: str, default: float) -> tuple[float, tuple[str, ...]]:
        """Return the one share of values that all of ``names`` drop, with a remark where there is no such share."""
        shares = {name: self.number(name, default=default) for name in names}
        if len(set(shares.values())) == 1:
            return shares[names[0]], ()
        listed = ", ".join(f"{name} {share}" for name, share in shares.items())
        return 0.0, (f"dropout is one number here, and config.json has several ({listed}): it is off",)

    def rotary(self, fraction: float) -> tuple[float, float]:
        """Return base and share of the turned channels; refuse angles that are scaled.

        Args:
            fraction: of a config.json that gives none.
        """
        # transformers 5 has one object, the versions before it a key for each value.
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise _refused("rope_parameters", given, "must be an object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise _refused("rope_parameters.rope_type", kind, "must be default; scaled angles are not built here")
        parameters = TheirConfig({**self.values, **given})
        base = parameters.number("rope_theta", "rotary_emb_base", default=10000.0)
        return base, parameters.number("partial_rotary_factor", "rotary_pct", default=fraction)

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is None:
            raise NotExpressibleError(f"config.json: {names[0]} is missing")
        return names[0], default


def _refused(name: str, value: Any, legal: str) -> NotExpressibleError:
    return NotExpressibleError(f"config.json: {name} is {value!r}: {legal}")


def same(name: str, shape: tuple[int, ...], theirs: str, transposed: bool = False) -> MappedTensor:
    """Map one tensor of ours to one of theirs, row by row."""
    return MappedTensor(name, shape, (Part(theirs, ((0, shape[0]),), transposed),))


def linear(
    ours: str, theirs: str, out_features: int, in_features: int, biases: bool = True, transposed: bool = False
) -> Iterator[MappedTensor]:
    """Yield weight and bias of a linear layer.

    Args:
        transposed: the class keeps the weight as (in, out).
    """
    yield same(f"{ours}.weight", (out_features, in_features), f"{theirs}.weight", transposed)
    if biases:
        yield same(f"{ours}.bias", (out_features,), f"{theirs}.bias")


def layer_norm(ours: str, theirs: str, width: int, has_bias: bool = True) -> Iterator[MappedTensor]:
    """Yield scale and bias of a norm."""
    yield same(f"{ours}.weight", (width,), f"{theirs}.weight")
    if has_bias:
        yield same(f"{ours}.bias", (width,), f"{theirs}.bias")


@dataclass(frozen=True)
class FusedRows:
    """Rows of our fused projection: for each key-value head its query heads, then its key, then its value."""

    kv_heads: int
    queries_per_kv_head: int
    head_dim: int

    @classmethod
    def of(cls, model: ModelSettings) -> FusedRows:
        """Lay the rows out for a model."""
        return cls(model.kv_heads, model.num_attention_heads // model.kv_heads, model.head_dim)

    @property
    def total(self) -> int:
        """Return the number of rows."""
        return self.kv_heads * (self.queries_per_kv_head + 2) * self.head_dim

    @property
    def queries(self) -> tuple[Span, ...]:
        """Return the rows of all queries, head by head."""
        return self._of_each_head(0, self.queries_per_kv_head)

    @property
    def keys(self) -> tuple[Span, ...]:
        """Return the rows of all keys."""
        return self._of_each_head(self.queries_per_kv_head, self.queries_per_kv_head + 1)

    @property
    def values(self) -> tuple[Span, ...]:
        """Return the rows of all values."""
        return self._of_each_head(self.queries_per_kv_head + 1, self.queries_per_kv_head + 2)

    def _of_each_head(self, first: int, stop: int) -> tuple[Span, ...]:
        starts = range(0, self.total, (self.queries_per_kv_head + 2) * self.head_dim)
        return tuple((start + first * self.head_dim, start + stop * self.head_dim) for start in starts)


ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
}
"""Their name of an activation -> ours; the first of each is the one that is written."""


def their_activation(ours: str) -> str:
    """Return the name in config.json of one of our activations."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


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
