"""Prompts with completions: all tokens are read, those of completions alone are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.errors import UserError
from megastable.core.labels import IGNORED_LABEL
from megastable.data import SampleOrder, TokenDataset, has_tokens_to_learn, token_writer, training_micro_batches
from megastable.data.indexed_format import open_indexed
from megastable.data.prompts import Prompted, PromptSpans
from megastable.data.text_tokenizers import BytesTokenizer
from megastable.data.token_store import open_token_store
from megastable.data.token_writer import write_token_store
from tests.data.data_examples import prepare_single, text_data, tiny_model
from tests.data.test_build import build, command

EOD = BytesTokenizer.eod_id
PAIRS = st.lists(st.tuples(st.text("pq", max_size=9), st.text("xyz", max_size=9)), min_size=1, max_size=8)


def expected_stream(pairs: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """All ids, and which of them are learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for prompt, completion in pairs:
        if completion:
            ids += [*prompt.encode(), *completion.encode(), EOD]
            learned += [*[False] * len(prompt), *[True] * (len(completion) + 1)]
    return ids, learned


def dataset_of(folder: Path, seq_length: int) -> TokenDataset:
    meta, train, _ = open_token_store(folder)
    assert train.prompts is not None
    return TokenDataset(train.tokens, seq_length, meta.eod_id, meta.vocab_size, "tokens", prompts=train.prompts)


@settings(max_examples=60, deadline=None)
@given(pairs=PAIRS, seq_length=st.integers(1, 12), small=st.booleans())
def test_labels_are_those_of_completions_and_are_counted(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], seq_length: int, small: bool
) -> None:
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        if small:  # pieces and batches that end anywhere in a prompt or completion
            patch.setattr(token_writer, "_BATCH_CHARACTERS", 5)
            patch.setattr(token_writer, "_PIECE_CHARACTERS", 2)
        documents = [(Prompted(*pair), False) for pair in pairs]
        meta = write_token_store(folder, documents, BytesTokenizer(), has_prompts=True)
    ids, learned = expected_stream(pairs)
    assert meta.num_empty_documents == sum(not completion for _, completion in pairs)
    dataset = dataset_of(folder, seq_length)
    assert dataset.tokens.tolist() == ids
    found: list[int] = []
    for index in range(len(dataset)):
        input_ids, labels = dataset[index]
        start = index * seq_length
        assert input_ids.tolist()[: len(ids) - start] == ids[start : start + seq_length], "prompts are read"
        assert dataset.valid_tokens(index) == int((labels != IGNORED_LABEL).sum())
        found += labels.tolist()
    wanted = [token if learn else IGNORED_LABEL for token, learn in zip(ids, learned, strict=True)][1:]
    assert found[: len(wanted)] == wanted
    assert set(found[len(wanted) :]) <= {IGNORED_LABEL}


@settings(max_examples=60, deadline=None)
@given(pairs=PAIRS, start=st.integers(0, 60), length=st.integers(0, 60))
def test_any_stretch_knows_its_prompts(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], start: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    write_token_store(folder, [(Prompted(*pair), False) for pair in pairs], BytesTokenizer(), has_prompts=True)
    ids, learned = expected_stream(pairs)
    start = min(start, len(ids))
    stop = min(start + length, len(ids))
    assert PromptSpans(open_indexed(folder / "train")).learned(start, stop).tolist() == learned[start:stop]


def rows(path: Path, pairs: list[tuple[str, str]]) -> Path:
    lines = [json.dumps({"question": prompt, "answer": completion}) for prompt, completion in pairs]
    path.write_text("\n".join(lines) + "\n")
    return path


PAIRS_OF_TEXT = [(f"what is {number}? ", f"it is {number} {'and ' * (number % 4)}") for number in range(30)]
KEYS = ["--prompt-key", "question", "--completion-key", "answer"]


def prompt_source(path: Path) -> dict[str, Any]:
    return {"type": "jsonl", "path": str(path), "prompt_key": "question", "completion_key": "answer"}


