"""``megastable generate``: a look at what a model has learnt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from megastable.cli.export import RunOrCheckpoint, TokenizerFolder
from megastable.core.errors import shown

LINES = "\n\t"
"""What text may do to a terminal beside showing itself."""


def generate(
    model: RunOrCheckpoint,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='the text to go on with; "" begins a document')] = "",
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="tokens to generate at most")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="lower is safer, higher is bolder; 0: always the likeliest token")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, max=2**31, help="draw among so many of the likeliest tokens; 0: all")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=1e-6, max=1.0, help="draw among the likeliest tokens of this probability together"),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="another one draws another text")] = 0,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Let a model go on with a text, token by token, as it is printed.

    One process, in fp32, on a GPU where there is one. The model sees as many of
    the last tokens as a sample had in training (megastable.model.seq_length),
    and ends where it ends the document.

    The same seed prints the same text. What a terminal would obey instead of
    showing it is printed as an escape, such as \\x1b.

    Exit code 2 where there is no checkpoint or no tokenizer.
    """
    from megastable.interop import generation
    from megastable.interop.saved_model import open_saved_model
    from megastable.interop.tokenizer import check_tokenizer_fits, find_tokenizer, open_tokenizer

    saved = open_saved_model(model, lambda text: print(shown(text), file=sys.stderr))
    opened = open_tokenizer(find_tokenizer(saved, tokenizer))
    check_tokenizer_fits(opened, saved)
    sampling = generation.Sampling(temperature, top_k, top_p)
    pieces = generation.generate(saved, opened, prompt, max_tokens, sampling, seed)
    print(shown(prompt, keep=LINES), end="", flush=True)
    for piece in pieces:
        print(shown(piece, keep=LINES), end="", flush=True)
    print()
