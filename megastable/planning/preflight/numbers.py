"""Rules of number formats: fp16 and bf16, the loss scale, what is unsafe together, and what GPUs compute in."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.config import Fp16Config
from megastable.planning.preflight.review import Finding, Gpu, Level, Review

LOSS_SCALE_POWERS = (10, 16)
FP16_SMALLEST = 2.0**-24
"""The smallest fp16 number above 0, a subnormal one."""
FP16_LARGEST = 65504
LEAST_EPS_FP16 = 1e-8
LARGEST_BETA2_FP16 = 0.98
MOST_BF16_ADDENDS = 8
TENSOR_CORES_FROM = (7, 0)
"""CUDA compute capability of Volta."""
BF16_FROM = (8, 0)
"""CUDA compute capability of Ampere."""
NO_TENSOR_CORES = ("GTX 16",)
"""Parts of the names of GPUs that have none in spite of their capability, 7.5."""


def fp16_is_clipped(review: Review) -> Iterator[Finding]:
    """Find fp16 without clipping, the one pair that ends most fp16 runs."""
    if review.run.fp16.enabled and review.run.clip_norm == 0:
        yield Finding(
            "error",
            "gradient_clipping",
            "0 is no clipping, and fp16 lets every gradient pass that is just below overflow: one bad batch moves the "
            "weights by its full norm",
            '"gradient_clipping": 1.0, or "auto"',
        )


def fp16_forgets_quickly(review: Review) -> Iterator[Finding]:
    """Find a beta2 under which skipped steps and spikes stay too long in the second moment: 1 / (1 - beta2) updates."""
    # In bf16, whose range is that of fp32, no overflow makes gradients grow so suddenly.
    beta1, beta2 = review.run.optimizer.params.betas
    if review.run.fp16.enabled and beta2 > LARGEST_BETA2_FP16:
        yield Finding(
            "warning",
            "optimizer.params.betas",
            f"beta2 {beta2:g} averages squared gradients over {1 / (1 - beta2):,.0f} updates; gradients that grow "
            "within fewer, as around fp16 overflows, meet a stale mean and get steps too large",
            f'"betas": [{beta1:g}, 0.95]',
        )


def fp16_has_a_floor_under_eps(review: Review) -> Iterator[Finding]:
    """Find an eps too small for fp16, where gradients that underflow leave nothing else in Adam's denominator."""
    eps = review.run.optimizer.params.eps
    if review.run.fp16.enabled and eps < LEAST_EPS_FP16:
        yield Finding(
            "warning",
            "optimizer.params.eps",
            f"{eps:g} is below 1e-8: fp16 rounds scaled gradients under {FP16_SMALLEST:.0e} to zero, and where the "
            "second moment has decayed with them, the next gradient that is not zero makes a full-sized step",
            '"eps": 1e-8',
        )


def initial_loss_scale_is_near(review: Review) -> Iterator[Finding]:
    """Find a dynamic scale that starts far from where it will stand: too high skips steps, too low climbs for long."""
    fp16 = review.run.fp16
    lowest, highest = LOSS_SCALE_POWERS
    if not fp16.enabled or fp16.loss_scale > 0 or lowest <= fp16.initial_scale_power <= highest:
        return
    power = fp16.initial_scale_power
    if power > highest:
        # DeepSpeed halves the scale at every overflow, once the first of them have used up the hysteresis.
        skipped = power - highest + fp16.hysteresis - 1
        level: Level = "note"
        end = highest
        why = f"about {skipped} steps are skipped on the way down to"
    else:
        # It doubles the scale after a window of updates without overflow.
        updates = (lowest - power) * fp16.loss_scale_window
        level = "warning"
        end = lowest
        why = f"small gradients are lost as zeros for {updates:,} updates on the way to"
    yield Finding(
        level,
        "fp16.initial_scale_power",
        f"{power}: {why} 2^{end}; customary are {lowest} to {highest}",
        f'"initial_scale_power": {end}',
    )


