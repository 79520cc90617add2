"""The module that a run trains, built from its parameters."""

from __future__ import annotations

import torch
from torch import nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.model.activation_checkpointing import apply_activation_checkpointing
from terakoya.training.model.frozen_layers import freeze


def build_module(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """The root module of `parameters`, its weights drawn from the seed alone."""
    parameters.objective.check(vocabulary, sequence_length=parameters.data.sequence_length)
    torch.manual_seed(int(hash_u64(parameters.seed, "weights")) & 0x7FFF_FFFF_FFFF_FFFF)
    return parameters.objective.build(parameters.architecture, vocabulary)


def build_module_for_training(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """`build_module`'s as it is trained: lowest layers frozen, blocks computed again in the backward, as `parameters`
    say. UserError as there, and where one of these cannot be."""
    module = build_module(parameters, vocabulary)
    freeze(parameters, module, vocabulary)
    apply_activation_checkpointing(parameters, module, vocabulary)
    return module
