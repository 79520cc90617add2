"""LoRA (Hu et al., 2021, arXiv:2106.09685) with peft: trained adapters over frozen weights.

A checkpoint holds only what is trained. The frozen weights come from the folder of `start_from`; they are read again
and compared by hash when a run resumes and when it is exported.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from terakoya.components.copy_weights import join_names
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.lora import FOLDER, LoraSettings
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError, import_extra
from terakoya.toolkit.formats import model_folder
from terakoya.toolkit.random_keys import torch_seed
from terakoya.training.model.module_parts import ADAPTED, named_values, top_level_models

KEY = "lora"
ADAPTER = "default"
"""peft's name for a model's only adapter."""
Copies = Mapping[int, Tensor]
"""Copies of tensors as they were at a step, by the tensors' ids."""
NO_COPIES: Copies = MappingProxyType({})


def add_adapters(module: nn.Module, settings: LoraSettings | None, *, seed: int | None) -> None:
    """Adds adapters to every model in `module` and freezes everything else there; None does nothing. Raises UserError
    if peft is not installed, no module has the names of `settings`, or a named module cannot be adapted.

    Adapters are randomly initialised from the run's `seed` alone; None is for adapters that are read after this, and
    leaves torch's generator as it is. Weights under an adapter change their names, from `q.weight` to
    `q.base_layer.weight`.
    """
    if settings is None:
        return
    peft = _peft()
    if seed is not None:
        torch.manual_seed(torch_seed(seed, KEY))
    owners = _owners(module)
    for model in top_level_models(module):
        config = _config(peft, settings, model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about tied weights, which `_check_names` refuses
                peft.inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:  # no module has these names, or none of them can be adapted
            raise UserError(
                f"{KEY}: {type(model).__name__}: {error} Its linear layers: {join_names(linear_names(model), 30)}"
            ) from error
        _check_names(settings, model, owners)
    setattr(module, ADAPTED, True)


def _peft() -> Any:
    model_folder.silence_logging()  # importing peft imports accelerate, and that more
    return import_extra("peft", "lora", KEY)


def _config(peft: Any, settings: LoraSettings, model: PreTrainedModel) -> Any:
    """Returns peft's `LoraConfig` of `settings` for `model`. Raises UserError if no target modules are set, and peft
    has no default for models of this type."""
    kind = model.config.model_type
    known = importlib.import_module("peft.utils").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets: list[str] | str | None
    targets = list(settings.target_modules) if isinstance(settings.target_modules, tuple) else settings.target_modules
    if targets is None and kind not in known:
        raise UserError(
            f"{KEY}.target_modules: peft has no default for models of type {kind}; name linear layers of "
            f'{type(model).__name__}: {join_names(linear_names(model), 30)}; or all of them: "all-linear"'
        )
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM" if model.can_generate() else None
    return peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=known[kind] if targets is None else targets,
        modules_to_save=list(settings.modules_to_save) if settings.modules_to_save else None,
        use_rslora=settings.use_rslora,
        init_lora_weights=settings.init_lora_weights,
        fan_in_fan_out=any(isinstance(each, Conv1D) for each in model.modules()),
        task_type=task,
    )


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of the linear layers of `model`, in the order of the layers."""
    linear = (name for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns name and layer of each adapter in `module`."""
    kind = importlib.import_module("peft.tuners.lora").LoraLayer
    return [(name, each) for name, each in module.named_modules() if isinstance(each, kind)]


