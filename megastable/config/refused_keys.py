"""DeepSpeed's keys and values that a run file must not hold: why, and what to write instead.

Each would be ignored, would fail later, or would silently change the numbers. Keys that DeepSpeed does not know
either are faults too, but without an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping

_RAMP_OWNS = "the ramp decides it for every step; write megastable.batch_rampup"
_REMOVED = "DeepSpeed has removed it"
_METRICS = "metrics.jsonl has every step's step_seconds; write megastable.logging.interval for the printed lines"
_TOPOLOGY = (
    "megastable lays out pipeline stages, tensor ranks and replicas; write megastable.pipeline.num_stages and "
    "megastable.tensor_parallel.size"
)
_SEQUENCE = (
    "the sequence is split over the tensor ranks or not at all; write megastable.tensor_parallel.sequence_parallel"
)
_MASTER_WEIGHTS = (
    "the optimizer's weights and moments are always float32; for gradients write data_types.grad_accum_dtype"
)
_ONE_FORMAT = "write bf16.enabled or fp16.enabled: one format holds for the whole model"
_SCALE = "gradients are averaged once, by the token count of the whole global batch; remove it"
_STAGE_3 = "it belongs to ZeRO stage 3, which the pipeline engine refuses; remove it"
_OFFLOAD = "offloading is not supported under the pipeline engine; raise megastable.pipeline.num_stages to save memory"
_FIXED_ZERO = "the pipeline engine needs DeepSpeed's default; remove it"
_DATA = "the data layer decides it; write megastable.data"
_DEFAULT = "megastable relies on DeepSpeed's default; remove it"

REFUSED_KEYS: Mapping[str, str] = {
    # the batch, which the ramp changes between steps: DeepSpeed reads its own keys once, at the start
    "train_batch_size": "the ramp decides it for every step; write megastable.batch_rampup.final",
    "gradient_accumulation_steps": f"{_RAMP_OWNS} and train_micro_batch_size_per_gpu",
    "managed_gradient_accumulation": _RAMP_OWNS,
    "dataloader_drop_last": f"{_DATA}; every global batch is full",
    # the learning rate
    "scheduler": "DeepSpeed's schedules count steps, which a ramp stretches; write megastable.lr_schedule",
    # the layout, which the engine makes from megastable.pipeline and megastable.tensor_parallel
    "pipeline": "write megastable.pipeline (num_stages, activation_checkpointing, partition)",
    "activation_checkpointing": "write megastable.pipeline.activation_checkpointing",
    "tensor_parallel": "write megastable.tensor_parallel.size",
    "expert_parallel": f"the model has no experts; {_TOPOLOGY}",
    "sequence_parallel_size": _SEQUENCE,
    "seq_parallel_communication_data_type": _SEQUENCE,
    "use_data_before_expert_parallelism": "the model has no experts; remove it",
    "elasticity": f"{_REMOVED}; {_TOPOLOGY}",
    # number formats
    "bfloat16": "an old name; write bf16",
    "amp": f"{_REMOVED}; {_ONE_FORMAT}",
    "torch_autocast": _ONE_FORMAT,
    "weight_quantization": _ONE_FORMAT,
    "fp16.auto_cast": "token ids go into the pipeline, so there are no inputs to cast; remove it",
    "fp16.fp16_master_weights_and_grads": _MASTER_WEIGHTS,
    "bf16.bf16_master_weights_and_grads": _MASTER_WEIGHTS,
    "bf16.bf16_optimizer_states": _MASTER_WEIGHTS,
    "bf16.check_grad_overflow": "a step with a gradient that is not finite is never applied; remove it",
    "data_types.param_dtype": _ONE_FORMAT,
    "data_types.buffer_dtype": _ONE_FORMAT,
    "data_types.keep_in_fp32_modules": _ONE_FORMAT,
    # gradients: what changes their scale, their order in memory or the way that they are reduced
    "zero_optimization.round_robin_gradients": "it shuffles the flat weights, which DeepSpeed's own map of them does "
    "not follow, so that norms and checks of copies would look at the wrong ones; remove it",
    "prescale_gradients": _SCALE,
    "gradient_predivide_factor": _SCALE,
    "gradient_allreduce_op": _SCALE,
    "sparse_gradients": f"{_REMOVED}; remove it",
    "disable_allgather": _FIXED_ZERO,
    "fp32_allreduce": 'an old name; write "communication_data_type": "fp32"',
    # the optimizer, which megastable builds from torch's Adam and hands to DeepSpeed
    "optimizer.legacy_fusion": "ZeRO stage 1 does not read it; remove it",
    "optimizer.params.max_grad_norm": "write gradient_clipping at the top level",
    "optimizer.params.torch_adam": "torch's Adam is always used; write optimizer.params.fused to choose its kernel",
    "optimizer.params.foreach": "write optimizer.params.fused to choose torch's kernel",
    "optimizer.params.fp32_optimizer_states": _MASTER_WEIGHTS,
    "optimizer.params.amsgrad": "not supported; remove it",
    "optimizer.params.bias_correction": "Adam's bias correction is always on; remove it",
    "optimizer.params.freeze_step": "it belongs to 1-bit Adam, which the pipeline engine cannot run; remove it",
    "zero_allow_untested_optimizer": "Adam and AdamW are tested; remove it",
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    # ZeRO: what stage 1 under the pipeline engine ignores, forces or cannot run
    "zero_optimization.contiguous_gradients": _FIXED_ZERO,
    "zero_optimization.reduce_scatter": _FIXED_ZERO,
    "zero_optimization.use_multi_rank_bucket_allreduce": _FIXED_ZERO,
    "zero_optimization.allgather_partitions": _FIXED_ZERO,
    "zero_optimization.overlap_comm": "the pipeline engine forces it off; remove it",
    "zero_optimization.compute_grad_norm": "the gradient norm is clipped, logged and watched; remove it",
    "zero_optimization.load_from_fp32_weights": _DEFAULT,
    "zero_optimization.elastic_checkpoint": "it fails under another layout; write megastable.checkpoint",
    "zero_optimization.ignore_unused_parameters": "every weight of the model is used; remove it",
    "zero_optimization.parameter_alignment": _DEFAULT,
    "zero_optimization.enable_sanity_checks": _DEFAULT,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.sub_group_size": _STAGE_3,
    "zero_optimization.stage3_prefetch_bucket_size": _STAGE_3,
    "zero_optimization.stage3_param_persistence_threshold": _STAGE_3,
    "zero_optimization.stage3_model_persistence_threshold": _STAGE_3,
    "zero_optimization.stage3_max_live_parameters": _STAGE_3,
    "zero_optimization.stage3_max_reuse_distance": _STAGE_3,
    "zero_optimization.stage3_module_granularity_threshold": _STAGE_3,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _STAGE_3,
    "zero_optimization.stage3_allgather_sequential": _STAGE_3,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _STAGE_3,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _STAGE_3,
    "zero_optimization.zero_hpz_partition_size": _STAGE_3,
    "zero_optimization.zero_quantized_weights": _STAGE_3,
    "zero_optimization.zero_quantized_nontrainable_weights": _STAGE_3,
    "zero_optimization.zero_quantized_gradients": _STAGE_3,
    "zero_optimization.memory_efficient_linear": _STAGE_3,
    "zero_optimization.pipeline_loading_checkpoint": _STAGE_3,
    "zero_optimization.override_module_apply": _STAGE_3,
    "zero_optimization.log_trace_cache_warnings": _STAGE_3,
    "zero_optimization.leaf_module": _STAGE_3,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _STAGE_3,
    "zero_optimization.mics_shard_size": f"{_REMOVED}; remove it",
    "zero_optimization.mics_hierarchical_params_gather": f"{_REMOVED}; remove it",
    "zero_optimization.legacy_stage1": "an old implementation; remove it",
    "zero_optimization.zeropp_loco_param": f"{_REMOVED}; remove it",
    "allgather_size": "an old name; write zero_optimization.allgather_bucket_size",
    "aio": _OFFLOAD,
    # logging and profiling, which DeepSpeed's pipeline engine leaves out or gets wrong under a ramp
    "steps_per_print": f"its throughput is wrong across a change of the batch; {_METRICS}",
    "wall_clock_breakdown": f"it fails without steps_per_print under the pipeline engine; {_METRICS}",
    "memory_breakdown": f"the pipeline engine prints none; {_METRICS}",
    "dump_state": f"the file is checked and saved with the run; {_METRICS}",
    "timers": f"the pipeline engine never stops them; {_METRICS}",
    "log_level": _METRICS,
    "comms_logger": _METRICS,
    "flops_profiler": "it prints nothing under the pipeline engine; tflops_per_device is in metrics.jsonl",
    "autotuning": "it does not know the ramp; remove it",
    # the data
    "data_efficiency": _DATA,
    "curriculum_learning": f"{_REMOVED}; {_DATA}",
    "vocabulary_size": "write megastable.model.vocab_size",
    # the model: what DeepSpeed would change in it behind the layers' back
    "compression_training": f"{_REMOVED}; remove it",
    "quantize_training": f"{_REMOVED}; remove it",
    "eigenvalue": f"{_REMOVED}; remove it",
    "progressive_layer_drop": f"{_REMOVED}; remove it",
    "sparse_attention": f"{_REMOVED}; write megastable.model.attention",
    "graph_harvesting": f"{_REMOVED}; remove it",
    "compile": "DeepCompile does not run under the pipeline engine; remove it",
    "hybrid_engine": "it is for inference within training; remove it",
    "disable_python_gc": _DEFAULT,
    # checkpoints, which have a format of their own
    "checkpoint": "write megastable.checkpoint",
    "nebula": f"{_REMOVED}; write megastable.checkpoint",
    "datastates_ckpt": "it saves in a call that the pipeline engine never makes; write megastable.checkpoint",
}
"""Dotted path of a refused key -> why, and what to write instead."""

_PARTITIONS_TOO_MUCH = "the pipeline engine refuses it, because it accumulates gradients over micro-batches; write 1"

REFUSED_VALUES: Mapping[str, Mapping[object, str]] = {
    "zero_optimization.stage": {
        0: "it clips by a wrong gradient norm when embeddings are tied, leaves the fp16 loss unscaled and cannot "
        "resume in bf16; write 1",
        2: _PARTITIONS_TOO_MUCH,
        3: _PARTITIONS_TOO_MUCH,
    },
    "optimizer.type": {
        name: "only Adam and AdamW run; write AdamW"
        for name in ("Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "SGD")
    },
}
"""Dotted path of a key -> refused value -> why, and what to write instead."""
