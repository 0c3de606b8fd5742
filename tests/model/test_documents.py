"""Packed documents with reset: each as if it stood alone, for every kind of position and attention backend."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.config import RunConfig
from megastable.config.stages import model_parts, model_shape
from megastable.core.activations import ActivationSettings, activation_bytes
from megastable.core.flops import HALVES
from megastable.core.layers import StageLayers
from megastable.core.model_parts import ATTENTION_KINDS, POSITION_KINDS
from megastable.model.documents import Documents, DocumentScope
from megastable.model.ends import VocabularyEmbedding, tied_logits
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess
from tests.support.tiny_run import tiny_run

END = 0
"""The end-of-document token here."""
SEQ_LENGTH = 16
KINDS = [(position, attention) for position in POSITION_KINDS for attention in ATTENTION_KINDS]
every_kind = pytest.mark.parametrize(("position", "attention"), KINDS)


def run_of(recomputed: bool | list[str] = False, **model: Any) -> RunConfig:
    sizes: dict[str, Any] = {"num_layers": 2, "num_key_value_heads": 2, "rotary_fraction": 0.5, **model}
    changes = {f"megastable__model__{key}": value for key, value in sizes.items()}
    return tiny_run(**changes, megastable__pipeline__activation_checkpointing=recomputed)


class PackedModel(torch.nn.Module):
    """All layers in one process, which read documents where they are told to."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self.scope = DocumentScope()
        layers = gpt_layers(run, OneProcess(), self.scope)
        built = [layer.build(run) for layer in layers[:-1]]
        self.layers = torch.nn.ModuleList(built)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Compute logits, with documents that begin anew at every end-of-document token."""
        with self.scope.reading(Documents(token_ids, END)):
            return self.as_one_text(token_ids)

    def as_one_text(self, x: Tensor) -> Tensor:
        """Compute logits of samples that are read as one text each."""
        for layer in self.layers:
            x = layer(x)
        embedding = self.layers[0]
        assert isinstance(embedding, VocabularyEmbedding)
        return tied_logits(embedding, x)


@cache
def model_of(position: str, attention: str) -> PackedModel:
    """A model whose weights are large enough that attention matters."""
    built = PackedModel(run_of(position_embedding=position, attention=attention)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return built


@st.composite
def packed(draw: st.DrawFn) -> tuple[Tensor, list[list[int]]]:
    """Two packed samples, and where each of their documents begins."""
    samples, begins = [], []
    for _ in range(2):
        tokens = draw(st.lists(st.integers(1, 9), min_size=SEQ_LENGTH, max_size=SEQ_LENGTH))
        ends = draw(st.sets(st.integers(0, SEQ_LENGTH - 1), max_size=5))
        samples.append([END if place in ends else token for place, token in enumerate(tokens)])
        begins.append(sorted({0, *ends}))
    return torch.tensor(samples), begins


@given(packed())
def test_documents_by_hand(drawn: tuple[Tensor, list[list[int]]]) -> None:
    token_ids, begins = drawn
    documents = Documents(token_ids, END)
    for sample, places in enumerate(begins):
        for start, stop in pairwise([*places, SEQ_LENGTH]):
            assert documents.starts[sample, start:stop].tolist() == [start] * (stop - start)
            assert documents.positions[sample, start:stop].tolist() == list(range(stop - start))


@every_kind
@settings(max_examples=4, deadline=None)
@given(drawn=packed())
def test_every_document_is_read_as_if_it_stood_alone(
    position: str, attention: str, drawn: tuple[Tensor, list[list[int]]]
) -> None:
    token_ids, begins = drawn
    model = model_of(position, attention)
    with torch.no_grad():
        found = model(token_ids)
        for sample, places in enumerate(begins):
            for start, stop in pairwise([*places, SEQ_LENGTH]):
                alone = model.as_one_text(token_ids[sample : sample + 1, start:stop])
                torch.testing.assert_close(found[sample : sample + 1, start:stop], alone, rtol=1e-4, atol=1e-5)


@every_kind
def test_a_document_that_is_edited_leaves_its_neighbours_as_they_were(position: str, attention: str) -> None:
    token_ids = torch.tensor([[3, 4, 5, END, 6, 7, 8, 9, 2, END, 4, 5, 6, 7, 8, 9]])
    edited = token_ids.clone()
    edited[0, 5] = 1
    model = model_of(position, attention)
    with torch.no_grad():
        found, after = model(token_ids), model(edited)
        assert torch.equal(found[:, :5], after[:, :5])
        assert torch.equal(found[:, 9:], after[:, 9:])
        assert not torch.equal(found[:, 5:9], after[:, 5:9])
        one_text = model.as_one_text(token_ids), model.as_one_text(edited)
        assert not torch.equal(one_text[0][:, 9:], one_text[1][:, 9:]), "nothing would be seen of a leak"


@every_kind
def test_halves_are_computed_again_with_the_documents_of_their_own_micro_batch(position: str, attention: str) -> None:
    """As in a pipeline, where the next micro-batch passes forward before the backward pass of the one before."""
    batches = torch.randint(4, (2, 2, SEQ_LENGTH), generator=torch.Generator().manual_seed(6))
    gradients = []
    for recomputed in (False, list(HALVES)):
        model = PackedModel(run_of(recomputed, position_embedding=position, attention=attention, dropout=0.2))
        torch.manual_seed(7)
        outputs = [model(batch) for batch in batches]
        for output in outputs:
            output.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for kept, again in zip(*gradients, strict=True):
        assert kept is not None and again is not None and torch.equal(kept, again)


@every_kind
def test_the_forecast_counts_what_all_blocks_share(position: str, attention: str) -> None:
    run = run_of(position_embedding=position, attention=attention, rotary_fraction=1.0)
    settings = ActivationSettings(element_bytes=4, recomputed=(), on_cpu=True)
    sizes = model_shape(run.megastable.model), model_parts(run.megastable.model)
    stage = StageLayers.whole(2)
    packed, whole = (
        activation_bytes(*sizes, stage, replace(settings, resets_at_documents=resets), 3, 1) for resets in (True, False)
    )
    documents = Documents(torch.zeros(3, SEQ_LENGTH, dtype=torch.long), END)
    model = PackedModel(run)
    with model.scope.reading(documents):
        model.as_one_text(torch.zeros(3, SEQ_LENGTH, dtype=torch.long))
    shared = [documents.starts, documents.positions]
    for derived in documents._derived.values():
        shared += derived if isinstance(derived, tuple) else [derived]
    assert packed - whole == sum(tensor.nbytes for tensor in shared)
