"""What a run file needs of the device, asked before anything is built, and what is opened up where the file says so."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

from megastable.config import RunConfig
from megastable.core.errors import UserError


def check_fp16_support(run: RunConfig) -> None:
    """Check that the device computes in fp16 natively, or that the run file accepts slow arithmetic.

    Raises:
        UserError: fp16 is enabled, the device has none and the file does not opt in.
    """
    accelerator = get_accelerator()
    if not run.fp16.enabled or accelerator.is_fp16_supported():
        return
    if not run.megastable.training.fp16_on_cpu:
        raise UserError(
            f"fp16.enabled: this {accelerator.device_name()} has no native fp16; use bf16, or set "
            "megastable.training.fp16_on_cpu=true to try fp16 with slow arithmetic"
        )


def allow_fp16_on_cpu(run: RunConfig) -> None:
    """Make DeepSpeed build an fp16 engine on a CPU without native fp16, where the run file opts in to it.

    DeepSpeed refuses, although torch's arithmetic works there; it is only slow.
    """
    if run.fp16.enabled and run.megastable.training.fp16_on_cpu:
        get_accelerator().is_fp16_supported = lambda: True


def check_compiler(run: RunConfig) -> None:
    """Check that there is the C++ compiler that torch.compile needs on a CPU.

    Raises:
        UserError: the run is to be compiled, and no compiler was found.
    """
    if not run.megastable.model.compile or get_accelerator().device_name() != "cpu":
        return
    # Loading torch's compiler takes seconds, which only a compiled run should pay.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "megastable.model.compile: true needs a C++ compiler on a CPU, and none was found; install g++, name one "
            "in the environment variable CXX, or set the key to false"
        ) from None
