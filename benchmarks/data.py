"""How fast documents become tokens and tokens samples, beside what else could be done; and what memory that takes.

  python benchmarks/data.py
  python benchmarks/data.py --run-dir runs/quickstart --megabytes 50 --workers 8 --json data.json

In every round, on the same file of JSON lines and each of them first in every second round: `megastable data build`,
and `datasets.map` with the same fast tokenizer, as many processes and a cache that is empty. Both begin with the file
and end with tokens on the disk. Samples are read as a run reads them, micro-batch by micro-batch and compared with
their checksums, from the tokens that were built; --run-dir names a run (of the quickstart, say) to whose samples a
second they are compared. An index of many documents is written and opened. Memory is the largest of a process that
builds and of those that encode for it (pages that they share count in each), for the documents and for four times as
many.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megastable.config import JsonlSourceConfig, SyntheticSourceConfig
from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.host import usable_cpus
from megastable.core.scripts import Parser, run_script
from megastable.data import SampleOrder, TokenDataset, training_micro_batches
from megastable.data.beside import checksums_beside
from megastable.data.build import build_pair
from megastable.data.indexed_format import index_path, open_indexed, tokens_path, write_index
from megastable.data.json_lines import JsonLines
from megastable.data.synthetic import SyntheticDocuments
from megastable.data.text_tokenizers import load_transformers_tokenizer, train_bpe
from megastable.planning.calibration import check_new

WORDS_PER_DOCUMENT = 400
SEQ_LENGTH, BATCH = 128, Batch(32, 4, 8)
MANY_DOCUMENTS = 10_000_000
GOALS = {"build": 1.0, "reading": 100.0, "opening_seconds": 2.0}


@dataclass(frozen=True)
class Measured:
    """All that was measured."""

    workers: int
    num_bytes: int
    num_documents: int
    num_tokens: int
    build_seconds: list[float]
    map_seconds: list[float]
    read_samples_per_second: float
    run_samples_per_second: float | None
    opening_seconds: float
    order_seconds: float
    """To find a batch in the middle of the samples of ``MANY_DOCUMENTS``."""
    build_mib: list[float]
    """Largest memory of the builder and its processes, for the documents and for four times as many."""


def write_rows(path: Path, megabytes: float, times: int = 1) -> int:
    """Write JSON lines of made-up text, ``times`` times as much as asked for; returns the number of documents."""
    spec = SyntheticSourceConfig(type="synthetic", words_per_document=WORDS_PER_DOCUMENT)
    documents = SyntheticDocuments(spec)
    num_documents = max(8, round(times * megabytes * 1e6 / (documents.num_bytes() / len(documents))))
    with path.open("w") as file:
        for index in range(num_documents):
            file.write(json.dumps({"text": documents[index % len(documents)]}) + "\n")
    return num_documents


def build(rows: Path, tokenizer: Path, prefix: Path, workers: int) -> None:
    """Build a pair as the command does."""
    source = JsonLines(JsonlSourceConfig(type="jsonl", path=str(rows)))
    made = load_transformers_tokenizer(str(tokenizer), "tokenizer")
    options: dict[str, Any] = {"validation_fraction": 0.0, "skip_broken": False, "show_progress": False}
    build_pair(source, made, prefix, num_workers=workers, **options)


def map_with_datasets(rows: Path, tokenizer: Path, cache: Path, workers: int) -> None:
    """Tokenise the same rows with the same tokenizer by ``datasets.map``."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    data = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(cache))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [[*ids, loaded.eos_token_id] for ids in loaded(batch["text"], verbose=False)["input_ids"]]}

    data.map(encode, batched=True, remove_columns=data.column_names, num_proc=workers)


