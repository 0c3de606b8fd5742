"""The review of one run file, and the registry of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megastable.config import ConfigError, SourceConfig, UnreadableRunFileError, load_run_file
from megastable.core.errors import UserError
from megastable.planning.micro_batches import CALIBRATION_KEY, with_chosen_micro_batches
from megastable.planning.preflight.batches import (
    accumulation_is_customary,
    batch_grows_gradually,
    bubble_at_the_start_is_small,
    bubble_stays_small,
    chosen_micro_batches_are_shown,
    global_batch_is_customary,
    micro_batch_steps_are_reached,
    ramp_ends_within_the_run,
    size_is_customary,
)
from megastable.planning.preflight.model_and_text import (
    evaluation_has_text,
    head_dim_suits_the_kernels,
    some_class_expresses_the_model,
    std_fits_the_depth,
    std_fits_the_width,
    text_holds_a_batch,
    text_is_here,
    vocabulary_suits_the_kernels,
)
from megastable.planning.preflight.numbers import (
    bf16_has_hardware,
    bf16_sums_in_fp32,
    fp16_forgets_quickly,
    fp16_has_a_floor_under_eps,
    fp16_has_tensor_cores,
    fp16_is_clipped,
    gradients_travel_in_range,
    initial_loss_scale_is_near,
    loss_scale_is_dynamic,
    loss_scale_keys_have_a_reader,
)
from megastable.planning.preflight.optimizer import (
    betas_are_in_order,
    clip_norm_is_customary,
    eps_leaves_adam_adaptive,
    lr_fits_the_size,
    lr_fits_the_width,
    seed_was_chosen,
    some_step_learns,
    warmup_has_customary_length,
)
from megastable.planning.preflight.review import LEVELS, Finding, Gpu, LocalText, Review
from megastable.planning.run_plan import RunPlan, number_of_devices

Rule = Callable[[Review], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    fp16_is_clipped,
    fp16_forgets_quickly,
    fp16_has_a_floor_under_eps,
    initial_loss_scale_is_near,
    loss_scale_is_dynamic,
    loss_scale_keys_have_a_reader,
    bf16_sums_in_fp32,
    gradients_travel_in_range,
    fp16_has_tensor_cores,
    bf16_has_hardware,
    clip_norm_is_customary,
    betas_are_in_order,
    eps_leaves_adam_adaptive,
    lr_fits_the_size,
    lr_fits_the_width,
    std_fits_the_width,
    std_fits_the_depth,
    head_dim_suits_the_kernels,
    vocabulary_suits_the_kernels,
    some_class_expresses_the_model,
    ramp_ends_within_the_run,
    chosen_micro_batches_are_shown,
    micro_batch_steps_are_reached,
    bubble_at_the_start_is_small,
    bubble_stays_small,
    batch_grows_gradually,
    global_batch_is_customary,
    accumulation_is_customary,
    size_is_customary,
    some_step_learns,
    warmup_has_customary_length,
    seed_was_chosen,
    text_is_here,
    text_holds_a_batch,
    evaluation_has_text,
)
"""To add a rule: a function of a ``Review``, a line here, and a case that fires it and one that just does not."""

SIZES_BY_HAND = "train_micro_batch_size_per_gpu, micro_batch_size_steps"


def preflight(
    path: Path,
    world_size: int | None,
    gpus: Sequence[Gpu],
    look_at_text: Callable[[SourceConfig], LocalText | None],
    overrides: Sequence[str] = (),
) -> list[Finding]:
    """Review a run file, and return all findings, gravest first.

    A file that would be refused gives its faults, as errors, and no more.

    Args:
        world_size: processes of the launch; None as in ``number_of_devices``, and that it was assumed is then a finding
            itself.
        gpus: the kinds of GPU that it is to run on, as far as they are known.
        look_at_text: measures the text of a source; returns None for one that would have to be downloaded.
        overrides: of keys of the file, see ``load_run_file``.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        run = load_run_file(path, overrides, world_size)
        processes, assumed = number_of_devices(run, world_size)
        # Read again: the rules of the layout need the number of processes, which may stand in the file.
        run = load_run_file(path, overrides, processes)
    except UnreadableRunFileError:
        # There is nothing to review, as where the path is wrong.
        raise
    except ConfigError as error:
        return [Finding.of_fault(fault) for fault in error.faults]
    try:
        run = with_chosen_micro_batches(run, processes)
    except UserError as error:
        # The file may be sound, and the calibration that it names missing or of another run.
        instead = f'another calibration, or "micro_batch_size": null and the sizes by hand ({SIZES_BY_HAND})'
        return [Finding("error", CALIBRATION_KEY, str(error), instead)]
    text = look_at_text(run.megastable.data.source)
    review = Review.of(RunPlan.of(run, processes), assumed, gpus, text)
    findings = findings_of(review)
    if assumed:
        findings.append(_assumption(review))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def findings_of(review: Review) -> list[Finding]:
    """Ask every rule, in the registry's order."""
    return [finding for rule in RULES for finding in rule(review)]


def _assumption(review: Review) -> Finding:
    """Say which number of processes was assumed, and what that leaves open."""
    layout = review.plan.layout
    return Finding(
        "note",
        "world_size",
        f"assumed {layout.world_size}, one replica: stages ({layout.num_stages}) x tensor ranks "
        f"({layout.tensor_parallel_size}); accumulation is not judged, and with more replicas "
        "each has fewer micro-batches",
        "--world-size N, or megastable.training.world_size",
    )
