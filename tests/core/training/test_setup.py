"""Weights come from the seed alone."""

from pathlib import Path

import torch
import toy

from terakoya.data.store import TokenStore
from terakoya.parameters import Parameters
from terakoya.training.setup import build_module


def test_weights_are_drawn_after_seeding(store: Path) -> None:
    vocabulary = TokenStore.open(store).facts.vocabulary

    def build(seed: int) -> torch.Tensor:
        torch.rand(7)  # whatever was drawn before
        module = build_module(Parameters.from_dict(toy.parameters(store, seed=seed), source="test"), vocabulary)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))
