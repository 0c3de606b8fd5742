"""A run on which no rule fires, and for every rule of the preflight what fires it and the nearest that does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megastable.planning.preflight.review import Gpu, LocalText

V100, A100 = Gpu("Tesla V100-SXM2-32GB", (7, 0)), Gpu("NVIDIA A100-SXM4-80GB", (8, 0))
P100, GTX_1660 = Gpu("Tesla P100-PCIE-16GB", (6, 0)), Gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5))

# GPT-2 small in bf16 with customary values: 1000 updates of 512 on 16 replicas, in micro-batches of 8.
SOUND: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "megastable": {
        "model": {
            "num_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "seq_length": 1024,
            "vocab_size": 50257,
        },
        "batch_rampup": {"final": 512},
        "lr_schedule": {"warmup": 30000},
        "data": {"source": {"type": "hf", "path": "somewhere"}},
        "training": {"total_steps": 1000, "seed": 42},
    },
}
WORLD_SIZE = 16
M, PARAMS = "megastable", "optimizer.params"
FP16 = ("bf16.enabled=false", "fp16.enabled=true")
BF16_SUMS = ("data_types.grad_accum_dtype=null",)
STAGES_4 = f"{M}.pipeline.num_stages=4"
RAMP_4 = f'{M}.batch_rampup={{"start": 128, "increment": 128, "final": 512, "ramp_samples": 3000}}'
TINY = (f"{M}.model.hidden_size=64", f"{M}.model.num_attention_heads=4", f"{PARAMS}.lr=1e-3")
LARGE = (  # 1.3B in fp32, so that only its size is different
    f"{M}.model.num_layers=24", f"{M}.model.hidden_size=2048", f"{M}.model.num_attention_heads=16", f"{PARAMS}.lr=2e-4"
)  # fmt: skip


def ramp(start: int, final: int, ramp_samples: int, micro_steps: str = "[]") -> str:
    """Build the override that makes a ramp of the batch."""
    sizes = f'"start": {start}, "increment": {start}, "final": {final}, "ramp_samples": {ramp_samples}'
    return f'{M}.batch_rampup={{{sizes}, "micro_batch_size_steps": {micro_steps}}}'


@dataclass(frozen=True)
class Case:
    """Overrides of the sound run that fire a rule, on which key, and the nearest that do not."""

    rule: str
    fires: tuple[str, ...]
    key: str
    silent: tuple[str, ...]
    level: str = "warning"
    says: str = ""
    gpus: tuple[Gpu, ...] = ()
    silent_gpus: tuple[Gpu, ...] = ()
    text: LocalText | None = None
    silent_text: LocalText | None = None


def bytes_of_text(num_bytes: int, fault: str = "") -> LocalText:
    """Describe so much text in one document."""
    return LocalText(num_documents=1, num_bytes=num_bytes, fault=fault)


IN_BYTES = (f'{M}.data.tokenizer={{"type": "bytes"}}', f"{M}.data.validation_fraction=0")
ALL_TEXT = (f"{M}.data.validation_fraction=0",)
IN_PAIRS = (
    f'{M}.data.source={{"type": "indexed", "path": "x"}}',
    f'{M}.data.tokenizer={{"type": "bytes"}}',
    f"{M}.data.validation_fraction=0",
)
TOKENS_A_STEP = 511 * 1024 + 2  # the last sample needs one label

CASES = (
    Case(
        "fp16_is_clipped",
        (*FP16, "gradient_clipping=0"),
        "gradient_clipping",
        (*FP16, "gradient_clipping=0.1"),
        level="error",
    ),
    Case("fp16_is_clipped", (*FP16, "gradient_clipping=0"), "gradient_clipping", ("gradient_clipping=0",), "error"),
    Case(
        "fp16_forgets_quickly",
        (*FP16, f"{PARAMS}.betas=[0.9, 0.999]"),
        f"{PARAMS}.betas",
        (*FP16, f"{PARAMS}.betas=[0.9, 0.98]"),
        says="1,000 updates",
    ),
    Case(
        "fp16_has_a_floor_under_eps",
        (*FP16, f"{PARAMS}.eps=1e-9"),
        f"{PARAMS}.eps",
        (*FP16, f"{PARAMS}.eps=1e-8"),
    ),
    Case(
        "initial_loss_scale_is_near",
        (*FP16, "fp16.initial_scale_power=17", "fp16.hysteresis=2"),
        "fp16.initial_scale_power",
        (*FP16, "fp16.initial_scale_power=16"),
        level="note",
        says="about 2 steps",
    ),
    Case(
        "initial_loss_scale_is_near",
        (*FP16, "fp16.initial_scale_power=8", "fp16.loss_scale_window=500"),
        "fp16.initial_scale_power",
        (*FP16, "fp16.initial_scale_power=10"),
        says="1,000 updates",
    ),
    Case("loss_scale_is_dynamic", (*FP16, "fp16.loss_scale=1024"), "fp16.loss_scale", (*FP16, "fp16.loss_scale=0")),
    Case(
        "loss_scale_keys_have_a_reader",
        ("fp16.loss_scale=128", "fp16.hysteresis=4"),
        "fp16.loss_scale",
        (*FP16, "fp16.loss_scale=128", "fp16.hysteresis=4"),
        says="weights are bf16",
    ),
    Case(
        "loss_scale_keys_have_a_reader",
        ("bf16.enabled=false", "fp16.initial_scale_power=12"),
        "fp16.initial_scale_power",
        ("bf16.enabled=false", "fp16.initial_scale_power=16"),  # the default, as config.json has it
        says="weights are fp32",
    ),
    Case(
        "bf16_sums_in_fp32",
        (*BF16_SUMS, f"{M}.batch_rampup.final=1152"),
        "data_types.grad_accum_dtype",
        (*BF16_SUMS, f"{M}.batch_rampup.final=1024"),
        says="9 micro-batches",
    ),
    Case(
        "gradients_travel_in_range",
        ("communication_data_type=fp16",),
        "communication_data_type",
        (*FP16, "communication_data_type=fp16"),
    ),
    Case("fp16_has_tensor_cores", FP16, "fp16.enabled", FP16, gpus=(P100,), silent_gpus=(V100,), says="6.0"),
    Case("fp16_has_tensor_cores", FP16, "fp16.enabled", (), gpus=(GTX_1660,), silent_gpus=(P100,)),
    Case("bf16_has_hardware", (), "bf16.enabled", (), gpus=(V100,), silent_gpus=(A100,)),
    *(
        Case(
            "clip_norm_is_customary", (f"gradient_clipping={bad}",), "gradient_clipping", (f"gradient_clipping={good}",)
        )
        for bad, good in ((0, 1.0), (1.1, 1.0), (0.09, 0.1), (5, '"auto"'))
    ),
    Case(
        "betas_are_in_order",
        (f"{PARAMS}.betas=[0.95, 0.9]",),
        f"{PARAMS}.betas",
        (f"{PARAMS}.betas=[0.9, 0.9]",),
    ),
    Case("eps_leaves_adam_adaptive", (f"{PARAMS}.eps=1e-5",), f"{PARAMS}.eps", (f"{PARAMS}.eps=1e-6",)),
    Case("lr_fits_the_size", (f"{PARAMS}.lr=1.9e-3",), f"{PARAMS}.lr", (f"{PARAMS}.lr=1.7e-3",), says="width 768"),
    Case("lr_fits_the_size", (*LARGE, f"{PARAMS}.lr=6.1e-4"), f"{PARAMS}.lr", (*LARGE, f"{PARAMS}.lr=5.9e-4")),
    Case(  # std 0.072
        "lr_fits_the_width",
        (*TINY, f"{PARAMS}.lr=7.3e-3"),
        f"{PARAMS}.lr",
        (*TINY, f"{PARAMS}.lr=7.1e-3"),
        says="std 0.0722",
    ),
    Case(  # sqrt(1 / (3 x 768)) is 0.0208
        "std_fits_the_width",
        (f"{M}.init.scheme=fixed", f"{M}.init.std=0.042"),
        f"{M}.init.std",
        (f"{M}.init.scheme=fixed", f"{M}.init.std=0.041"),
        says="width 768",
    ),
    Case(
        "std_fits_the_width",
        (f"{M}.init.scheme=fixed", f"{M}.init.std=0.005"),
        f"{M}.init.std",
        (f"{M}.init.scheme=fixed", f"{M}.init.std=0.006"),
    ),
    Case(
        "std_fits_the_width",
        (f"{M}.init.embedding_std=1.0",),
        f"{M}.init.embedding_std",
        (f"{M}.init.embedding_std=1.0", f"{M}.model.tie_embeddings=false"),
    ),
    Case(
        "std_fits_the_width",
        (f"{M}.init.head_std=1.0", f"{M}.model.tie_embeddings=false"),
        f"{M}.init.head_std",
        (f"{M}.init.head_std=0.02", f"{M}.model.tie_embeddings=false"),
    ),
    Case(
        "std_fits_the_depth",
        (f"{M}.init.residual_scaling=false", f"{M}.model.num_layers=24"),
        f"{M}.init.residual_scaling",
        (f"{M}.init.residual_scaling=false", f"{M}.model.num_layers=23"),
        says="48 times",
    ),
    Case(
        "head_dim_suits_the_kernels",
        (f"{M}.model.hidden_size=720",),  # 60 a head
        f"{M}.model.num_attention_heads",
        (f"{M}.model.hidden_size=768",),
        says="dimension of 60",
    ),
    Case(
        "head_dim_suits_the_kernels",
        (f"{M}.model.num_attention_heads=24",),
        f"{M}.model.num_attention_heads",
        (*TINY, f"{M}.model.num_attention_heads=2"),  # 32 a head of an experiment
        level="note",
        says="dimension of 32",
    ),
    Case(
        "vocabulary_suits_the_kernels",
        (f"{M}.model.vocab_padding_multiple=1",),
        f"{M}.model.vocab_padding_multiple",
        (f"{M}.model.vocab_padding_multiple=1", f"{M}.model.vocab_size=50304"),
        level="note",
        says="50,257",
    ),
    Case(  # 50304 is 393 times 128
        "vocabulary_suits_the_kernels",
        (f"{M}.tensor_parallel.size=2",),
        f"{M}.model.vocab_padding_multiple",
        (f"{M}.tensor_parallel.size=2", f"{M}.model.vocab_padding_multiple=256"),
        level="note",
        says="25,152 rows a tensor rank",
    ),
    Case(
        "batch_grows_gradually",
        (f'{M}.batch_rampup={{"steps": [[0, 128], [12800, 1024]]}}',),
        f"{M}.batch_rampup.steps",
        (f'{M}.batch_rampup={{"steps": [[0, 128], [12800, 512]]}}',),
        says="from 128 to 1,024, by 8 times",
    ),
    Case(
        "ramp_ends_within_the_run",
        (ramp(128, 512, 10**7),),
        f"{M}.batch_rampup",
        (ramp(128, 512, 10**5),),
    ),
    Case(
        "chosen_micro_batches_are_shown",
        (
            "train_micro_batch_size_per_gpu=1",
            f"{M}.batch_rampup.micro_batch_size=auto",
            f"{M}.batch_rampup.calibration=A100",
        ),
        f"{M}.batch_rampup.micro_batch_size",
        ("train_micro_batch_size_per_gpu=1",),
        level="note",
        says="chosen by A100, from batch 512: 1 x 32",
    ),
    Case(
        "micro_batch_steps_are_reached",
        (f"{M}.batch_rampup.micro_batch_size_steps=[[513, 16]]",),
        f"{M}.batch_rampup.micro_batch_size_steps",
        (f"{M}.batch_rampup.micro_batch_size_steps=[[512, 16]]",),
    ),
    Case(  # 4 replicas x 8: 4 micro-batches on 4 stages
        "bubble_at_the_start_is_small",
        (STAGES_4, ramp(128, 512, 3000)),
        f"{M}.batch_rampup.start",
        (STAGES_4, ramp(384, 768, 3000)),
        says="idle 43%",
    ),
    Case(  # 11 and 12
        "bubble_at_the_start_is_small",
        (STAGES_4, ramp(352, 704, 3000)),
        f"{M}.batch_rampup.start",
        (STAGES_4, ramp(384, 768, 3000)),
        level="note",
        says="idle 21%",
    ),
    Case(
        "bubble_at_the_start_is_small",
        (STAGES_4, f"{M}.batch_rampup.final=352"),
        f"{M}.batch_rampup.final",
        (STAGES_4, f"{M}.batch_rampup.final=384"),
    ),
    Case(
        "bubble_at_the_start_is_small",
        (STAGES_4, f'{M}.batch_rampup={{"steps": [[0, 128], [1000, 512]]}}'),
        f"{M}.batch_rampup.steps",
        (STAGES_4, f'{M}.batch_rampup={{"steps": [[0, 384], [1000, 768]]}}'),
    ),
    Case(
        "bubble_stays_small",
        (STAGES_4, ramp(384, 768, 3000, "[[768, 32]]")),
        f"{M}.batch_rampup.final",
        (STAGES_4, ramp(384, 768, 3000, "[[768, 16]]")),
        says="num_microbatches = 6",
    ),
    Case(
        "global_batch_is_customary",
        (f"{M}.batch_rampup.final=640",),
        f"{M}.batch_rampup.final",
        (f"{M}.batch_rampup.final=512",),
        level="note",
    ),
    Case(
        "global_batch_is_customary",
        (*LARGE, f"{M}.batch_rampup.final=256"),
        f"{M}.batch_rampup.final",
        (*LARGE, f"{M}.batch_rampup.final=1024"),
    ),
    Case(
        "global_batch_is_customary",
        (f"{M}.batch_rampup.final=128",),
        f"{M}.batch_rampup.final",
        (*TINY, f"{M}.batch_rampup.final=128"),
        level="note",
    ),
    Case(
        "accumulation_is_customary",
        ("train_micro_batch_size_per_gpu=32",),
        "train_micro_batch_size_per_gpu",
        ("train_micro_batch_size_per_gpu=16",),
        level="note",
        says="is 1 accumulation steps",
    ),
    Case(
        "accumulation_is_customary",
        ("train_micro_batch_size_per_gpu=2",),
        "train_micro_batch_size_per_gpu",
        ("train_micro_batch_size_per_gpu=8",),
        says="is 16 accumulation steps",
    ),
    Case(  # 4 stages need 12 to be busy
        "accumulation_is_customary",
        (STAGES_4, f"{M}.batch_rampup.final=512"),
        "train_micro_batch_size_per_gpu",
        (STAGES_4, f"{M}.batch_rampup.final=384"),
        level="note",
        says="16 accumulation steps",
    ),
    Case("size_is_customary", TINY, f"{M}.model", (), level="note"),
    Case(
        "warmup_has_customary_length",
        (f"{M}.lr_schedule.warmup=0",),
        f"{M}.lr_schedule.warmup",
        (f"{M}.lr_schedule.warmup=25600",),
    ),
    Case(  # 50 and 100 of 1000 updates are 25,600 and 51,200 samples
        "warmup_has_customary_length",
        (f"{M}.lr_schedule.warmup=25599",),
        f"{M}.lr_schedule.warmup",
        (f"{M}.lr_schedule.warmup=25600",),
        level="note",
    ),
    Case(
        "warmup_has_customary_length",
        (f"{M}.lr_schedule.warmup=51201",),
        f"{M}.lr_schedule.warmup",
        (f"{M}.lr_schedule.warmup=51200",),
        level="note",
        says="101 of 1,000",
    ),
    Case(  # a tenth of the samples is more than a tenth of the updates
        "warmup_has_customary_length",
        (ramp(128, 512, 100_000), f'{M}.lr_schedule.warmup={{"fraction": 0.1}}'),
        f"{M}.lr_schedule.warmup",
        (f'{M}.lr_schedule.warmup={{"fraction": 0.1}}',),
        level="note",
        says="because the ramp",
    ),
    Case(
        "warmup_has_customary_length",
        (f"{M}.training.total_steps=100", f"{M}.lr_schedule.warmup=20000"),
        f"{M}.lr_schedule.warmup",
        (f"{M}.training.total_steps=99", f"{M}.lr_schedule.warmup=20000"),
        level="note",
    ),
    Case(
        "some_step_learns",
        (f"{M}.training.total_steps=2", f"{M}.lr_schedule.warmup=500"),
        f"{M}.lr_schedule",
        (f"{M}.training.total_steps=3", f"{M}.lr_schedule.warmup=500"),
        says="every one of the 2 steps",
    ),
    Case(
        "some_step_learns",
        (f"{M}.lr_schedule.warmup=1", f"{M}.lr_schedule.decay=512"),
        f"{M}.lr_schedule",
        (f"{M}.lr_schedule.warmup=1", f"{M}.lr_schedule.decay=513"),
        says="every one of the 1,000 steps",
    ),
    Case(
        "seed_was_chosen",
        (f'{M}.training={{"total_steps": 1000}}',),
        f"{M}.training.seed",
        (f'{M}.training={{"total_steps": 1000, "seed": 1234}}',),
        level="note",
        says="1234",
    ),
    Case(
        "some_class_expresses_the_model",
        (f"{M}.model.qk_norm=true",),
        f"{M}.model.qk_norm",
        (f"{M}.model.qk_norm=false",),
        level="note",
        says="the nearest is GPTNeoXForCausalLM, where qk_norm is true and must be false",
    ),
    Case(
        "some_class_expresses_the_model",
        (f"{M}.model.norm=rmsnorm", f"{M}.model.activation=swiglu", f"{M}.model.parallel_residual=true"),
        f"{M}.model.parallel_residual",
        (f"{M}.model.norm=rmsnorm", f"{M}.model.activation=swiglu", f"{M}.model.num_key_value_heads=4"),
        level="note",
        says="the nearest is LlamaForCausalLM, where parallel_residual is true and must be false",
    ),
    Case(
        "text_is_here",
        (),
        f"{M}.data.source.path",
        (),
        text=bytes_of_text(0, fault="data does not exist"),
        silent_text=bytes_of_text(10**10),
    ),
    Case(  # an end-of-document token beside the bytes
        "text_holds_a_batch",
        IN_BYTES,
        f"{M}.data.source",
        IN_BYTES,
        level="error",
        text=bytes_of_text(TOKENS_A_STEP - 2),
        silent_text=bytes_of_text(TOKENS_A_STEP - 1),
    ),
    Case(
        "text_holds_a_batch",
        ALL_TEXT,
        f"{M}.data.source",
        ALL_TEXT,
        says="an estimated",
        text=bytes_of_text(4 * TOKENS_A_STEP - 4),
        silent_text=bytes_of_text(4 * TOKENS_A_STEP),
    ),
    Case(
        "text_holds_a_batch",
        ALL_TEXT,
        f"{M}.data.source",
        ALL_TEXT,
        level="error",
        text=bytes_of_text(TOKENS_A_STEP // 2),
        silent_text=bytes_of_text(0, fault="data does not exist"),
    ),
    Case(
        "evaluation_has_text",
        (f"{M}.training.eval_interval=100",),
        f"{M}.training.eval_interval",
        (),
        level="error",
        text=bytes_of_text(10**10),
        silent_text=bytes_of_text(10**10),
    ),
    Case(
        "evaluation_has_text",
        (f"{M}.training.eval_interval=100",),
        f"{M}.training.eval_interval",
        (f"{M}.training.eval_interval=100",),
        level="error",
        text=bytes_of_text(10**10),
        silent_text=LocalText(num_documents=2, num_bytes=10**10),
    ),
    Case(  # tokens are counted, not estimated
        "text_holds_a_batch",
        IN_PAIRS,
        f"{M}.data.source",
        IN_PAIRS,
        level="error",
        says=f"at most {TOKENS_A_STEP - 1:,} training tokens",
        text=LocalText(9, 0, num_tokens=TOKENS_A_STEP - 1),
        silent_text=LocalText(9, 0, num_tokens=TOKENS_A_STEP),
    ),
    Case(  # half of the tokens are not for training
        "text_holds_a_batch",
        (*IN_PAIRS[:2], f"{M}.data.validation_fraction=0.5"),
        f"{M}.data.source",
        IN_PAIRS,
        says="the others are for validation",
        text=LocalText(9, 0, num_tokens=2 * TOKENS_A_STEP - 2),
        silent_text=LocalText(9, 0, num_tokens=2 * TOKENS_A_STEP - 2),
    ),
    Case(  # the fault of a part of a blend
        "text_is_here",
        (),
        f"{M}.data.source.sources[1].source.path",
        (),
        says="text does not exist",
        text=bytes_of_text(0, fault=f"{M}.data.source.sources[1].source.path: text does not exist"),
        silent_text=bytes_of_text(10**10),
    ),
    Case(  # half of the text is not for training
        "text_holds_a_batch",
        (f"{M}.data.validation_fraction=0.5",),
        f"{M}.data.source",
        ALL_TEXT,
        text=bytes_of_text(4 * TOKENS_A_STEP),
        silent_text=bytes_of_text(4 * TOKENS_A_STEP),
    ),
)