def _copies(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns name and wrapper of each module that is trained whole."""
    kind = importlib.import_module("peft.utils").ModulesToSaveWrapper
    return [(name, each) for name, each in module.named_modules() if isinstance(each, kind)]


def _owners(module: nn.Module) -> dict[int, set[str]]:
    """Maps the id of each parameter to all names that it has in `module`."""
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    return owners


def _check_names(settings: LoraSettings, model: PreTrainedModel, owners: Mapping[int, set[str]]) -> None:
    """Raises UserError, with one line for each problem, for names that no module of `model` has, embeddings, and
    weights that another module shares. `owners` are all names of each parameter before adapters were added, see
    `_owners`."""
    kind = type(model).__name__
    layers, copies = dict(_layers(model)), dict(_copies(model))
    problems = []
    for key, found in (("target_modules", layers), ("modules_to_save", copies)):
        wanted = getattr(settings, key)
        for name in wanted if isinstance(wanted, tuple) else ():
            if not any(each == name or each.endswith(f".{name}") for each in found):
                named = linear_names(model) if found is layers else [each for each, _ in model.named_children()]
                problems.append(f"{KEY}.{key}: {kind} has no {name}; expected some of {join_names(named, 30)}")
    for name, layer in layers.items():
        if isinstance(layer.get_base_layer(), nn.Embedding):
            problems.append(
                f"{KEY}.target_modules: {name} of {kind} is an embedding, not a linear layer; to train it whole, name "
                f"it in {KEY}.modules_to_save"
            )
    within = {
        **{name: ("target_modules", layer.get_base_layer()) for name, layer in layers.items()},
        **{name: ("modules_to_save", wrapper.original_module) for name, wrapper in copies.items()},
    }
    for name, (key, part) in within.items():
        own = list(part.named_parameters(remove_duplicate=False))
        outside = {
            owner
            for _, parameter in own
            for owner in owners[id(parameter)]
            if len(owners[id(parameter)]) > sum(parameter is each for _, each in own)
        }
        if outside:
            problems.append(
                f"{KEY}.{key}: a weight of {name} in {kind} is tied to {', '.join(sorted(outside))}, which would not "
                "be trained with it; leave it out, or start from a model without this tie"
            )
    if problems:
        raise UserError("\n".join(problems))


# ------------------------------------------------------------------------------------------------------- export


def merge_adapters(module: nn.Module) -> None:
    """Adds the adapters in `module` to the weights under them and removes them: its models are plain again."""
    for name, layer in _layers(module):
        layer.merge()
        module.set_submodule(name, layer.get_base_layer())
    for name, wrapper in _copies(module):
        module.set_submodule(name, wrapper.modules_to_save[ADAPTER])
    for model in top_level_models(module):
        del model.peft_config
    setattr(module, ADAPTED, False)


def merged_copy(
    parameters: Parameters, module: nn.Module, vocabulary: Vocabulary, copies: Copies = NO_COPIES
) -> nn.Module:
    """Returns a copy of `module`, which must be whole in this process, on the CPU with its adapters, if it has any,
    merged. `copies` are in the place of its own tensors."""
    merged = parameters.objective.build(parameters.architecture, vocabulary)
    add_adapters(merged, parameters.lora, seed=None)
    values = {name: copies.get(id(value), value) for name, value in named_values(module)}
    with torch.no_grad():
        for name, value in named_values(merged):
            value.copy_(values[name] if name in values else attrgetter(name)(module))  # packed
    if parameters.lora is not None:
        merge_adapters(merged)
    return merged


def write_adapters(
    exported: Mapping[str, PreTrainedModel], folder: Path, started_from: Mapping[str, Any], copies: Copies = NO_COPIES
) -> dict[str, Path]:
    """Writes the adapters of the models in `exported` in peft's format, each into a new folder of its own. Returns name
    -> the adapter's folder.

    Args:
        exported: the result of `objective.exports`, by name; adapters are not merged yet.
        folder: parent of the new `adapter/`, which gets a folder for each name; "" is `adapter/` itself.
        started_from: the origin of the weights under each adapter: `LoadedWeights.facts`.
        copies: are in the place of the models' own tensors.
    """
    peft, folders = _peft(), {name: folder / FOLDER / name for name in exported}
    for name, model in exported.items():
        state = {key: copies.get(id(value), value) for key, value in model.state_dict(keep_vars=True).items()}
        values = peft.get_peft_model_state_dict(model, state, adapter_name=ADAPTER, save_embedding_layers=False)
        config = copy.copy(model.peft_config[ADAPTER])
        config.base_model_name_or_path = started_from[name]["folder"]
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        kind = type(model)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        folders[name].mkdir(parents=True)
        config.save_pretrained(str(folders[name]), auto_mapping_dict=None if config.task_type else mapping)
        file = folders[name] / "adapter_model.safetensors"
        tensors = {
            f"base_model.model.{each}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for each, value in values.items()
        }
        with model_folder.safetensors_as_os_errors(file):
            save_file(tensors, file, metadata={"format": "pt"})
    return folders
