"""A toy entry of every registry of CONTRIBUTING's table, as somebody would add it: a definition and its line.

``add`` changes the registries of its process for good, so it is called in processes that end with the run that needs
the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from megastable.config import Fault, ModelConfig, load_run_file
from megastable.config.data import SourceSection, TokenizerSection
from megastable.config.reading import checking
from megastable.config.rules import RULES, Rule
from megastable.core.devices import DEVICES, Device
from megastable.core.families.llama import LLAMA
from megastable.core.families.registry import FAMILIES
from megastable.core.layers import FlatLayer
from megastable.core.lr_schedule import LR_SCHEDULES, DecaySchedule
from megastable.core.model_parts import FEED_FORWARD_KINDS
from megastable.core.partition import PARTITIONS
from megastable.core.pieces import Shard
from megastable.data.sources import SOURCES, SourceKind
from megastable.data.text_tokenizers import TOKENIZERS
from megastable.model.block import FEED_FORWARDS
from megastable.model.tensor_parallel import (
    RowParallelLinear,
    SplitLayer,
    TensorGroup,
    column_parallel_linear,
)
from megastable.monitors import MONITORS
from megastable.planning.preflight import preflight
from megastable.planning.preflight.review import Finding, Review
from megastable.planning.run_plan import RunPlan
from tests.support import toy_parts
from tests.support.toy_monitor import METRIC, LearningRateProgress
from tests.support.toy_source import CountingDocuments, rebuild_schema
from tests.support.toy_tokenizer import LengthsKind

TOY = "toy"


@dataclass(frozen=True)
class ToyEntry:
    """What is added, and the run that uses it.

    Attributes:
        add: adds the entry in this process.
        keys: keys of the run file by their path, with dots; None removes a key.
        layout: stages and tensor ranks; the run has as many processes.
        plan_options: options of ``megastable plan`` beside the run file.
        check_says: a part of what ``megastable check`` prints.
        plan_says: a part of what ``megastable plan`` prints.
        metric: a number that every step has in metrics.jsonl.
        look: asserts on the plan of the run.
    """

    add: Callable[[], None]
    keys: dict[str, Any] = field(default_factory=dict)
    layout: tuple[int, int] = (1, 1)
    plan_options: tuple[str, ...] = ()
    check_says: str = ""
    plan_says: str = ""
    metric: str = "loss"
    look: Callable[[RunPlan], None] = lambda plan: None

    @property
    def refused_with(self) -> str:
        """Return the key that names the entry, or of a section with a type the section."""
        return list(self.keys)[-1]

    @property
    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return self.layout[0] * self.layout[1]


# What core has alone


@dataclass(frozen=True)
class HalfOfALine(DecaySchedule):
    """Falls along a straight line to half of the way, and there at once to the end."""

    def share_left(self, samples: int) -> float:
        """Return 1 to 0.5 along a line."""
        return 1.0 - 0.5 * self.progress(samples, self.warmup_samples)


def add_lr_schedule() -> None:
    """Add the schedule."""
    LR_SCHEDULES[TOY] = HalfOfALine


def falls_along_half_a_line(plan: RunPlan) -> None:
    """Assert that the plan's learning rates are those of the toy."""
    assert isinstance(plan.lr_schedule, HalfOfALine)


def add_device() -> None:
    """Add a slow device with little memory."""
    DEVICES["TOY"] = Device(name="TOY", peak_tflops=dict.fromkeys(("fp32", "bf16", "fp16"), 0.5), memory_gib=3.0)


def one_block_first(layers: Sequence[FlatLayer], num_stages: int) -> tuple[int, ...]:
    """Give every stage but the last one block; the first also has what is before the blocks."""
    return (0, *range(3, 2 + num_stages), len(layers))


def add_partition() -> None:
    """Add the way to cut."""
    PARTITIONS[TOY] = one_block_first


def first_stage_has_one_block(plan: RunPlan) -> None:
    """Assert that the stages are those of the toy."""
    assert [stage.num_blocks for stage in plan.cut.stages] == [1, 3]


# Rules


def layers_are_not_unlucky(model: ModelConfig) -> Iterator[Fault]:
    """Refuse 13 layers."""
    if model.num_layers == 13:
        yield Fault("megastable.model.num_layers", 13, "must not be 13")


def add_rule() -> None:
    """Add the rule of a run file."""
    checking.RULES = (*RULES, Rule(layers_are_not_unlucky))  # type: ignore[attr-defined]  # read there


def seed_is_seven(review: Review) -> Iterator[Finding]:
    """Note a popular seed."""
    if review.run.megastable.training.seed == 7:
        yield Finding("note", "megastable.training.seed", "everybody takes 7", "another number")


def add_review_rule() -> None:
    """Add the rule of the review."""
    preflight.RULES = (*preflight.RULES, seed_is_seven)


