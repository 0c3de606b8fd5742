"""torch.compile of the transformer blocks of a stage. torch's compiler is imported only where it is asked for."""

from __future__ import annotations

import contextlib

import torch
from deepspeed.accelerator import get_accelerator

from megastable.config import RunConfig
from megastable.core.errors import UserError
from megastable.engine.pipeline_module import GptPipeline
from megastable.model.block import TransformerBlock

BACKEND = "inductor"
RECOMPILE_LIMIT = 64
"""All blocks share their compiled forms: one for every micro-batch size in training and one in evaluation. Past torch's
own limit of 8 it would go on uncompiled."""


def check_compiler(run: RunConfig) -> None:
    """Look for the C++ compiler that torch.compile needs on a CPU.

    Raises:
        UserError: the run is to be compiled, and there is none.
    """
    if not run.megastable.model.compile or get_accelerator().device_name() != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "megastable.model.compile: true needs a C++ compiler on a CPU, and none was found; install g++, name one "
            "in the environment variable CXX, or set the key to false"
        ) from None


def compile_blocks(module: GptPipeline, run: RunConfig) -> None:
    """Compile every block of this rank in place, on its first pass; names of parameters stay as they are."""
    blocks = [layer for layer in module.forward_funcs if isinstance(layer, TransformerBlock)]
    if not blocks:
        return
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    _make_tables(blocks[0], run)
    for block in blocks:
        block.compile(backend=BACKEND, dynamic=False)


def _make_tables(block: TransformerBlock, run: RunConfig) -> None:
    """Let rotary tables and attention bias be made: a first pass that makes them would be compiled for itself."""
    model, weight = run.megastable.model, next(block.parameters())
    with torch.no_grad():
        block(weight.new_zeros(1, model.seq_length, model.hidden_size))


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """What is compiled runs as it was written: hooks inside a block are called, and nothing is compiled for them."""
    return torch.compiler.set_stance("force_eager")
