"""Rules between keys of the ramp, the schedule, the optimizer and the number formats.

A rule's parameters say, by their types, which sections it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

from megastable.config.amount import Amount
from megastable.config.batch_rampup import HOW_TO_CALIBRATE, SIZE_KEYS, BatchRampupConfig
from megastable.config.deepspeed_keys import Bf16Config, DataTypesConfig, Fp16Config, OptimizerConfig
from megastable.config.faults import Fault
from megastable.config.lr_schedule import SCHEDULE_FIELDS, LrScheduleConfig, types_that_read
from megastable.config.model import ModelConfig
from megastable.config.sections import TrainingConfig
from megastable.core.devices import DEVICES

RAMP_FORMS = (
    'give "final" alone (a constant batch), or "start", "increment", "final" and exactly one of "ramp_samples" '
    '(the whole ramp) and "samples_per_increment", or "steps" alone'
)
ACCUMULATION_DTYPES = {"fp32": ("fp32",), "bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32")}
"""Format of the weights -> formats in which their gradients may be accumulated."""


def ramp_has_one_form(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """The three forms are not mixed, and none is half given."""
    given = batch_rampup.model_dump(exclude_none=True, include=SIZE_KEYS)
    length = given.keys() & {"ramp_samples", "samples_per_increment"}
    linear = given.keys() - length == {"start", "increment", "final"} and len(length) == 1
    if not linear and given.keys() not in ({"final"}, {"steps"}):
        yield Fault("megastable.batch_rampup", given, RAMP_FORMS)


def ramp_reaches_final(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """A whole number of increments, one at least, leads from start to final."""
    start, increment, final = batch_rampup.start, batch_rampup.increment, batch_rampup.final
    if start is None or increment is None or final is None:
        return
    if start >= final:
        yield Fault(
            "megastable.batch_rampup.start",
            start,
            f"must be below final ({final}); for a constant batch give final alone",
        )
    elif (final - start) % increment:
        lower = start + (final - start) // increment * increment
        neighbours = f"{lower} or {lower + increment}" if lower > start else f"{lower + increment}"
        yield Fault(
            "megastable.batch_rampup.final",
            final,
            f"must be start ({start}) plus a multiple of increment ({increment}), such as {neighbours}",
        )


def ramp_steps_rise(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """A list of steps begins at sample 0, goes on in order, and the batch never falls."""
    steps = batch_rampup.steps or ()
    if batch_rampup.steps == ():
        yield Fault("megastable.batch_rampup.steps", [], "must list at least one [from_sample, global_batch_size]")
    if steps and steps[0][0] != 0:
        yield Fault("megastable.batch_rampup.steps[0]", steps[0], "the first from_sample must be 0")
    for index, (before, step) in enumerate(pairwise(steps), start=1):
        path = f"megastable.batch_rampup.steps[{index}]"
        if step[0] <= before[0]:
            yield Fault(path, step, f"from_sample must be above the one before ({before[0]})")
        if step[1] < before[1]:
            yield Fault(path, step, f"global_batch_size must not be below the one before ({before[1]})")


def micro_batch_steps_rise(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """The global batch sizes from which a micro-batch size holds are listed in order."""
    for key in ("micro_batch_size_steps", "chosen_micro_batch_sizes"):
        for index, (before, step) in enumerate(pairwise(getattr(batch_rampup, key)), start=1):
            if step[0] <= before[0]:
                yield Fault(
                    f"megastable.batch_rampup.{key}[{index}]",
                    step,
                    f"from_global_batch_size must be above the one before ({before[0]})",
                )


def auto_goes_by_a_calibration(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Whoever has micro-batch sizes chosen says by what, and nobody else does."""
    given = batch_rampup.model_dump(include={"calibration", "chosen_micro_batch_sizes"})
    if batch_rampup.chooses_micro_batch_sizes:
        if batch_rampup.calibration is None:
            message = f'micro_batch_size "auto" needs {HOW_TO_CALIBRATE}, or the name of one of {", ".join(DEVICES)}'
            yield Fault("megastable.batch_rampup.calibration", None, message)
        return
    for key, value in given.items():
        if value:
            message = 'is only read with micro_batch_size "auto"; remove it, or set that'
            yield Fault(f"megastable.batch_rampup.{key}", value, message)


def auto_chooses_every_size(batch_rampup: BatchRampupConfig) -> Iterator[Fault]:
    """Sizes that are given and sizes that are chosen exclude each other."""
    if batch_rampup.chooses_micro_batch_sizes and batch_rampup.micro_batch_size_steps:
        yield Fault(
            "megastable.batch_rampup.micro_batch_size_steps",
            batch_rampup.micro_batch_size_steps,
            'micro_batch_size "auto" chooses every size; remove one of them',
        )