# Parts of the model, text and monitors


class ToySplitLinear(SplitLayer):
    """A linear layer of a class of its own, whose output features are split."""

    def __init__(self, shard: Shard, tensor: TensorGroup) -> None:
        super().__init__(shard, tensor)
        self.bias = nn.Parameter(self.weight.new_zeros(shard.shape[0]))

    def parameter_shards(self) -> dict[nn.Parameter, Shard]:
        """Say which part is the rank's of both."""
        return {self.weight: self.shard, self.bias: self.shard.of_rows}

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, in) to (batch, seq, share of out)."""
        return column_parallel_linear(x, self.weight, self.bias, self.tensor)


class ToySplitFeedForward(nn.Module):
    """GELU between a toy layer and a row-parallel one."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        shard = Shard.even((config.ffn_size, config.hidden_size), 0, tensor.size, tensor.rank)
        self.input = ToySplitLinear(shard, tensor)
        self.output = RowParallelLinear(config.ffn_size, config.hidden_size, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        return self.output(F.gelu(self.input(x), approximate="tanh"))


def add_split_layer() -> None:
    """Add a feed-forward that has the layer."""
    FEED_FORWARD_KINDS[TOY] = replace(FEED_FORWARD_KINDS["gelu"])
    FEED_FORWARDS[TOY] = ToySplitFeedForward


def add_source() -> None:
    """Define the section, and add the source that it opens."""

    class AddedSourceConfig(SourceSection):
        """Numbers, one document each."""

        type: Literal["counting"]
        num_documents: int
        size_is_known: bool = True

    SOURCES["counting"] = SourceKind(CountingDocuments)
    rebuild_schema()


def add_tokenizer() -> None:
    """Define the section, and add the tokenizer that it makes."""

    class AddedTokenizerConfig(TokenizerSection):
        """The lengths of words."""

        type: Literal["lengths"]
        longest: int = 20

    TOKENIZERS["lengths"] = LengthsKind()
    rebuild_schema()


def add_monitor() -> None:
    """Add the monitor."""
    MONITORS[TOY] = LearningRateProgress


def add_family() -> None:
    """Add a family with the switches of another one."""
    FAMILIES[TOY] = replace(LLAMA, name=TOY, model_type=TOY)


def has_the_switches_of_llama(plan: RunPlan) -> None:
    model = plan.run.megastable.model
    assert (model.norm, model.activation, model.linear_biases) == ("rmsnorm", "swiglu", False)


TOY_ENTRIES: dict[str, ToyEntry] = {
    "LR schedule": ToyEntry(add_lr_schedule, {"megastable.lr_schedule.type": TOY}, look=falls_along_half_a_line),
    "init scheme": ToyEntry(toy_parts.register, {"megastable.init.scheme": TOY}),
    "device": ToyEntry(
        add_device,
        {
            "train_micro_batch_size_per_gpu": None,
            "megastable.batch_rampup.micro_batch_size": "auto",
            "megastable.batch_rampup.calibration": TOY,
        },
        plan_options=("--device", TOY),
        check_says="chosen by toy",
        plan_says="0.5 TFLOPs of TOY",
    ),
    "way to cut": ToyEntry(
        add_partition, {"megastable.pipeline.partition": TOY}, layout=(2, 1), look=first_stage_has_one_block
    ),
    "rule of a run file": ToyEntry(add_rule),
    "rule of the review": ToyEntry(add_review_rule, check_says="everybody takes 7"),
    "monitor": ToyEntry(add_monitor, metric=METRIC),
    "text source": ToyEntry(add_source, {"megastable.data.source": {"type": "counting", "num_documents": 60}}),
    "tokenizer": ToyEntry(add_tokenizer, {"megastable.data.tokenizer": {"type": "lengths"}}),
    "feed-forward": ToyEntry(toy_parts.register, {"megastable.model.activation": TOY}),
    "norm": ToyEntry(toy_parts.register, {"megastable.model.norm": TOY}),
    "position embedding": ToyEntry(toy_parts.register, {"megastable.model.position_embedding": TOY}),
    "family of `transformers`": ToyEntry(add_family, {"megastable.model.family": TOY}, look=has_the_switches_of_llama),
    "attention backend": ToyEntry(toy_parts.register, {"megastable.model.attention": TOY}),
    "split layer": ToyEntry(add_split_layer, {"megastable.model.activation": TOY}, layout=(1, 2)),
}
"""What is added -> the entry; the engine to compare with has its test beside the other engines."""


def add_and_look(name: str, planned_file: str) -> None:
    """Add one entry, and assert on the plan of the run that uses it."""
    toy = TOY_ENTRIES[name]
    toy.add()
    toy.look(RunPlan.of(load_run_file(Path(planned_file)), toy.world_size))
