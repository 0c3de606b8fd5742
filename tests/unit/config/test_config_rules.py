"""Every rule between keys fires where it should and stays silent next to that."""

import json
from dataclasses import dataclass

import pytest

from megastable.config.rules import RULES
from tests.unit.config.config_examples import MINIMAL, faults_of


@dataclass(frozen=True)
class Case:
    """Overrides of the minimal run that break one rule, the path that it names, and overrides that just do not."""

    rule: str
    broken: tuple[str, ...]
    path: str
    legal: tuple[str, ...]
    world_size: int | None = None


M = "megastable"


def blend(*parts: tuple[str, float]) -> str:
    """The override of a blend of sources of these names and weights."""
    sources = [{"name": name, "weight": weight, "source": {"type": "stdlib"}} for name, weight in parts]
    return f"{M}.data.source={json.dumps({'type': 'blend', 'sources': sources})}"


def jsonl(**keys: str) -> str:
    """The override of a source of JSON lines with these keys."""
    return f"{M}.data.source={json.dumps({'type': 'jsonl', 'path': 'x', **keys})}"


PARTITION = f"{M}.pipeline.partition"
STABLE = (f"{M}.lr_schedule.type=warmup_stable_decay",)
NINE_STEPS = (f"{M}.training.total_samples=null", f"{M}.training.total_steps=9")
AUTO = (f"{M}.batch_rampup.micro_batch_size=auto", f"{M}.batch_rampup.calibration=A100")
EVALUATED = (f"{M}.training.eval_interval=5",)
LINEAR = '"start": 8, "increment": 8, "final": 32'
TRIES_MANY = (
    f'{M}.batch_rampup={{"start": 1, "increment": 1, "final": 400, "ramp_samples": 9}}',
    f"{M}.batch_rampup.micro_batch_size=auto",
    f"{M}.batch_rampup.calibration=A100",
    f"{M}.model.num_layers=20",
)
CASES = (
    Case(
        "heads_divide_hidden_size",
        (f"{M}.model.hidden_size=130",),
        f"{M}.model.hidden_size",
        (f"{M}.model.hidden_size=136",),
    ),
    Case(
        "kv_heads_divide_heads",
        (f"{M}.model.num_key_value_heads=3",),
        f"{M}.model.num_key_value_heads",
        (f"{M}.model.num_key_value_heads=2",),
    ),
    Case(
        "rotary_needs_even_head_dim",
        (f"{M}.model.hidden_size=20",),
        f"{M}.model.position_embedding",
        (f"{M}.model.hidden_size=20", f"{M}.model.position_embedding=alibi"),
    ),
    Case(  # a head of 32
        "rotary_needs_even_head_dim",
        (f"{M}.model.rotary_fraction=0.16",),
        f"{M}.model.rotary_fraction",
        (f"{M}.model.rotary_fraction=0.19",),
    ),
    Case(
        "rotary_needs_even_head_dim",
        (f"{M}.model.rotary_fraction=0.03",),
        f"{M}.model.rotary_fraction",
        (f"{M}.model.rotary_fraction=0.03", f"{M}.model.position_embedding=learned"),
    ),
    Case(
        "family_computes_the_same",
        (f"{M}.model.family=gpt2", f"{M}.model.norm=rmsnorm"),
        f"{M}.model.norm",
        (f"{M}.model.family=llama", f"{M}.model.norm=rmsnorm"),
    ),
    Case(
        "family_computes_the_same",
        (f"{M}.model.family=gpt_neox", f"{M}.model.num_key_value_heads=2"),
        f"{M}.model.num_key_value_heads",
        (f"{M}.model.family=gpt_neox", f"{M}.model.num_key_value_heads=4", f"{M}.model.rotary_fraction=0.5"),
    ),
    Case(
        "family_computes_the_same",
        (f"{M}.model.family=bloom", f"{M}.model.ffn_hidden_size=256"),
        f"{M}.model.ffn_hidden_size",
        (f"{M}.model.family=bloom", f"{M}.model.ffn_hidden_size=512"),
    ),
    Case(
        "no_more_stages_than_layers",
        (f"{M}.pipeline.num_stages=6",),
        f"{M}.pipeline.num_stages",
        (f"{M}.pipeline.num_stages=5",),
    ),
    *(
        Case("block_counts_make_the_model", (two, f"{PARTITION}={broken}"), PARTITION, (two, f"{PARTITION}={legal}"))
        for two, broken, legal in (
            (f"{M}.pipeline.num_stages=2", "[3, 2]", "[3, 1]"),
            (f"{M}.pipeline.num_stages=2", "[2, 1, 1]", "[2, 2]"),
            (f"{M}.pipeline.num_stages=3", "[3, 1]", "[2, 1, 1]"),
        )
    ),
    Case(
        "deepspeed_finds_the_cut",
        (f"{M}.pipeline.num_stages=128", f"{M}.model.num_layers=200", f"{PARTITION}=parameters"),
        PARTITION,
        (f"{M}.pipeline.num_stages=64", f"{M}.model.num_layers=200", f"{PARTITION}=parameters"),
    ),
    Case("type_matches_a_class", (f"{PARTITION}=type:linear",), PARTITION, (f"{PARTITION}=type:transformer",)),
    *(
        Case(
            "every_stage_has_weights",
            (f"{M}.pipeline.num_stages={stages}", f"{PARTITION}={broken}", *model),
            PARTITION,
            (f"{M}.pipeline.num_stages={stages}", f"{PARTITION}={legal}", *model),
        )
        for stages, broken, legal, model in (
            (3, "[2, 0, 2]", "[2, 2, 0]", ()),
            (2, "[0, 4]", "[4, 0]", ()),
            (4, "uniform", "balanced", ()),  # the lookup and the finish, which has no weights
            (2, "type:embedding", "type:block", (f"{M}.model.tie_embeddings=true",)),  # the tied copy alone
        )
    ),
    Case(
        "every_stage_has_weights",
        (f"{M}.pipeline.num_stages=2", f"{PARTITION}=[0, 4]"),
        PARTITION,
        (f"{M}.pipeline.num_stages=2", f"{PARTITION}=[0, 4]", f"{M}.model.embedding_norm=true"),
    ),
    Case(
        "world_size_holds_whole_replicas",
        (f"{M}.pipeline.num_stages=2", f"{M}.training.world_size=3"),
        f"{M}.training.world_size",
        (f"{M}.pipeline.num_stages=2", f"{M}.training.world_size=4"),
    ),
    Case(
        "world_size_holds_whole_replicas",
        (f"{M}.tensor_parallel.size=4", f"{M}.training.world_size=6"),
        f"{M}.training.world_size",
        (f"{M}.tensor_parallel.size=4", f"{M}.training.world_size=8"),
    ),
    *(
        Case(
            "tensor_ranks_divide_the_model",
            (*broken, f"{M}.tensor_parallel.size=2"),
            f"{M}.model.{key}",
            (*legal, f"{M}.tensor_parallel.size=2"),
        )
        for key, broken, legal in (
            ("num_attention_heads", (f"{M}.model.num_attention_heads=1",), ()),
            ("ffn_hidden_size", (f"{M}.model.ffn_hidden_size=501",), (f"{M}.model.ffn_hidden_size=502",)),
            (
                "vocab_size",
                (f"{M}.model.vocab_size=4095", f"{M}.model.vocab_padding_multiple=1"),
                (f"{M}.model.vocab_size=4095", f"{M}.model.vocab_padding_multiple=2"),
            ),
            (
                "seq_length",
                (f"{M}.model.seq_length=127", f"{M}.tensor_parallel.sequence_parallel=true"),
                (f"{M}.model.seq_length=127", f"{M}.tensor_parallel.sequence_parallel=false"),
            ),
        )
    ),
    Case(
        "tensor_ranks_divide_kv_heads",
        (
            f"{M}.model.num_attention_heads=12",
            f"{M}.model.hidden_size=384",
            f"{M}.model.num_key_value_heads=3",
            f"{M}.tensor_parallel.size=2",
        ),
        f"{M}.model.num_key_value_heads",
        (
            f"{M}.model.num_attention_heads=12",
            f"{M}.model.hidden_size=384",
            f"{M}.model.num_key_value_heads=1",
            f"{M}.tensor_parallel.size=2",
        ),
    ),
    Case(
        "compiled_blocks_are_whole",
        (f"{M}.model.compile=true", f"{M}.tensor_parallel.size=2"),
        f"{M}.model.compile",
        (f"{M}.model.compile=false", f"{M}.tensor_parallel.size=2"),
    ),
    Case(
        "sequence_parallel_needs_tensor_ranks",
        (f"{M}.tensor_parallel.sequence_parallel=true",),
        f"{M}.tensor_parallel.sequence_parallel",
        (f"{M}.tensor_parallel.sequence_parallel=true", f"{M}.tensor_parallel.size=2"),
    ),
    Case(
        "loss_chunks_hold_every_slice",
        (
            f"{M}.training.loss_chunk_tokens=1",
            f"{M}.tensor_parallel.size=2",
            f"{M}.tensor_parallel.sequence_parallel=true",
        ),
        f"{M}.training.loss_chunk_tokens",
        (
            f"{M}.training.loss_chunk_tokens=2",
            f"{M}.tensor_parallel.size=2",
            f"{M}.tensor_parallel.sequence_parallel=true",
        ),
    ),
    Case(
        "std_belongs_to_fixed",
        (f"{M}.init.scheme=fixed",),
        f"{M}.init.std",
        (f"{M}.init.scheme=fixed", f"{M}.init.std=0.02"),
    ),
    Case("std_belongs_to_fixed", (f"{M}.init.std=0.02",), f"{M}.init.std", (f"{M}.init.std=null",)),
    Case(
        "blend_has_names",
        (blend(("a", 1), ("b", 1), ("a", 1)), f"{M}.data.tokenizer.type=bytes"),
        f"{M}.data.source.sources[2].name",
        (blend(("a", 1), ("b", 1), ("c", 1)), f"{M}.data.tokenizer.type=bytes"),
    ),
    Case(
        "blend_repeats",
        (blend(("a", 0.1234567), ("b", 0.5)), f"{M}.data.tokenizer.type=bytes"),
        f"{M}.data.source.sources",
        (blend(("a", 0.12345), ("b", 0.5)), f"{M}.data.tokenizer.type=bytes"),
    ),
    Case(
        "prompts_have_completions",
        (jsonl(prompt_key="p"),),
        f"{M}.data.source.prompt_key",
        (jsonl(prompt_key="p", completion_key="c"),),
    ),
    Case(
        "prompts_have_completions",
        (jsonl(prompt_key="p", completion_key="c", text_key="t"),),
        f"{M}.data.source.text_key",
        (jsonl(text_key="t"),),
    ),
    Case(
        "tokenizer_is_made",
        (blend(("a", 1)),),
        f"{M}.data.tokenizer",
        (blend(("a", 1)), f"{M}.data.tokenizer.type=bytes"),
    ),
    Case(
        "tokenizer_is_made",
        (f'{M}.data.source={{"type": "indexed", "path": "x"}}',),
        f"{M}.data.tokenizer",
        (f'{M}.data.source={{"type": "indexed", "path": "x"}}', f"{M}.data.tokenizer.type=bytes"),
    ),
    Case(
        "evaluation_needs_validation_data",
        (
            f'{M}.data.source={{"type": "indexed", "path": "x"}}',
            f"{M}.data.tokenizer.type=bytes",
            f"{M}.data.validation_fraction=0",
            f"{M}.training.eval_interval=1",
        ),
        f"{M}.training.eval_interval",
        (
            f'{M}.data.source={{"type": "indexed", "path": "x", "validation_path": "y"}}',
            f"{M}.data.tokenizer.type=bytes",
            f"{M}.data.validation_fraction=0",
            f"{M}.training.eval_interval=1",
        ),
    ),
    Case(
        "bpe_fits_the_model",
        (f'{M}.data.tokenizer={{"type": "bpe", "vocab_size": 1025}}',),
        f"{M}.data.tokenizer.vocab_size",
        (f'{M}.data.tokenizer={{"type": "bpe", "vocab_size": 1024}}',),
    ),
    Case("bpe_fits_the_model", (f"{M}.model.vocab_size=256",), f"{M}.model.vocab_size", (f"{M}.model.vocab_size=257",)),
    Case(
        "bytes_fit_the_model",
        (f"{M}.data.tokenizer.type=bytes", f"{M}.model.vocab_size=256"),
        f"{M}.model.vocab_size",
        (f"{M}.data.tokenizer.type=bytes", f"{M}.model.vocab_size=257"),
    ),
    Case(
        "evaluation_needs_validation_data",
        (f"{M}.training.eval_interval=1", f"{M}.data.validation_fraction=0"),
        f"{M}.training.eval_interval",
        (f"{M}.data.validation_fraction=0",),
    ),
    Case(
        "kept_beside_the_last",
        (f"{M}.checkpoint.keep_every=10",),
        f"{M}.checkpoint.keep_every",
        (f"{M}.checkpoint.keep_every=10", f"{M}.checkpoint.keep_last=1"),
    ),
    Case(
        "kept_beside_the_last",
        (f"{M}.checkpoint.keep_best=1", *EVALUATED),
        f"{M}.checkpoint.keep_best",
        (f"{M}.checkpoint.keep_best=1", f"{M}.checkpoint.keep_last=1", *EVALUATED),
    ),
    *(
        Case(
            "keep_every_meets_the_saves",
            (f"{M}.checkpoint.save_interval=3", f"{M}.checkpoint.keep_last=1", f"{M}.checkpoint.keep_every=10"),
            f"{M}.checkpoint.keep_every",
            (f"{M}.checkpoint.save_interval={saves}", f"{M}.checkpoint.keep_last=1", f"{M}.checkpoint.keep_every=10"),
        )
        for saves in ("5", "10", "0", "null")
    ),
    Case(
        "best_checkpoints_need_evaluation",
        (f"{M}.checkpoint.keep_best=1", f"{M}.checkpoint.keep_last=1"),
        f"{M}.checkpoint.keep_best",
        (f"{M}.checkpoint.keep_best=1", f"{M}.checkpoint.keep_last=1", *EVALUATED),
    ),
    Case("ramp_has_one_form", (f"{M}.batch_rampup={{}}",), f"{M}.batch_rampup", (f"{M}.batch_rampup.final=7",)),
    Case(
        "ramp_has_one_form",
        (f"{M}.batch_rampup.start=8",),
        f"{M}.batch_rampup",
        (f'{M}.batch_rampup={{"steps": [[0, 8]]}}',),
    ),
    Case(
        "ramp_has_one_form",
        (f"{M}.batch_rampup.steps=[[0, 8]]",),
        f"{M}.batch_rampup",
        (f"{M}.batch_rampup.micro_batch_size_steps=[[8, 2]]",),
    ),
    Case(
        "ramp_has_one_form",
        (f'{M}.batch_rampup={{{LINEAR}, "ramp_samples": 9, "samples_per_increment": 3}}',),
        f"{M}.batch_rampup",
        (f'{M}.batch_rampup={{{LINEAR}, "samples_per_increment": 3}}',),
    ),
    Case(
        "ramp_has_one_form",
        (f"{M}.batch_rampup={{{LINEAR}}}",),
        f"{M}.batch_rampup",
        (f'{M}.batch_rampup={{{LINEAR}, "ramp_samples": 9}}',),
    ),
    Case(
        "ramp_reaches_final",
        (f'{M}.batch_rampup={{"start": 1, "increment": 1, "final": 1002, "ramp_samples": 9}}',),
        f"{M}.batch_rampup.increment",
        (f'{M}.batch_rampup={{"start": 1, "increment": 1, "final": 1001, "ramp_samples": 9}}',),
    ),
    Case(
        "ramp_reaches_final",
        (f'{M}.batch_rampup={{"start": 8, "increment": 10, "final": 32, "ramp_samples": 9}}',),
        f"{M}.batch_rampup.final",
        (f'{M}.batch_rampup={{"start": 8, "increment": 24, "final": 32, "ramp_samples": 9}}',),
    ),
    Case(
        "ramp_reaches_final",
        (f'{M}.batch_rampup={{"start": 1, "increment": 1, "final": 1002, "ramp_samples": 9}}',),
        f"{M}.batch_rampup.increment",
        (f'{M}.batch_rampup={{"start": 1, "increment": 1, "final": 1001, "ramp_samples": 9}}',),
    ),
    Case(
        "ramp_reaches_final",
        (f'{M}.batch_rampup={{"start": 32, "increment": 8, "final": 32, "ramp_samples": 9}}',),
        f"{M}.batch_rampup.start",
        (f'{M}.batch_rampup={{"start": 24, "increment": 8, "final": 32, "ramp_samples": 9}}',),
    ),
    Case(
        "ramp_steps_rise",
        (f'{M}.batch_rampup={{"steps": []}}',),
        f"{M}.batch_rampup.steps",
        (f'{M}.batch_rampup={{"steps": [[0, 8]]}}',),
    ),
    Case(
        "ramp_steps_rise",
        (f'{M}.batch_rampup={{"steps": [[1, 8]]}}',),
        f"{M}.batch_rampup.steps[0]",
        (f'{M}.batch_rampup={{"steps": [[0, 8], [10, 8], [11, 9]]}}',),
    ),
    Case(
        "ramp_steps_rise",
        (f'{M}.batch_rampup={{"steps": [[0, 8], [10, 9], [10, 10]]}}',),
        f"{M}.batch_rampup.steps[2]",
        (f'{M}.batch_rampup={{"steps": [[0, 8], [10, 9], [11, 10]]}}',),
    ),
    Case(
        "ramp_steps_rise",
        (f'{M}.batch_rampup={{"steps": [[0, 8], [10, 7]]}}',),
        f"{M}.batch_rampup.steps[1]",
        (f'{M}.batch_rampup={{"steps": [[0, 8], [10, 8]]}}',),
    ),
    Case(
        "micro_batch_steps_rise",
        (f"{M}.batch_rampup.micro_batch_size_steps=[[16, 2], [16, 4]]",),
        f"{M}.batch_rampup.micro_batch_size_steps[1]",
        (f"{M}.batch_rampup.micro_batch_size_steps=[[16, 2], [17, 1]]",),
    ),
    Case(
        "micro_batch_steps_rise",
        (*AUTO, f"{M}.batch_rampup.chosen_micro_batch_sizes=[[16, 2], [8, 4]]"),
        f"{M}.batch_rampup.chosen_micro_batch_sizes[1]",
        (*AUTO, f"{M}.batch_rampup.chosen_micro_batch_sizes=[[8, 4], [16, 2]]"),
    ),
    Case(
        "auto_goes_by_a_calibration",
        (f"{M}.batch_rampup.micro_batch_size=auto",),
        f"{M}.batch_rampup.calibration",
        AUTO,
    ),
    *(
        Case(
            "auto_goes_by_a_calibration",
            (f"{M}.batch_rampup.{key}={value}",),
            f"{M}.batch_rampup.{key}",
            (*AUTO, f"{M}.batch_rampup.{key}={value}"),
        )
        for key, value in (("calibration", "sweep.json"), ("chosen_micro_batch_sizes", "[[32, 4]]"))
    ),
    Case(
        "auto_chooses_every_size",
        (*AUTO, f"{M}.batch_rampup.micro_batch_size_steps=[[16, 2]]"),
        f"{M}.batch_rampup.micro_batch_size_steps",
        (f"{M}.batch_rampup.micro_batch_size_steps=[[16, 2]]",),
        world_size=2,
    ),
    Case(
        "auto_starts_from_one_sample",
        (*AUTO, "train_micro_batch_size_per_gpu=2"),
        "train_micro_batch_size_per_gpu",
        (*AUTO, "train_micro_batch_size_per_gpu=1"),
        world_size=1,
    ),
    Case(
        "batches_divide_among_replicas",
        (*AUTO, f"{M}.batch_rampup.chosen_micro_batch_sizes=[[32, 16]]"),
        f"{M}.batch_rampup",
        AUTO,
        world_size=4,
    ),
    Case(
        "one_run_length",
        (f"{M}.training.total_steps=3",),
        f"{M}.training",
        (f"{M}.training.total_steps=3", f"{M}.training.total_samples=null"),
    ),
    Case("one_run_length", (f"{M}.training.total_samples=null",), f"{M}.training", (f"{M}.training.total_samples=1",)),
    Case(
        "one_number_format",
        ("fp16.enabled=true", "bf16.enabled=true"),
        "bf16.enabled",
        ("fp16.enabled=true", "bf16.enabled=false"),
    ),
    Case(
        "accumulation_fits_the_format",
        ("data_types.grad_accum_dtype=bf16",),
        "data_types.grad_accum_dtype",
        ("data_types.grad_accum_dtype=fp32",),
    ),
    Case(
        "accumulation_fits_the_format",
        ("bf16.enabled=true", "data_types.grad_accum_dtype=fp16"),
        "data_types.grad_accum_dtype",
        ("bf16.enabled=true", "data_types.grad_accum_dtype=bf16"),
    ),
    Case(
        "accumulation_fits_the_format",
        ("fp16.enabled=true", "data_types.grad_accum_dtype=bf16"),
        "data_types.grad_accum_dtype",
        ("fp16.enabled=true", "data_types.grad_accum_dtype=fp32"),
    ),
    Case(
        "loss_scale_starts_above_minimum",
        ("fp16.enabled=true", "fp16.initial_scale_power=3", "fp16.min_loss_scale=9"),
        "fp16.initial_scale_power",
        ("fp16.enabled=true", "fp16.initial_scale_power=3", "fp16.min_loss_scale=8"),
    ),
    Case(
        "adamw_decouples_weight_decay",
        ("optimizer.params.adam_w_mode=false",),
        "optimizer.params.adam_w_mode",
        ("optimizer.params.adam_w_mode=false", "optimizer.type=Adam"),
    ),
    Case(
        "min_lr_is_not_above_lr",
        (f"{M}.lr_schedule.min_lr=0.0011",),
        f"{M}.lr_schedule.min_lr",
        (f"{M}.lr_schedule.min_lr=0.001",),
    ),
    Case(
        "warmup_ends_before_decay",
        (f'{M}.lr_schedule.decay={{"fraction": 0.04}}',),
        f"{M}.lr_schedule.warmup",
        (f'{M}.lr_schedule.decay={{"fraction": 0.05}}',),
    ),
    Case(
        "warmup_ends_before_decay",
        (f"{M}.lr_schedule.decay=49",),
        f"{M}.lr_schedule.warmup",
        (f"{M}.lr_schedule.decay=50",),
    ),
    Case(
        "warmup_ends_before_decay",
        (
            f"{M}.training.total_samples=null",
            f"{M}.training.total_steps=9",
            f"{M}.lr_schedule.warmup=11",
            f'{M}.lr_schedule.decay={{"tokens": 640}}',
        ),
        f"{M}.lr_schedule.warmup",
        # How many samples a run of 9 steps has is only known once the ramp is expanded, so a share is not compared.
        (
            f"{M}.training.total_samples=null",
            f"{M}.training.total_steps=9",
            f"{M}.lr_schedule.warmup=11",
            f'{M}.lr_schedule.decay={{"fraction": 0.01}}',
        ),
    ),
    Case(
        "warmup_ends_before_decay",
        (f"{M}.lr_schedule.warmup=1001",),
        f"{M}.lr_schedule.warmup",
        (f"{M}.lr_schedule.warmup=1001", f"{M}.lr_schedule.type=constant"),
    ),
    *(
        Case(
            "some_step_has_a_learning_rate",
            (f"{M}.lr_schedule.warmup=0", f"{M}.lr_schedule.decay={decay}", *length),
            f"{M}.lr_schedule.decay",
            (f"{M}.lr_schedule.warmup=0", f"{M}.lr_schedule.decay={decay}", *length, cure),
        )
        for decay, length, cure in (
            ("0", (), f"{M}.lr_schedule.min_lr=1e-5"),
            ('{"tokens": 63}', (), f"{M}.lr_schedule.decay=1"),
            ('{"fraction": 0.0001}', (), f"{M}.training.total_samples=10000"),
            (
                '{"fraction": 0.0}',
                (f"{M}.training.total_samples=null", f"{M}.training.total_steps=9"),
                f"{M}.lr_schedule.decay=1",
            ),
        )
    ),
    Case(
        "auto_tries_few_splits",
        (*TRIES_MANY, f"{M}.pipeline.num_stages=12"),
        f"{M}.batch_rampup.micro_batch_size",
        (*TRIES_MANY, f"{M}.pipeline.num_stages=10"),
    ),
    Case(
        "stable_ends_between",
        (*STABLE, f'{M}.lr_schedule.stable={{"fraction": 0.04}}'),
        f"{M}.lr_schedule.stable",
        (*STABLE, f'{M}.lr_schedule.stable={{"fraction": 0.05}}'),
    ),
    Case(
        "stable_ends_between",
        (*STABLE, f"{M}.lr_schedule.stable=501", f'{M}.lr_schedule.decay={{"fraction": 0.5}}'),
        f"{M}.lr_schedule.stable",
        (*STABLE, f"{M}.lr_schedule.stable=500", f'{M}.lr_schedule.decay={{"fraction": 0.5}}'),
    ),
    Case(
        "stable_ends_between",
        (*STABLE, *NINE_STEPS, f"{M}.lr_schedule.stable=11", f'{M}.lr_schedule.decay={{"tokens": 640}}'),
        f"{M}.lr_schedule.stable",
        (*STABLE, *NINE_STEPS, f"{M}.lr_schedule.stable=11", f'{M}.lr_schedule.decay={{"fraction": 0.1}}'),
    ),
    # Where warmup and decay are in the wrong order, nothing lies between them, which is not the constant part's fault.
    Case(
        "warmup_ends_before_decay",
        (*STABLE, f"{M}.lr_schedule.stable=50", f"{M}.lr_schedule.decay=49"),
        f"{M}.lr_schedule.warmup",
        (*STABLE, f"{M}.lr_schedule.stable=50", f"{M}.lr_schedule.decay=50"),
    ),
    Case(
        "lr_keys_belong_to_the_type",
        (f"{M}.lr_schedule.step_factor=0.5",),
        f"{M}.lr_schedule.step_factor",
        (f"{M}.lr_schedule.step_factor=0.5", f"{M}.lr_schedule.type=step"),
    ),
    Case(
        "head_std_needs_a_head",
        (f"{M}.init.head_std=0.1",),
        f"{M}.init.head_std",
        (f"{M}.init.head_std=0.1", f"{M}.model.tie_embeddings=false"),
    ),
    Case(
        "capped_attention_is_plain",
        (f"{M}.model.attention_logit_cap=50", f"{M}.model.attention=sdpa"),
        f"{M}.model.attention",
        (f"{M}.model.attention_logit_cap=50", f"{M}.model.attention=math"),
    ),
    Case(
        "compiled_blocks_read_one_text",
        (f"{M}.model.compile=true", f"{M}.data.packing=reset"),
        f"{M}.model.compile",
        (f"{M}.model.compile=true", f"{M}.data.packing=continuous"),
    ),
    Case(
        "processes_are_whole_replicas",
        (f"{M}.pipeline.num_stages=2", f"{M}.tensor_parallel.size=2"),
        "",
        (f"{M}.pipeline.num_stages=3", f"{M}.tensor_parallel.size=2"),
        world_size=6,
    ),
    Case(
        "processes_are_whole_replicas",
        (f"{M}.training.world_size=4",),
        "",
        (f"{M}.training.world_size=2",),
        world_size=2,
    ),
    Case(
        "batches_divide_among_replicas",
        (f"{M}.batch_rampup.final=33",),
        f"{M}.batch_rampup",
        (f"{M}.batch_rampup.final=33", f"{M}.pipeline.num_stages=2"),
        world_size=2,
    ),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)


