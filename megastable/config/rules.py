"""The registry of rules between keys, and running those whose sections are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_type_hints

from megastable.config import layout_rules, model_rules, run_rules, stage_rules, tensor_rules
from megastable.config.faults import Fault
from megastable.config.section import Section

Rule = Callable[..., Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    model_rules.heads_divide_hidden_size,
    model_rules.kv_heads_divide_heads,
    model_rules.rotary_needs_even_head_dim,
    stage_rules.no_more_stages_than_layers,
    stage_rules.block_counts_make_the_model,
    stage_rules.type_matches_a_class,
    stage_rules.every_stage_has_weights,
    model_rules.world_size_holds_whole_replicas,
    model_rules.std_belongs_to_fixed,
    model_rules.head_std_needs_a_head,
    model_rules.capped_attention_is_plain,
    model_rules.bpe_fits_the_model,
    model_rules.bytes_fit_the_model,
    model_rules.evaluation_needs_validation_data,
    tensor_rules.tensor_ranks_divide_the_model,
    tensor_rules.tensor_ranks_divide_kv_heads,
    tensor_rules.sequence_parallel_needs_tensor_ranks,
    tensor_rules.loss_chunks_hold_every_slice,
    tensor_rules.compiled_blocks_are_whole,
    run_rules.ramp_has_one_form,
    run_rules.ramp_reaches_final,
    run_rules.ramp_steps_rise,
    run_rules.micro_batch_steps_rise,
    run_rules.auto_goes_by_a_calibration,
    run_rules.auto_chooses_every_size,
    run_rules.one_run_length,
    run_rules.one_number_format,
    run_rules.accumulation_fits_the_format,
    run_rules.loss_scale_starts_above_minimum,
    run_rules.adamw_decouples_weight_decay,
    run_rules.min_lr_is_not_above_lr,
    run_rules.lr_keys_belong_to_the_type,
    run_rules.warmup_ends_before_decay,
    run_rules.stable_ends_between,
    layout_rules.auto_starts_from_one_sample,
    layout_rules.processes_are_whole_replicas,
    layout_rules.batches_divide_among_replicas,
)
"""To add a rule: a function whose parameters are typed with the sections that it needs, and a line here."""


def broken_rules(sections: Mapping[type[Section], Section]) -> Iterator[Fault]:
    """Run every rule whose sections are among ``sections`` (section type -> its valid instance)."""
    for rule in RULES:
        needs = {name: kind for name, kind in get_type_hints(rule).items() if name != "return"}
        if all(kind in sections for kind in needs.values()):
            yield from rule(**{name: sections[kind] for name, kind in needs.items()})