def test_lines_have_prompts_and_so_has_a_pair_that_was_built_of_them(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", PAIRS_OF_TEXT)
    direct = prepare_single(text_data(path, tmp_path / "cache", source=prompt_source(path)), tiny_model())
    document = build(path, "-o", tmp_path / "pair", "-t", "bytes", *KEYS, "--validation-fraction", 0.2)
    assert document["documents"] == 30
    source = {
        "type": "indexed", "path": str(tmp_path / "pair"), "validation_path": str(tmp_path / "pair.validation"),
    }  # fmt: skip
    built = prepare_single(text_data(path, tmp_path / "cache", source=source), tiny_model())
    assert built.fingerprint == direct.fingerprint
    for corpus in (direct, built):
        assert corpus.has_prompts
        learned = sum(corpus.train.valid_tokens(index) for index in range(len(corpus.train)))
        assert 0 < learned < corpus.num_train_tokens
    for split in ("train", "validation"):
        ours, theirs = getattr(built, split), getattr(direct, split)
        for index in range(len(theirs)):
            np.testing.assert_array_equal(ours[index][1], theirs[index][1])
    # The last documents of one pair are for validation; their prompts stay prompts.
    tail = prepare_single(
        text_data(path, tmp_path / "cache", source={"type": "indexed", "path": str(tmp_path / "pair")}), tiny_model()
    )
    counted = sum(tail.validation.valid_tokens(index) for index in range(len(tail.validation)))
    assert 0 < counted < tail.num_validation_tokens


def test_the_fingerprint_follows_where_prompts_end(tmp_path: Path) -> None:
    fingerprints = set()
    for index, pair in enumerate([("ab", "cd"), ("abc", "d"), ("", "abcd")]):
        folder = tmp_path / str(index)
        folder.mkdir()
        fingerprints.add(
            write_token_store(folder, [(Prompted(*pair), False)], BytesTokenizer(), has_prompts=True).fingerprint
        )
    assert len(fingerprints) == 3


def test_a_batch_of_prompts_alone_has_nothing_to_learn(tmp_path: Path) -> None:
    pairs = [("p" * 40, "x"), ("q" * 5, "y")]
    write_token_store(tmp_path, [(Prompted(*pair), False) for pair in pairs], BytesTokenizer(), has_prompts=True)
    dataset = dataset_of(tmp_path, 4)
    order = SampleOrder(len(dataset), 0)
    for start in range(len(dataset)):
        batch = Batch(2, 1, 2)
        (first, (labels, denominator)), (_, (more, _)) = training_micro_batches(dataset, order, batch, start, 0, 1)
        counted = int((labels != IGNORED_LABEL).sum() + (more != IGNORED_LABEL).sum())
        assert has_tokens_to_learn(dataset, order, [(start, start + batch.global_batch_size)]) == (counted > 0)
        assert float(denominator) * 2 == counted
        assert first.shape == (1, 4)


def test_what_would_lose_the_prompts_is_refused(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", PAIRS_OF_TEXT)
    build(path, "-o", tmp_path / "pair", "-t", "bytes", *KEYS)
    code, _, message = command("merge", tmp_path / "pair", tmp_path / "pair", "-o", tmp_path / "both")
    assert code == 2 and "has prompts and completions, which are not merged" in message
    code, _, message = command("build", path, "-o", tmp_path / "b", "-t", "bytes", *KEYS[:2])
    assert code == 2 and "--prompt-key and --completion-key go together" in message
    code, _, message = command("build", path, "-o", tmp_path / "b", "-t", "bytes", *KEYS, "--format", "text")
    assert code == 2 and "--prompt-key: is for jsonl" in message
    plain = tmp_path / "plain"
    build(path, "-o", plain, "-t", "bytes", "--text-key", "answer")
    with pytest.raises(UserError, match="instead of a prompt and a completion for each of 30 documents"):
        PromptSpans(open_indexed(plain))