def test_every_rule_has_a_case() -> None:
    assert {rule.function.__name__ for rule in RULES} == {case.rule for case in CASES}


def test_rules_are_documented() -> None:
    assert all(rule.function.__doc__ for rule in RULES)


@each_case
def test_broken_rule_is_the_only_fault(case: Case) -> None:
    (fault,) = faults_of(MINIMAL, case.broken, case.world_size)
    assert fault.path == case.path
    assert fault.message


@each_case
def test_near_miss_is_legal(case: Case) -> None:
    assert faults_of(MINIMAL, case.legal, case.world_size) == ()


@each_case
def test_a_fault_in_another_section_does_not_hide_the_rule(case: Case) -> None:
    faults = faults_of(MINIMAL, (*case.broken, "megastable.logging.interval=0", "wandb.enable=true"), case.world_size)
    assert {fault.path for fault in faults} == {case.path, "megastable.logging.interval", "wandb.enable"}


def test_a_launch_hears_of_every_division_at_once() -> None:
    overrides = (
        "train_micro_batch_size_per_gpu=3",
        f"{M}.tensor_parallel.size=8",
        f"{M}.model.ffn_hidden_size=500",
        f'{M}.batch_rampup={{"steps": [[0, 16], [160, 32]]}}',
    )
    faults = faults_of(MINIMAL, overrides, world_size=8)
    assert [fault.path for fault in faults] == [
        f"{M}.model.num_attention_heads", f"{M}.model.ffn_hidden_size",
        f"{M}.batch_rampup", f"{M}.batch_rampup",
    ]  # fmt: skip
    assert "nearest legal sizes are 15 or 18" in faults[2].message
    assert "nearest legal sizes are 30 or 33" in faults[3].message


