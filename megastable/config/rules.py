"""The registry of rules between keys of a run file, and the check that runs them.

A rule is a function that yields a fault for every breach. It stands beside its section where it reads one section, and
in ``cross_rules.py`` or beside the subject (``stages.py``) where it reads several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_type_hints

from megastable.config.batch_rampup import (
    auto_chooses_every_size,
    auto_goes_by_a_calibration,
    auto_tries_few_splits,
    micro_batch_steps_rise,
    ramp_has_one_form,
    ramp_reaches_final,
    ramp_steps_rise,
)
from megastable.config.cross_rules import (
    accumulation_fits_the_format,
    auto_starts_from_one_sample,
    batches_divide_among_replicas,
    best_checkpoints_need_evaluation,
    bpe_fits_the_model,
    bytes_fit_the_model,
    compiled_blocks_are_whole,
    compiled_blocks_read_one_text,
    evaluation_needs_validation_data,
    head_std_needs_a_head,
    loss_chunks_hold_every_slice,
    min_lr_is_not_above_lr,
    one_number_format,
    processes_are_whole_replicas,
    some_step_has_a_learning_rate,
    stable_ends_between,
    tensor_ranks_divide_kv_heads,
    tensor_ranks_divide_the_model,
    warmup_ends_before_decay,
    world_size_holds_whole_replicas,
)
from megastable.config.data import blend_has_names, blend_repeats, prompts_have_completions, tokenizer_is_made
from megastable.config.deepspeed_keys import adamw_decouples_weight_decay, loss_scale_starts_above_minimum
from megastable.config.lr_schedule import lr_keys_belong_to_the_type
from megastable.config.model import (
    capped_attention_is_plain,
    family_computes_the_same,
    heads_divide_hidden_size,
    kv_heads_divide_heads,
    rotary_needs_even_head_dim,
)
from megastable.config.parallelism import sequence_parallel_needs_tensor_ranks
from megastable.config.reading.faults import Fault
from megastable.config.section import Section
from megastable.config.stages import (
    block_counts_make_the_model,
    deepspeed_finds_the_cut,
    every_stage_has_weights,
    no_more_stages_than_layers,
    type_matches_a_class,
)
from megastable.config.training import (
    keep_every_meets_the_saves,
    kept_beside_the_last,
    one_run_length,
    std_belongs_to_fixed,
)

RuleFunction = Callable[..., Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """A rule, and the rules that must hold before it can judge: a broken one must not be reported a second time."""

    function: RuleFunction
    needs: tuple[RuleFunction, ...] = ()

    @cached_property
    def sections(self) -> dict[str, type[Section]]:
        """Return the sections that the rule reads, by the names of its parameters; their types say which."""
        return {name: kind for name, kind in get_type_hints(self.function).items() if name != "return"}


RULES: tuple[Rule, ...] = (
    # The model, and how it is cut into stages.
    Rule(heads_divide_hidden_size),
    Rule(kv_heads_divide_heads),
    # Of heads that do not divide the width, head_dim is rounded down and says nothing.
    Rule(rotary_needs_even_head_dim, needs=(heads_divide_hidden_size,)),
    Rule(family_computes_the_same),
    Rule(no_more_stages_than_layers),
    Rule(block_counts_make_the_model),
    Rule(type_matches_a_class),
    Rule(deepspeed_finds_the_cut),
    # A cut that cannot be computed leaves no stages to look into.
    Rule(
        every_stage_has_weights,
        needs=(
            no_more_stages_than_layers,
            block_counts_make_the_model,
            type_matches_a_class,
            deepspeed_finds_the_cut,
        ),
    ),
    Rule(world_size_holds_whole_replicas),
    # Fresh weights, tokens and evaluation.
    Rule(std_belongs_to_fixed),
    Rule(head_std_needs_a_head),
    Rule(capped_attention_is_plain),
    Rule(blend_has_names),
    Rule(blend_repeats),
    Rule(prompts_have_completions),
    Rule(tokenizer_is_made),
    Rule(bpe_fits_the_model),
    Rule(bytes_fit_the_model),
    Rule(evaluation_needs_validation_data),
    # Checkpoints.
    Rule(kept_beside_the_last),
    Rule(keep_every_meets_the_saves),
    Rule(best_checkpoints_need_evaluation),
    # What tensor ranks split.
    Rule(tensor_ranks_divide_the_model),
    Rule(tensor_ranks_divide_kv_heads),
    Rule(sequence_parallel_needs_tensor_ranks),
    Rule(loss_chunks_hold_every_slice),
    Rule(compiled_blocks_are_whole),
    Rule(compiled_blocks_read_one_text),
    # The ramp, its micro-batches, and the length of the run.
    Rule(ramp_has_one_form),
    Rule(ramp_reaches_final),
    Rule(ramp_steps_rise),
    Rule(micro_batch_steps_rise),
    Rule(auto_goes_by_a_calibration),
    Rule(auto_chooses_every_size),
    Rule(auto_tries_few_splits, needs=(ramp_has_one_form, ramp_reaches_final)),
    Rule(one_run_length),
    # Number formats and the optimizer.
    Rule(one_number_format),
    # With fp16 and bf16 both enabled the weights have no format to compare with.
    Rule(accumulation_fits_the_format, needs=(one_number_format,)),
    Rule(loss_scale_starts_above_minimum),
    Rule(adamw_decouples_weight_decay),
    # The learning rate.
    Rule(min_lr_is_not_above_lr),
    Rule(lr_keys_belong_to_the_type),
    Rule(warmup_ends_before_decay),
    Rule(some_step_has_a_learning_rate, needs=(warmup_ends_before_decay,)),
    # Between two ends in the wrong order nothing lies, which is not the constant part's fault.
    Rule(stable_ends_between, needs=(warmup_ends_before_decay,)),
    # The launch, where the number of processes is known.
    Rule(auto_starts_from_one_sample),
    Rule(processes_are_whole_replicas),
    # The ramp is expanded over the whole run on a layout, which takes a sound ramp, length and layout. That "auto" has
    # its calibration is not needed: a missing one does not change how batches divide.
    Rule(
        batches_divide_among_replicas,
        needs=(
            ramp_has_one_form,
            ramp_reaches_final,
            ramp_steps_rise,
            micro_batch_steps_rise,
            auto_chooses_every_size,
            auto_starts_from_one_sample,
            one_run_length,
            processes_are_whole_replicas,
        ),
    ),
)
"""In the order in which their faults are listed; a rule comes after those that it needs.

To add a rule: a function whose parameters are typed with the sections that it reads, and a line here.
"""


def broken_rules(
    sections: Mapping[type[Section], Section], rules: Sequence[Rule], known_to_hold: Collection[RuleFunction] = ()
) -> Iterator[Fault]:
    """Yield the faults of all rules that can judge: their sections are valid, and the rules that they need hold.

    Args:
        sections: section type -> its valid instance.
        rules: in an order in which a rule comes after those that it needs, as ``RULES``.
        known_to_hold: rules that are not looked at.
    """
    hold = set(known_to_hold)
    for rule in rules:
        if not hold.issuperset(rule.needs):
            continue
        reads = rule.sections
        if not sections.keys() >= set(reads.values()):
            # Not among those that hold either: what an invalid section would break is not known.
            continue
        faults = list(rule.function(**{name: sections[kind] for name, kind in reads.items()}))
        if not faults:
            hold.add(rule.function)
        yield from faults
