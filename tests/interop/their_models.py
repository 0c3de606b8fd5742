"""Tiny random models of `transformers`, and the same in ours through the tables of ``core.families``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megastable.config import RunConfig
from megastable.core.families.registry import FAMILIES, read_config
from megastable.interop.transforms import to_ours, to_theirs
from megastable.model.layers import gpt_layers
from megastable.model.tensor_parallel import OneProcess
from tests.support.reference import ReferenceModel
from tests.support.tiny_run import tiny_run

HIDDEN_SIZE, HEADS, NUM_LAYERS, SEQ_LENGTH, VOCAB_SIZE = 48, 6, 2, 16, 300
"""Six heads are no power of two, which matters to ALiBi; 300 tokens are padded here to 304."""

_NAMED = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": SEQ_LENGTH,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCAB_SIZE, "n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": HEADS,
        "n_positions": SEQ_LENGTH,
    },
    "bloom": {
        "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": HEADS,
        "seq_length": SEQ_LENGTH,
    },
    "llama": {**_NAMED, "intermediate_size": 80},
    "gpt_neox": {**_NAMED, "intermediate_size": 72},
}  # fmt: skip
"""Family -> sizes by the keys of its config.json."""
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 40}),
    ("bloom", {}),
    ("bloom", {"n_head": 3, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    ("bloom", {"n_head": 8}),
    ("llama", {}),
    ("llama", {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("gpt_neox", {}),
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True}),
    ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500.0}),
    ("gpt_neox", {"rotary_pct": 0.8, "use_parallel_residual": False}),
)  # fmt: skip
"""Family, and keys of config.json beside the sizes."""
VARIANT_NAMES = tuple("-".join([name, *(f"{key}={value}" for key, value in keys.items())]) for name, keys in VARIANTS)


def their_model(family: str, **keys: Any) -> Any:
    """Build a model whose every weight, bias and norm is random and cannot be mistaken for another."""
    of_class = FAMILIES[family]
    config_class = type(transformers.AutoConfig.for_model(of_class.model_type))
    model: nn.Module = getattr(transformers, of_class.class_name)(config_class(**{**SIZES[family], **keys}))
    generator = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return model.eval()


def in_a_file(theirs: Any) -> dict[str, Tensor]:
    """The weights of their model by the names in a file: GPT-NeoX's head has another one there than in the class."""
    head = FAMILIES[theirs.config.model_type].head_name
    names = {"lm_head.weight": head}
    return {names.get(name, name): weight for name, weight in theirs.state_dict().items()}


def our_run(theirs: Any, **changes: Any) -> RunConfig:
    """The run of our model that the config of theirs asks for."""
    section = {**read_config(theirs.config.to_dict()).section, "vocab_padding_multiple": 16, **changes}
    return tiny_run(megastable__model=section)


def our_tensors(theirs: Any, run: RunConfig) -> dict[str, Tensor]:
    """All whole tensors of ours, by the names of a checkpoint."""
    model = run.megastable.model
    return {mapped.name: to_ours(in_a_file(theirs), mapped) for mapped in FAMILIES[str(model.family)].tensors(model)}


def back_to_theirs(ours: dict[str, Tensor], run: RunConfig) -> dict[str, Tensor]:
    """All tensors of theirs out of ours."""
    model = run.megastable.model
    found: dict[str, Tensor] = {}
    for mapped in FAMILIES[str(model.family)].tensors(model):
        found |= to_theirs(ours[mapped.name], mapped)
    return found


def our_model(run: RunConfig, weights: dict[str, Tensor]) -> ReferenceModel:
    """Our layers in one process with ``weights``; the rows that pad the vocabulary are left as they are."""
    ours = ReferenceModel(run)
    with torch.no_grad():
        for name, parameter in checkpoint_names(ours, run).items():
            whole = weights.pop(name)
            parameter[: len(whole)] = whole
    assert not weights, "the table has tensors that our model lacks"
    return ours.eval()


def checkpoint_names(ours: ReferenceModel, run: RunConfig) -> dict[str, nn.Parameter]:
    """The parameters of our model by the names of a checkpoint: each begins with that of its layer."""
    layers = gpt_layers(run, OneProcess())
    named = {}
    for name, parameter in ours.named_parameters():
        first, rest = name.split(".", 1)
        layer = layers[int(first)].name if first.isdigit() else first
        named[f"{layer}.{rest}"] = parameter
    return named
