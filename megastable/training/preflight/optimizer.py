"""Rules of the optimizer: clipping, betas, eps, and the learning rate against the model's size and width."""

from __future__ import annotations

from collections.abc import Iterator

from megastable.core.init_std import MatrixSize, megatron_530b
from megastable.training.preflight.customs import customary_peak_lr, short_count
from megastable.training.preflight.finding import Finding
from megastable.training.preflight.review import Review

CLIP_NORMS = (0.1, 1.0)
LARGEST_EPS = 1e-6
LR_TOLERANCE = 3.0
LARGEST_LR_SHARE_OF_STD = 0.1


def clip_norm_is_customary(review: Review) -> Iterator[Finding]:
    """GPT-3, BLOOM, PaLM and Llama clipped at 1.0. Unclipped fp16 has a rule of its own."""
    clip_norm, (lowest, highest) = review.run.clip_norm, CLIP_NORMS
    if lowest <= clip_norm <= highest or (clip_norm == 0 and review.run.fp16.enabled):
        return
    if clip_norm == 0:
        why = "no clipping: one bad batch moves the weights by its full norm"
    elif clip_norm < lowest:
        why = f"{clip_norm:g} is far below a healthy gradient norm: every step is clipped"
    else:
        why = f"{clip_norm:g} clips hardly anything but what has already diverged"
    yield Finding("warning", "gradient_clipping", f"{why}; customary are 0.5 and 1.0", '"gradient_clipping": "auto"')


def betas_are_in_order(review: Review) -> Iterator[Finding]:
    """The second moment remembers longer than the first; otherwise a step has no bound (Kingma and Ba, 1412.6980)."""
    beta1, beta2 = review.run.optimizer.params.betas
    if beta1 > beta2:
        yield Finding(
            "warning",
            "optimizer.params.betas",
            f"beta1 {beta1:g} is above beta2 {beta2:g}, so the mean of the gradient outlives that of its square and a "
            "step has no bound; are they swapped?",
            f'"betas": [{beta2:g}, {beta1:g}], customary [0.9, 0.95]',
        )


def eps_leaves_adam_adaptive(review: Review) -> Iterator[Finding]:
    """Gradients of single weights are small; an eps above them turns Adam into slow momentum."""
    eps = review.run.optimizer.params.eps
    if eps > LARGEST_EPS:
        yield Finding(
            "warning",
            "optimizer.params.eps",
            f"{eps:g} is above {LARGEST_EPS:g}: weights whose gradients are smaller hardly move, in large models most",
            '"eps": 1e-8',
        )


def lr_fits_the_size(review: Review) -> Iterator[Finding]:
    """The larger the model, the smaller its learning rate: GPT-3's table."""
    lr, customary = review.run.optimizer.params.lr, customary_peak_lr(review.num_parameters)
    if review.has_customary_size and lr > LR_TOLERANCE * customary:
        yield Finding(
            "warning",
            "optimizer.params.lr",
            f"{lr:g} is {lr / customary:.1f} times the {customary:.1e} that GPT-3's table gives "
            f"{short_count(review.num_parameters)} parameters at width {review.model.hidden_size}",
            f'"lr": {customary:.1e}',
        )


def lr_fits_the_width(review: Review) -> Iterator[Finding]:
    """Adam moves a weight by about the learning rate; the std of fresh weights, which falls with the width, bounds it.

    For models that the table of ``lr_fits_the_size`` does not reach.
    """
    lr, std = review.run.optimizer.params.lr, megatron_530b(MatrixSize.square(review.model.hidden_size), None)
    if not review.has_customary_size and lr > LARGEST_LR_SHARE_OF_STD * std:
        yield Finding(
            "warning",
            "optimizer.params.lr",
            f"an update moves a weight by about {lr:g}, {lr / std:.0%} of the std {std:.3g} that weights of width "
            f"{review.model.hidden_size} start with",
            f'"lr": at most {LARGEST_LR_SHARE_OF_STD * std:.1e}',
        )
