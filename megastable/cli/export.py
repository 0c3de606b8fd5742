"""``megastable export``: a model of ours as a folder that transformers loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megastable.cli.model_progress import shown_progress
from megastable.core.errors import shown


class NumberFormat(StrEnum):
    """The number formats of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="a run folder, e.g. runs/quickstart, for its newest checkpoint; or a checkpoint"
    ),
]
TokenizerFolder = Annotated[
    Path | None, typer.Option(help="folder of the tokenizer; default: the one that travels with the checkpoint")
]


def export(
    model: RunOrCheckpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the folder to write; it must not exist")],
    dtype: Annotated[
        NumberFormat | None, typer.Option(help="number format of the weights; default: the one the run computed with")
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="compare the logits of both models; default: where they fit into the free memory",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="largest file of weights, e.g. 500MB or 2GiB")] = "5GB",
    tokenizer: TokenizerFolder = None,
) -> None:
    """Write a model as a folder that transformers loads, and whatever builds on it.

    AutoModelForCausalLM.from_pretrained(OUT) and AutoTokenizer.from_pretrained(OUT)
    open it without any code of ours: safetensors with an index, config.json,
    tokenizer, generation_config.json and a README.md with the facts of the run.

    The class is that of megastable.model.family, or the one of GPT-2, BLOOM,
    Llama and GPT-NeoX that computes the same. Where none does, the message
    says which key is why, as `megastable check` does beforehand.

    Any layout's checkpoint will do. It is compared with its checksums, and read
    one tensor at a time, so that the memory is that of the largest one.

    The proof: the same held-out tokens go through the exported model and ours,
    in fp32, with the same rounded weights. A difference of a logit above 1e-4
    (of the largest logit, where that is above 1) is an error.

    Nothing is overwritten, and OUT appears only when all of it is written and
    compared. Exit code 1 where the logits differ, 2 where it cannot be exported.
    """
    from megastable.interop.export import ExportRequest, export_model
    from megastable.interop.saved_model import open_saved_model
    from megastable.interop.shards import parse_size

    number_format = None if dtype is None else dtype.value
    request = ExportRequest(out, number_format, parse_size(max_shard_size), verify, tokenizer)
    with shown_progress() as progress:
        saved = open_saved_model(model, progress.note)
        export_model(saved, request, progress)
    print(f"wrote {shown(str(out))} from {shown(str(saved.checkpoint))}")
