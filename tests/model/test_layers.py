"""The flat list of layers: order, names, tied head, and every combination of parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.model.block import FEED_FORWARDS, GeluFeedForward, TransformerBlock
from megastable.model.ends import EmbeddingFinish, FinalNorm, OutputHead, VocabularyEmbedding
from megastable.model.layers import EMBEDDING_KEY, gpt_layers
from megastable.model.positions import POSITION_EMBEDDINGS
from megastable.model.residual_stream import NORMS
from megastable.model.tensor_parallel import OneProcess
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

UNTIED = {"megastable__model__tie_embeddings": False}


@pytest.mark.parametrize("tied", [True, False])
def test_the_order_of_the_layers(tied: bool) -> None:
    layers = gpt_layers(tiny_run(megastable__model__num_layers=3, megastable__model__tie_embeddings=tied), OneProcess())
    head = VocabularyEmbedding if tied else OutputHead
    assert [layer.module_class for layer in layers] == [
        VocabularyEmbedding, EmbeddingFinish, TransformerBlock, TransformerBlock, TransformerBlock, FinalNorm, head,
    ]  # fmt: skip
    assert [layer.tied_key for layer in layers] == ([EMBEDDING_KEY, *[None] * 5, EMBEDDING_KEY] if tied else [None] * 7)
    # The index in the list seeds a layer, except that both ends of a tie draw the same weights.
    assert [layer.draw_index for layer in layers] == [0, 1, 2, 3, 4, 5, 0 if tied else 6]


def test_the_parameter_names_of_a_layer() -> None:
    """Checkpoints and conversions are made of these."""
    run = tiny_run(**UNTIED, megastable__model__position_embedding="learned", megastable__model__embedding_norm=True)
    names = [sorted(name for name, _ in layer.build(run).named_parameters()) for layer in gpt_layers(run, OneProcess())]
    assert names[0] == ["weight"]
    assert names[1] == ["norm.bias", "norm.weight", "positions.weight"]
    parts = ["attention.output", "attention.query_key_value", "attention_norm"]
    parts += ["feed_forward.input", "feed_forward.output", "feed_forward_norm"]
    assert names[2] == sorted(f"{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    assert names[-2:] == [["norm.bias", "norm.weight"], ["linear.weight"]]


def test_a_tied_head_multiplies_by_the_embedding_and_both_uses_meet_in_its_gradient() -> None:
    run = tiny_run()
    first, *_, last = gpt_layers(run, OneProcess())
    embedding = first.build(run)
    assert isinstance(embedding, VocabularyEmbedding)
    copy = dict(last.build(run).named_parameters())["weight"]
    assert torch.equal(copy, embedding.weight), "a stage's own copy starts with other weights"
    assert first.forward is None and last.forward is not None
    x = torch.randn(1, 3, run.megastable.model.hidden_size)
    torch.testing.assert_close(last.forward(embedding, x), x @ embedding.weight.T)

    model = ReferenceModel(run)
    assert len(list(model.parameters())) == len({id(parameter) for parameter in model.parameters()})
    ids = torch.tensor([[3, 4]])
    model(ids)[..., 7].sum().backward()
    gradient = dict(model.named_parameters())["embedding.weight"].grad
    assert gradient is not None
    assert gradient.abs().amax(dim=1).nonzero().flatten().tolist() == [3, 4, 7], "looked up: 3 and 4; asked for: 7"


def test_the_number_of_parameters() -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    changes: dict[str, Any] = {f"megastable__model__{key}": value for key, value in sizes.items()}
    run = tiny_run(**changes, megastable__model__activation="swiglu", megastable__model__ffn_hidden_size=80)
    attention = (32 * 64 + 64) + (32 * 32 + 32)  # 4 query, 2 key and 2 value heads of 8; the output
    feed_forward = 2 * (32 * 80 + 80) + (80 * 32 + 32)
    block = attention + feed_forward + 2 * 2 * 32
    expected = 304 * 32 + 2 * block + 2 * 32  # the vocabulary is padded to a multiple of 16
    assert sum(parameter.numel() for parameter in ReferenceModel(run).parameters()) == expected


@pytest.mark.parametrize("positions", POSITION_EMBEDDINGS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", FEED_FORWARDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_combination_of_parts_trains_all_its_weights(
    positions: str, norm: str, activation: str, kv_heads: int
) -> None:
    run = tiny_run(
        **UNTIED, megastable__model__num_layers=1, megastable__model__embedding_norm=True,
        megastable__model__position_embedding=positions, megastable__model__norm=norm,
        megastable__model__activation=activation, megastable__model__num_key_value_heads=kv_heads,
    )  # fmt: skip
    size, model = run.megastable.model, ReferenceModel(run)
    token_ids = torch.randint(size.vocab_size, (2, size.seq_length), generator=torch.Generator().manual_seed(1))
    logits = model(token_ids)
    assert logits.shape == (2, size.seq_length, size.padded_vocab_size)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    run, without = tiny_run(megastable__model__dropout=0.2), ReferenceModel(tiny_run())
    model, token_ids = ReferenceModel(run), torch.arange(16).unsqueeze(0)
    model.eval()
    assert torch.equal(model(token_ids), without(token_ids))
    model.train()
    torch.manual_seed(5)
    assert not torch.equal(model(token_ids), model(token_ids))


def test_dropout_acts_on_the_embedding_and_on_both_residual_branches() -> None:
    run = tiny_run(megastable__model__dropout=0.5)
    layers = gpt_layers(run, OneProcess())
    torch.manual_seed(6)
    dropped = layers[1].build(run)(torch.ones(1, 16, 32))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < (dropped == 0).float().mean() < 0.6

    block = layers[2].build(run)
    assert isinstance(block, TransformerBlock) and isinstance(block.feed_forward, GeluFeedForward)
    for branch in (block.attention, block.feed_forward):
        for parameter in branch.parameters():
            torch.nn.init.zeros_(parameter)
        assert branch.output.bias is not None
        torch.nn.init.ones_(branch.output.bias)
    change = block(torch.zeros(1, 16, 32))  # 1 from each branch, each doubled or dropped
    assert set(change.unique().tolist()) == {0.0, 2.0, 4.0}