def test_unfit_ramp_names_the_legal_neighbours() -> None:
    ramp = '{"start": 192, "increment": 16, "final": 2050, "ramp_samples": 9765625}'
    (fault,) = faults_of(MINIMAL, (f"{M}.batch_rampup={ramp}",))
    assert "2048 or 2064" in fault.message


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("even", '"balanced", "uniform", "parameters", "type:regex"'),
        ("[]", "the number of blocks of every stage"),
        ("[2, -1]", "the number of blocks of every stage"),
        ("[2, 2.0]", "the number of blocks of every stage"),
        ("3", "the number of blocks of every stage"),
        ("type:[", "no regular expression after type:"),
        ("type:a{99999999999}", "no regular expression after type:"),
        ("type:(a+)+b", "must have no groups"),
        ("type:.*.*.*.*b", "at most 3 repetitions"),
        ("type:" + "a" * 101, "100 characters"),
    ],
)
def test_a_partition_that_is_none_is_refused_with_what_there_is(value: str, says: str) -> None:
    (fault,) = faults_of(MINIMAL, (f"{PARTITION}={value}",))
    assert fault.path == PARTITION
    assert says in fault.message


def test_a_type_that_matches_nothing_hears_of_the_classes() -> None:
    (fault,) = faults_of(MINIMAL, (f"{M}.pipeline.num_stages=2", f"{PARTITION}=type:linear"))
    for name in ("VocabularyEmbedding", "EmbeddingFinish", "TransformerBlock", "FinalNorm"):
        assert name in fault.message
