"""The list of what a run's module goes through, stage after stage: transforms of the core, and of plugins."""

from __future__ import annotations

import torch
from torch import nn

from terakoya.components.module_transform import STAGES, Copies, ModuleBuild, ModuleTransform, Stage
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.model import compilation, lora
from terakoya.training.model.frozen_layers import freeze

OWN = {
    "frozen_layers": ModuleTransform(
        "freeze", lambda parameters: parameters.frozen_layers >= 0,
        lambda module, build: freeze(
            module, build.architectures, build.vocabulary, count=build.parameters.frozen_layers
        ),
    ),
    "lora": ModuleTransform(
        "adapt", lambda parameters: parameters.lora is not None,
        lambda module, build: lora.add_adapters(module, build.parameters.lora, seed=build.parameters.seed),
    ),
    "compile": ModuleTransform(
        "compile", lambda parameters: True, lambda module, build: compilation.compile_module(module, build)
    ),
}  # fmt: skip
"""Those of the core, by the key of parameters that wants them."""
OWN_PRECISIONS = ("auto", "fp32", "bf16", "fp16")
"""Those of torch's own products, and what the start of a run replaces by one of them; any other `precision` is the name
of a plugin's transform."""


def find_transforms(parameters: Parameters) -> dict[str, ModuleTransform]:
    """Returns the transforms that a run of `parameters` wants, by name, in their order. Raises UserError if no plugin
    has what a key or the `precision` asks for."""
    plugins, precision = registry(), parameters.precision
    if precision not in (*OWN_PRECISIONS, *plugins.transforms):
        raise UserError(f'precision: no plugin has "{precision}"{plugins.missing("transforms", precision)}')
    wants = {key: getattr(parameters, key) for key in ("activation_checkpointing", "activation_offloading")}
    wants["quantization"] = parameters.lora is not None and parameters.lora.quantization is not None
    for key in wants:
        if wants[key] and key not in plugins.transforms:
            raise UserError(f"{key}: no plugin has what this key asks for{plugins.missing('transforms', key)}")
    known = OWN | {name: plugins.transforms[name][0] for name in sorted(plugins.transforms)}
    wanted = [(name, each) for name, each in known.items() if each.is_wanted(parameters)]
    return dict(sorted(wanted, key=lambda item: STAGES.index(item[1].stage)))


def adapt_to_read(module: nn.Module, parameters: Parameters, vocabulary: Vocabulary) -> None:
    """Applies the stage `adapt` to `module`, whose adapters are read next."""
    lora.add_adapters(module, parameters.lora, seed=None)
    for name, each in find_transforms(parameters).items():
        if each.stage == "adapt" and name not in OWN:
            each.apply(module, ModuleBuild(parameters, vocabulary))


def check_device(parameters: Parameters, device: torch.device) -> None:
    """Raises UserError where `device` cannot have what `parameters` want, or no plugin has it."""
    for each in find_transforms(parameters).values():
        each.check(device)


def transform(stage: Stage, module: nn.Module, build: ModuleBuild) -> list[Copies]:
    """Changes `module` by all transforms of `stage` that the run wants; returns what the engine keeps up to date."""
    made = [each.apply(module, build) for each in find_transforms(build.parameters).values() if each.stage == stage]
    return [each for each in made if each is not None]