def one_run_length(training: TrainingConfig) -> Iterator[Fault]:
    """A run ends after a number of samples or of steps."""
    given = training.model_dump(include={"total_samples", "total_steps"}, exclude_none=True)
    if len(given) != 1:
        yield Fault(
            "megastable.training",
            given,
            "give exactly one of total_samples and total_steps (an override sets the other one to null)",
        )


def one_number_format(fp16: Fp16Config, bf16: Bf16Config) -> Iterator[Fault]:
    """The whole model has one format."""
    if fp16.enabled and bf16.enabled:
        yield Fault("bf16.enabled", True, "fp16.enabled is true as well; enable one of them, or neither for float32")


def accumulation_fits_the_format(fp16: Fp16Config, bf16: Bf16Config, data_types: DataTypesConfig) -> Iterator[Fault]:
    """Gradients are accumulated in the format of the weights or in float32."""
    if fp16.enabled and bf16.enabled:
        return
    weights = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    legal = ACCUMULATION_DTYPES[weights]
    if data_types.grad_accum_dtype not in (None, *legal):
        yield Fault(
            "data_types.grad_accum_dtype",
            data_types.grad_accum_dtype,
            f"must be {' or '.join(legal)} in a run with {weights} weights",
        )


def loss_scale_starts_above_minimum(fp16: Fp16Config) -> Iterator[Fault]:
    """A dynamic loss scale that starts below its own floor would jump up at the first overflow."""
    if fp16.enabled and fp16.loss_scale == 0 and 2**fp16.initial_scale_power < fp16.min_loss_scale:
        yield Fault(
            "fp16.initial_scale_power",
            fp16.initial_scale_power,
            f"2 to this power must be at least min_loss_scale ({fp16.min_loss_scale})",
        )


def adamw_decouples_weight_decay(optimizer: OptimizerConfig) -> Iterator[Fault]:
    """DeepSpeed ignores adam_w_mode for AdamW; a false there asks for another optimizer than the name says."""
    if optimizer.type == "AdamW" and not optimizer.params.adam_w_mode:
        yield Fault("optimizer.params.adam_w_mode", False, 'has no effect on AdamW; for L2 decay write "type": "Adam"')


def min_lr_is_not_above_lr(optimizer: OptimizerConfig, lr_schedule: LrScheduleConfig) -> Iterator[Fault]:
    """The decay goes down."""
    if lr_schedule.min_lr > optimizer.params.lr:
        yield Fault(
            "megastable.lr_schedule.min_lr",
            lr_schedule.min_lr,
            f"must be at most optimizer.params.lr ({optimizer.params.lr})",
        )


def lr_keys_belong_to_the_type(lr_schedule: LrScheduleConfig) -> Iterator[Fault]:
    """A key that the type does not read would be ignored; at its default it asks for nothing."""
    values = lr_schedule.model_dump()
    defaults = LrScheduleConfig().model_dump()
    for key in SCHEDULE_FIELDS:
        if values[key] != defaults[key] and not lr_schedule.reads(key):
            yield Fault(
                f"megastable.lr_schedule.{key}",
                values[key],
                f'is not read by the type "{lr_schedule.type}", only by {", ".join(types_that_read(key))}; remove it '
                f"(an override sets it to {json.dumps(defaults[key])})",
            )


def warmup_ends_before_decay(
    lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[Fault]:
    """The warmup is over when the decay is."""
    warmup, decay = lr_schedule.warmup, lr_schedule.decay
    if lr_schedule.reads("decay") and _ends_later(warmup, decay, training, model):
        yield Fault(
            "megastable.lr_schedule.warmup",
            warmup.model_dump(),
            f"must end before the decay does ({decay.model_dump()}); both are counted from the start of the run",
        )


def stable_ends_between(lr_schedule: LrScheduleConfig, training: TrainingConfig, model: ModelConfig) -> Iterator[Fault]:
    """The constant part begins with the end of the warmup, and the decay with its own."""
    warmup, stable, decay = lr_schedule.warmup, lr_schedule.stable, lr_schedule.decay
    if stable is None or not lr_schedule.reads("stable") or _ends_later(warmup, decay, training, model):
        return
    if _ends_later(warmup, stable, training, model) or _ends_later(stable, decay, training, model):
        yield Fault(
            "megastable.lr_schedule.stable",
            stable.model_dump(),
            f"must lie between the end of the warmup ({warmup.model_dump()}) and that of the decay "
            f"({decay.model_dump()}); all are counted from the start of the run",
        )


def _ends_later(first: Amount, second: Amount, training: TrainingConfig, model: ModelConfig) -> bool:
    """True where ``first`` is known to be more than ``second`` without expanding the ramp."""
    if first.fraction is not None and second.fraction is not None:
        return first.fraction > second.fraction
    total_samples = training.total_samples
    if total_samples is None:
        if first.fraction is not None or second.fraction is not None:
            return False
        total_samples = 0  # Not looked at: neither is a share of it.
    return first.to_samples(total_samples, model.seq_length) > second.to_samples(total_samples, model.seq_length)
