"""A model that is split over tensor ranks has the logits of `transformers`.

This is a file of its own, so that the ranks of no other test import `transformers`, which takes each of them a second.
"""

from __future__ import annotations

import torch
import torch.distributed
from torch import nn

from megastable.engine.tensor_group import ProcessTensorGroup
from megastable.model.pieces import cut, parameter_shards
from tests.model.test_against_transformers import VOCAB_SIZE, bloom, gpt2, our_run
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceModel

PEERS = {"gpt2": gpt2, "bloom": bloom}


def logits_beside_transformers() -> dict[str, float]:
    """Measure how far the logits of a model that is split over all ranks are from those of `transformers`."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    errors = {}
    for name, make in PEERS.items():
        for slices in (False, True):
            torch.manual_seed(5)  # what is not randomised below is drawn the same on every rank
            theirs, weights, model = make()
            tensor = ProcessTensorGroup(world, rank, slices)
            all_ranks = torch.distributed.group.WORLD
            assert all_ranks is not None
            tensor.connect(all_ranks)
            ours = ReferenceModel(our_run("auto", **model), tensor).eval()
            copy_parts(ours, weights)
            ids = torch.randint(VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(32))
            with torch.no_grad():
                share = ours(ids)
                shares, work = tensor.start_gather(share.contiguous())
                work.wait()
                found = torch.cat(list(shares), dim=-1)[..., :VOCAB_SIZE]
                errors[f"{name}, slices {slices}"] = float((found - theirs(ids).logits).abs().max())
    return errors


def copy_parts(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give every parameter its part of the whole weight of that name; a padded vocabulary is filled up."""
    shards = parameter_shards(model)
    for name, parameter in model.named_parameters():
        shard = shards[parameter]
        parameter.data.copy_(cut(weights[name], shard))
        if shard.padding:
            parameter.data[shard.length :] = 5.0  # what is there is not to be seen


def test_a_split_model_has_the_logits_of_transformers() -> None:
    for errors in run_ranks(logits_beside_transformers, world_size=2):
        assert len(errors) == 4 and max(errors.values()) < 1e-4, errors
