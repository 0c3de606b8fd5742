"""What a run will do, computed from its file and its world size before anything is built. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.config import ModelConfig, RunConfig
from megastable.core.batch_rampup import BatchRampup, RampPhase, RunLength
from megastable.core.flops import ModelShape
from megastable.core.layout import ParallelLayout
from megastable.core.lr_schedule import LR_SCHEDULES, WarmupSchedule


@dataclass(frozen=True)
class RunPlan:
    """A run on its layout: every step's batch and learning rate, and the operations of a sample."""

    run: RunConfig
    layout: ParallelLayout
    ramp: BatchRampup
    phases: list[RampPhase]
    length: RunLength
    lr_schedule: WarmupSchedule
    model_flops_per_sample: int
    hardware_flops_per_sample: int

    @classmethod
    def of(cls, run: RunConfig, world_size: int) -> RunPlan:
        """Plan ``run`` on ``world_size`` processes.

        Raises:
            UserError: the stages do not divide the world, or a batch of the ramp does not divide.
        """
        sections = run.megastable
        layout = ParallelLayout.of_world(
            world_size,
            sections.pipeline.num_stages,
            sections.tensor_parallel.size,
            expected_world_size=sections.training.world_size,
        )
        ramp = sections.batch_rampup.ramp(run.train_micro_batch_size_per_gpu, layout.data_parallel_size)
        phases = ramp.phases(total_samples=sections.training.total_samples, total_steps=sections.training.total_steps)
        length = RunLength.of(phases)
        shape = model_shape(sections.model)
        recomputed = sections.model.num_layers if sections.pipeline.activation_checkpointing else 0
        return cls(
            run=run,
            layout=layout,
            ramp=ramp,
            phases=phases,
            length=length,
            lr_schedule=learning_rate_schedule(run, length),
            model_flops_per_sample=shape.model_flops_per_sample,
            hardware_flops_per_sample=shape.hardware_flops_per_sample(recomputed),
        )


def learning_rate_schedule(run: RunConfig, length: RunLength) -> WarmupSchedule:
    """The schedule of a run file on the samples that the run really takes.

    A decay that ends within the last step ends where that step begins, so that it uses ``min_lr``. Any other end stays
    where the file puts it: a longer or shorter run does not move the learning rate at a sample.
    """
    config, seq_length = run.megastable.lr_schedule, run.megastable.model.seq_length
    end_samples = config.decay.to_samples(length.total_samples, seq_length)
    if length.last_step_start < end_samples <= length.total_samples:
        end_samples = length.last_step_start
    return LR_SCHEDULES[config.type](
        max_lr=run.optimizer.params.lr,
        min_lr=config.min_lr,
        warmup_samples=config.warmup.to_samples(length.total_samples, seq_length),
        end_samples=end_samples,
    )


def model_shape(model: ModelConfig) -> ModelShape:
    """The sizes that decide the operation count."""
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        ffn_hidden_size=model.ffn_size,
        gated_ffn=model.activation == "swiglu",
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size,
    )
