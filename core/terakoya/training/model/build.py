"""Builds the root module that a run trains from its parameters."""

from __future__ import annotations

import torch
from torch import nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.model import mup
from terakoya.training.model.activation_checkpointing import apply_activation_checkpointing
from terakoya.training.model.frozen_layers import freeze
from terakoya.training.model.module_parts import all_architectures


def build_module(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """Returns the root module of `parameters`, with weights randomly initialised from the seed alone."""
    parameters.objective.check(vocabulary, sequence_length=parameters.data.sequence_length)
    torch.manual_seed(int(hash_u64(parameters.seed, "weights")) & 0x7FFF_FFFF_FFFF_FFFF)
    module = parameters.objective.build(parameters.architecture, vocabulary)
    mup.scale_initial_values(module, mup.find_scales(parameters, module, vocabulary))
    return module


def build_module_for_training(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """Returns the module of `build_module` with its lowest layers frozen and with activation checkpointing, as
    `parameters` say.

    Raises:
        UserError: as `build_module`, and where layers cannot be frozen or recomputed.
    """
    module = build_module(parameters, vocabulary)
    architectures = all_architectures(parameters.architecture, parameters.objective)
    freeze(module, architectures, vocabulary, count=parameters.frozen_layers)
    apply_activation_checkpointing(module, architectures, vocabulary, parameters.activation_checkpointing)
    return module