def loss_scale_is_dynamic(review: Review) -> Iterator[Finding]:
    """Find a fixed loss scale, which is right only while gradients stay of one size."""
    fp16 = review.run.fp16
    if fp16.enabled and fp16.loss_scale > 0:
        yield Finding(
            "warning",
            "fp16.loss_scale",
            f"a fixed scale of {fp16.loss_scale:g} cannot fall: once gradients grow past {FP16_LARGEST} / "
            f"{fp16.loss_scale:g} = {FP16_LARGEST / fp16.loss_scale:.3g}, every step is skipped",
            '"loss_scale": 0 (dynamic)',
        )


def loss_scale_keys_have_a_reader(review: Review) -> Iterator[Finding]:
    """Find loss-scale keys beside bf16 or fp32, where nothing reads them."""
    fp16 = review.run.fp16
    defaults = Fp16Config()
    # A key that is written out at its default says nothing about what its writer believes.
    keys = [key for key in Fp16Config.model_fields if getattr(fp16, key) != getattr(defaults, key)]
    if not fp16.enabled and keys:
        verb = "is" if len(keys) == 1 else "are"
        yield Finding(
            "warning",
            f"fp16.{keys[0]}",
            f"fp16 is off and the weights are {review.run.number_format}, which needs no loss scale: "
            f"{', '.join(keys)} {verb} not read",
            'remove the section "fp16", or enable it',
        )


def bf16_sums_in_fp32(review: Review) -> Iterator[Finding]:
    """Find sums of many gradients in bf16, which stop growing at 8 significant bits."""
    # An addend below half of the sum's last bit is lost altogether, and all addends are rounded to that bit.
    addends = max(phase.batch.num_microbatches for phase in review.plan.phases)
    sums_in_bf16 = review.run.number_format == "bf16" and review.run.data_types.grad_accum_dtype != "fp32"
    if sums_in_bf16 and addends > MOST_BF16_ADDENDS:
        yield Finding(
            "warning",
            "data_types.grad_accum_dtype",
            f"gradients of {addends:,} micro-batches are summed in bf16, whose 8 significant bits round each addend to "
            "about 1/256 of the sum",
            '"data_types": {"grad_accum_dtype": "fp32"}',
        )


def gradients_travel_in_range(review: Review) -> Iterator[Finding]:
    """Find unscaled gradients that travel in fp16: bf16 and fp32 runs have no loss scale to keep them in its range."""
    if review.run.number_format != "fp16" and review.run.communication_data_type == "fp16":
        yield Finding(
            "warning",
            "communication_data_type",
            f"unscaled {review.run.number_format} gradients are cast to fp16 between replicas, which turns those below "
            f"{FP16_SMALLEST:.0e} into zeros",
            "remove it",
        )


def has_tensor_cores(gpu: Gpu) -> bool:
    """Tell whether a GPU has tensor cores, as Volta and later have, but for Turing's smallest chips."""
    return gpu.capability >= TENSOR_CORES_FROM and not any(name in gpu.name for name in NO_TENSOR_CORES)


def fp16_has_tensor_cores(review: Review) -> Iterator[Finding]:
    """Find GPUs without tensor cores, on which fp16 has its dangers and little of its speed."""
    for gpu in review.gpus:
        if review.run.fp16.enabled and not has_tensor_cores(gpu):
            yield Finding(
                "warning",
                "fp16.enabled",
                f"{gpu.name} (compute capability {_version(gpu)}) has no tensor cores: fp16 is hardly faster there, "
                "and overflows like anywhere",
                "fp32 (fp16 off), or a GPU from capability 7.0 on",
            )


def bf16_has_hardware(review: Review) -> Iterator[Finding]:
    """Find GPUs before Ampere, on which bf16 is emulated."""
    for gpu in review.gpus:
        if review.run.bf16.enabled and gpu.capability < BF16_FROM:
            yield Finding(
                "warning",
                "bf16.enabled",
                f"{gpu.name} (compute capability {_version(gpu)}) has no bf16 arithmetic, which begins at 8.0",
                "fp16, or fp32",
            )


def _version(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))