def seconds_of(action: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turns(
    first: Callable[[int], object], second: Callable[[int], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Time two actions, each given the number of the round; in every second round the second one comes first."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        order = ((0, first), (1, second)) if turn % 2 == 0 else ((1, second), (0, first))
        for place, action in order:
            seconds[place].append(seconds_of(partial(action, turn)))
    return seconds


def samples_per_second(prefix: Path, vocab_size: int) -> float:
    """Read samples as a run does, for a second at least."""
    opened = open_indexed(prefix)
    dataset = TokenDataset(opened.tokens, SEQ_LENGTH, 0, vocab_size, str(prefix), checksums_beside(opened))
    order = SampleOrder(len(dataset), 1)
    consumed = 0
    started = time.perf_counter()
    while time.perf_counter() - started < 1:
        for _ in training_micro_batches(dataset, order, BATCH, consumed, 0, 1):
            pass
        consumed += BATCH.global_batch_size
    return consumed / (time.perf_counter() - started)


def consumption_of(run_dir: Path) -> float:
    """Return the samples that a run trains on in a second, by the median of its steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["global_batch_size"] / row["step_seconds"] for row in rows)


def open_many(folder: Path) -> tuple[float, float]:
    """Write an index of many documents; returns the seconds to open it, and to find a batch in it."""
    prefix = folder / "many"
    write_index(index_path(prefix), "<u2", np.full(MANY_DOCUMENTS, 8, np.int32))
    with tokens_path(prefix).open("wb") as file:
        file.truncate(2 * 8 * MANY_DOCUMENTS)
    opening = seconds_of(partial(open_indexed, prefix))
    order = SampleOrder(MANY_DOCUMENTS * 8 // SEQ_LENGTH, 1)
    return opening, seconds_of(partial(order, np.arange(300_000, 300_000 + BATCH.global_batch_size)))


def _largest_memory(connection: Any, rows: Path, tokenizer: Path, prefix: Path, workers: int) -> None:
    build(rows, tokenizer, prefix, workers)
    connection.send(memory_with_children_mib(workers))


def memory_with_children_mib(workers: int) -> float:
    """Add the largest memory that this process had, and ``workers`` times that of the largest one it has started."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (own + workers * largest_child) / 1024


def largest_memory_mib(*arguments: Any) -> float:
    """Build in a fresh process, and return the largest memory that it and its own processes had."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_largest_memory, args=(sender, *arguments))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise UserError("the process whose memory is measured has failed")
    return float(receiver.recv())


def measure(folder: Path, arguments: argparse.Namespace) -> Measured:
    """Measure everything in ``folder``, which is left full."""
    rows, tokenizer = folder / "rows.jsonl", folder / "tokenizer"
    num_documents = write_rows(rows, arguments.megabytes)
    with rows.open() as file:
        made = train_bpe(8192, (json.loads(line)["text"] for line, _ in zip(file, range(2000), strict=False)))
    tokenizer.mkdir()
    made.save(tokenizer)
    workers = arguments.workers
    build_seconds, map_seconds = in_turns(
        lambda turn: build(rows, tokenizer, folder / f"pair{turn}", workers),
        lambda turn: map_with_datasets(rows, tokenizer, folder / f"cache{turn}", workers),
        arguments.rounds,
    )
    opening, ordering = open_many(folder)
    write_rows(folder / "more.jsonl", arguments.megabytes, times=4)
    mib = [
        largest_memory_mib(path, tokenizer, folder / f"memory_{path.stem}", workers)
        for path in (rows, folder / "more.jsonl")
    ]
    return Measured(
        workers=workers,
        num_bytes=rows.stat().st_size,
        num_documents=num_documents,
        num_tokens=len(open_indexed(folder / "pair0").tokens),
        build_seconds=build_seconds,
        map_seconds=map_seconds,
        read_samples_per_second=samples_per_second(folder / "pair0", made.vocab_size),
        run_samples_per_second=None if arguments.run_dir is None else consumption_of(arguments.run_dir),
        opening_seconds=opening,
        order_seconds=ordering,
        build_mib=mib,
    )


def show(found: Measured) -> None:
    """Print what was measured beside the goals."""
    megabytes = found.num_bytes / 1e6
    build_rate = megabytes / statistics.median(found.build_seconds)
    print(
        f"{found.num_documents:,} documents, {megabytes:,.1f} MB, {found.num_tokens:,} tokens, "
        f"{found.workers} processes"
    )
    ratios = [theirs / ours for ours, theirs in zip(found.build_seconds, found.map_seconds, strict=True)]
    print(
        f"data build {build_rate:.1f} MB/s; datasets.map takes {statistics.median(ratios):.2f} times as long "
        f"({min(ratios):.2f} to {max(ratios):.2f}); goal: at least {GOALS['build']}"
    )
    print(f"reading {found.read_samples_per_second:,.0f} samples/s of {SEQ_LENGTH} tokens")
    if found.run_samples_per_second is not None:
        ratio = found.read_samples_per_second / found.run_samples_per_second
        print(
            f"  {ratio:,.0f} times the run's {found.run_samples_per_second:,.0f}; goal: at least {GOALS['reading']:.0f}"
        )
    print(
        f"opening {MANY_DOCUMENTS:,} documents {found.opening_seconds:.2f} s, goal: under "
        f"{GOALS['opening_seconds']:.0f}; a batch among them {1000 * found.order_seconds:.2f} ms"
    )
    print(
        f"largest memory of the builder and its processes {found.build_mib[0]:.0f} MiB, of four times the text "
        f"{found.build_mib[1]:.0f}"
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: a value is refused.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20, help="of text (20)")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="processes that tokenise (one a core)")
    parser.add_argument("--rounds", type=int, default=3, help="turns (3)")
    parser.add_argument("--run-dir", type=Path, help="a run whose samples a second to compare with")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all that was measured to a new file")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.workers < 1 or not 0 < arguments.megabytes < 1e6:
        raise UserError("--rounds, --workers and --megabytes: must be at least 1, 1 and above 0")
    if arguments.run_dir is not None and not (arguments.run_dir / "metrics.jsonl").is_file():
        raise UserError(f"--run-dir {arguments.run_dir}: has no metrics.jsonl")
    if arguments.json is not None:
        check_new(arguments.json)
    return arguments


def main() -> None:
    """Measure, print and write."""
    arguments = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="data_"))
    try:
        found = measure(folder, arguments)
    finally:
        shutil.rmtree(folder)
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
