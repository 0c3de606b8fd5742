"""A model that is split over tensor ranks has the logits of `transformers`.

This is a file of its own, so that the ranks of no other test import `transformers`, which takes each of them a second.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from megastable.config import RunConfig
from megastable.engine.tensor_group import ProcessTensorGroup
from megastable.model.pieces import cut, parameter_shards
from tests.interop.their_models import SEQ_LENGTH, VOCAB_SIZE, checkpoint_names, our_run, our_tensors, their_model
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceModel

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "bloom": ("bloom", {}),
    "llama, grouped": ("llama", {"num_key_value_heads": 2}),
    "llama, a key for both ranks": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "gpt_neox": ("gpt_neox", {}),
}
"""Name -> family, and keys of its config.json."""


def logits_beside_transformers() -> dict[str, float]:
    """Measure how far the logits of a model that is split over all ranks are from those of `transformers`."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    errors = {}
    for name, (family, keys) in PEERS.items():
        for slices in (False, True):
            torch.manual_seed(5)  # what is not randomised below is drawn the same on every rank
            theirs = their_model(family, **keys)
            run = our_run(theirs)
            tensor = ProcessTensorGroup(world, rank, slices)
            all_ranks = torch.distributed.group.WORLD
            assert all_ranks is not None
            tensor.connect(all_ranks)
            ours = ReferenceModel(run, tensor).eval()
            copy_parts(ours, run, our_tensors(theirs, run))
            ids = torch.randint(VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(32))
            with torch.no_grad():
                share = ours(ids)
                shares, work = tensor.start_gather(share.contiguous())
                work.wait()
                found = torch.cat(list(shares), dim=-1)[..., :VOCAB_SIZE]
                errors[f"{name}, slices {slices}"] = float((found - theirs(ids).logits).abs().max())
    return errors


def copy_parts(model: ReferenceModel, run: RunConfig, weights: dict[str, torch.Tensor]) -> None:
    """Give every parameter its part of the whole weight of that name; a padded vocabulary is filled up."""
    shards = parameter_shards(model)
    for name, parameter in checkpoint_names(model, run).items():
        shard = shards[parameter]
        parameter.data.copy_(cut(weights[name], shard))
        if shard.padding:
            parameter.data[shard.length :] = 5.0  # what is there is not to be seen


def test_a_split_model_has_the_logits_of_transformers() -> None:
    for errors in run_ranks(logits_beside_transformers, world_size=2):
        assert len(errors) == 2 * len(PEERS) and max(errors.values()) < 1e-4, errors
