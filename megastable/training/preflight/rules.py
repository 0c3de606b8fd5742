"""The registry of the reviewer's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megastable.training.preflight import batches, corpus, formats, hardware, optimizer, schedule, shape
from megastable.training.preflight.finding import Finding
from megastable.training.preflight.review import Review

Rule = Callable[[Review], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    formats.fp16_is_clipped,
    formats.fp16_forgets_quickly,
    formats.fp16_has_a_floor_under_eps,
    formats.initial_loss_scale_is_near,
    formats.loss_scale_is_dynamic,
    formats.loss_scale_keys_have_a_reader,
    formats.bf16_sums_in_fp32,
    formats.gradients_travel_in_range,
    hardware.fp16_has_tensor_cores,
    hardware.bf16_has_hardware,
    optimizer.clip_norm_is_customary,
    optimizer.betas_are_in_order,
    optimizer.eps_leaves_adam_adaptive,
    optimizer.lr_fits_the_size,
    optimizer.lr_fits_the_width,
    shape.std_fits_the_width,
    shape.std_fits_the_depth,
    shape.head_dim_suits_the_kernels,
    shape.vocabulary_suits_the_kernels,
    batches.ramp_ends_within_the_run,
    batches.chosen_micro_batches_are_told,
    batches.micro_batch_steps_are_reached,
    batches.bubble_at_the_start_is_small,
    batches.bubble_stays_small,
    batches.global_batch_is_customary,
    batches.accumulation_is_customary,
    batches.size_is_customary,
    schedule.warmup_has_customary_length,
    schedule.seed_was_chosen,
    corpus.text_is_here,
    corpus.text_holds_a_batch,
)
"""To add a rule: a function of a ``Review``, a line here, and a case that fires it and one that just does not."""
