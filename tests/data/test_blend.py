"""Blends of sources: the samples of a run by weight, those of each source in its own order, from any position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.batch_rampup import Batch
from megastable.core.blend import Blend
from megastable.core.errors import UserError
from megastable.data import BlendedCorpus, TokenDataset, check_serves_run, prepare_corpus, training_micro_batches
from megastable.data.blended import BlendedOrder, JoinedDatasets
from megastable.data.sample_order import SampleOrder
from tests.data.data_examples import text_data, tiny_model, write_documents


def joined(lengths: list[int]) -> JoinedDatasets:
    """Data sets of samples of two tokens, each token in all of them once."""
    parts = []
    first = 0
    for length in lengths:
        tokens = np.arange(first, first + 2 * length + 1, dtype=np.int32)
        parts.append(TokenDataset(tokens, 2, 0, vocab_size=10**6, name="tokens"))
        first += len(tokens)
    return JoinedDatasets(parts)


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    start=st.integers(0, 300),
    length=st.integers(1, 60),
)
def test_each_source_is_read_in_the_order_that_it_has_alone(
    sources: list[tuple[int, int]], seed: int, start: int, length: int
) -> None:
    datasets = joined([size for size, _ in sources])
    blend = Blend([weight for _, weight in sources])
    order = BlendedOrder.of(blend, datasets, seed)
    whole = order(np.arange(start + length))
    np.testing.assert_array_equal(order(np.arange(start, start + length)), whole[start:])
    total = sum(weight for _, weight in sources)
    for source, (size, weight) in enumerate(sources):
        first = datasets.first_samples[source]
        own = whole[(whole >= first) & (whole < first + size)] - first
        np.testing.assert_array_equal(own, SampleOrder(size, seed)(np.arange(len(own))))
        assert abs(len(own) * total - len(whole) * weight) < total


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_joined_samples_are_those_of_the_parts(lengths: list[int]) -> None:
    datasets = joined(lengths)
    expected = [part[index] for part in datasets.parts for index in range(len(part))]
    assert len(datasets) == sum(lengths)
    for index, (input_ids, labels) in enumerate(expected):
        np.testing.assert_array_equal(datasets[index][0], input_ids)
        np.testing.assert_array_equal(datasets[index][1], labels)
        assert datasets.valid_tokens(index) == 2
    with pytest.raises(IndexError):
        datasets[len(datasets)]


def blended_data(
    tmp_path: Path, weights: tuple[float, float], names: tuple[str, str] = ("a", "b"), **changes: Any
) -> Any:
    for name, letter in (("first", "a"), ("second", "b")):
        write_documents(tmp_path / name, {f"{index}.txt": letter * 30 for index in range(10)})
    parts = [
        {"name": name, "weight": weight, "source": {"type": "text", "path": str(tmp_path / folder)}}
        for name, weight, folder in zip(names, weights, ("first", "second"), strict=True)
    ]
    return text_data(tmp_path, tmp_path / "cache", source={"type": "blend", "sources": tuple(parts)}, **changes)


def prepared(data: Any) -> BlendedCorpus:
    corpus = prepare_corpus(data, tiny_model(), show_progress=False)
    assert isinstance(corpus, BlendedCorpus)
    return corpus


def test_a_blend_has_its_sources_by_name_and_their_samples_by_weight(tmp_path: Path) -> None:
    corpus = prepared(blended_data(tmp_path, (3, 1)))
    assert {name: share for name, (share, _) in corpus.parts.items()} == {"a": 0.75, "b": 0.25}
    assert corpus.num_train_tokens == sum(part.num_train_tokens for _, part in corpus.parts.values()) == 2 * 8 * 31
    assert corpus.num_validation_tokens == 2 * 2 * 31
    assert corpus.samples_per_epoch is None
    order = corpus.order(seed=1)
    items = training_micro_batches(corpus.train, order, Batch(16, 4, 4), 100, 0, 1)
    letters = [ord("a") if ord("a") in row else ord("b") for input_ids, _ in items for row in input_ids.tolist()]
    assert letters.count(ord("a")) == 12 and letters.count(ord("b")) == 4


def test_the_fingerprint_follows_tokens_and_weights_but_not_names(tmp_path: Path) -> None:
    first = prepared(blended_data(tmp_path, (3, 1))).fingerprint
    assert prepared(blended_data(tmp_path, (0.75, 0.25))).fingerprint == first
    assert prepared(blended_data(tmp_path, (3, 1), names=("x", "y"))).fingerprint == first
    assert prepared(blended_data(tmp_path, (1, 3))).fingerprint != first
    write_documents(tmp_path / "second", {"new.txt": "new"})
    assert prepared(blended_data(tmp_path, (3, 1))).fingerprint != first


def test_a_source_with_too_little_text_for_a_batch_is_named(tmp_path: Path) -> None:
    data = blended_data(tmp_path, (3, 1))
    corpus = prepared(data)
    available = len(corpus.train.parts[0])
    fitting = max(batch for batch in range(1, 200) if corpus.blend.most_of(0, batch) <= available)
    check_serves_run(corpus, data, fitting, eval_interval=1)
    with pytest.raises(UserError, match=rf"source\.sources\[0\]: a has {available} training samples, but a global"):
        check_serves_run(corpus, data, fitting + 1, eval_interval=0)


def test_a_fault_of_a_source_names_its_place(tmp_path: Path) -> None:
    data = blended_data(tmp_path, (3, 1))
    for file in (tmp_path / "second").iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"megastable\.data\.source\.sources\[1\]\.source\.path: .* has no text"):
        prepared(data)
