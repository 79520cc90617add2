"""The weights a run begins with: read from Transformers folders, compared name by name, put into the drawn module.

Transformers reads the folders, so safetensors, .bin and sharded files all do. One error names all that does not fit.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terakoya.components.copy_weights import join_names
from terakoya.components.vocabulary import Vocabulary
from terakoya.config import lora as lora_settings
from terakoya.config.parameters import Parameters
from terakoya.config.start_from import StartFrom, model_folder
from terakoya.errors import UserError
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.model.module_parts import named_values
from terakoya.training.model.start_config import (
    architecture_settings,
    compare_settings,
    read_config,
    silence_transformers,
)
from terakoya.training.model.start_vocabulary import vocabulary_problems

KEY = "start_from"


@dataclass
class WeightMatch:
    """How a folder fits the model it is for.

    Attributes:
        drawn: names that the folder lacks and that keep their drawn values.
        left: names of the folder that the model has no place for.
        problems: what forbids the start, a line each.
        notes: what is said of a start that stands.
    """

    drawn: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedWeights:
    """What a run began with: `facts` for its record, by model's name, and `notes` to print."""

    facts: dict[str, Any]
    notes: list[str]


def load_on_rank0_and_broadcast(
    parameters: Parameters,
    module: nn.Module,
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    context: DistributedContext,
) -> LoadedWeights:
    """`start` on rank 0, whose weights the engine gives to the others; the folders need not be anywhere else.

    Raises:
        UserError: on every rank, what `start` raises.
    """
    told: LoadedWeights | str = ""
    if context.is_main:
        try:
            told = load_start_weights(parameters, module, vocabulary, tokenizer_folder)
        except UserError as error:
            told = str(error)
    told = context.broadcast(told)
    if isinstance(told, str):
        raise UserError(told)
    return told


def load_start_weights(
    parameters: Parameters, module: nn.Module, vocabulary: Vocabulary, tokenizer_folder: Path
) -> LoadedWeights:
    """Puts the weights of `start_from` into `module`, which `objective.build` made; all of them or none.

    Args:
        tokenizer_folder: the stores' tokenizer, which the folder's own is compared with.

    Raises:
        UserError: a line for each thing that does not fit: settings, vocabulary, weights missing, left over or of
            another shape, and shared weights that differ.
    """
    settings = parameters.start_from
    assert settings is not None
    targets = parameters.objective.exports(module)
    folders = find_folders(settings, targets)
    keys = architecture_settings(parameters)
    sources: dict[str, PreTrainedModel] = {}
    drawn: dict[str, list[str]] = {}
    problems, facts, notes = [], {}, []
    for name, target in targets.items():
        folder = folders[name]
        where = f"{KEY}: {folder}"
        fit = WeightMatch()
        config = read_config(folder, target, where)
        fit.problems += [
            f"{where}: {each}" for each in vocabulary_problems(folder, config, vocabulary, tokenizer_folder)
        ]
        wrong, free = compare_settings(config, target.config, keys)
        fit.problems += [f"{where}: {each}" for each in wrong]
        fit.notes += [f"{where}: {each}" for each in free]
        sources[name], info = _read_model(folder, type(target), config, where)
        _compare_weights(sources[name], info, target, settings, where, fit)
        drawn[name] = fit.drawn
        still = lora_settings.untrained_weights(parameters.lora, fit.drawn)
        if still:
            fit.problems.append(
                f"{where}: lacks {join_names(still)}, which would be drawn and, with lora, stay so; name their modules "
                "in lora.modules_to_save, or train the whole model"
            )
        problems += fit.problems
        notes += fit.notes
        facts[name] = {"folder": str(folder), "files": _hashes(folder)}
    if problems:
        raise UserError("\n".join(problems))
    for name, target in targets.items():
        _keep_initialised(sources[name], target, drawn[name])
    try:
        parameters.objective.load_models(module, sources)
    except UserError as error:
        raise UserError("\n".join(f"{KEY}: {line}" for line in str(error).splitlines())) from error
    return LoadedWeights(facts, notes)


def find_folders(settings: StartFrom, targets: Mapping[str, PreTrainedModel]) -> dict[str, Path]:
    """The folder of each model, by its name in `Objective.exports`.

    Raises:
        UserError: other names than those of the objective, or a folder that holds no model.
    """
    given = settings.folder
    names = ", ".join(sorted(f'"{name}"' for name in targets if name))
    if isinstance(given, Path):
        lacking = [name for name in targets if name and not (given / name / "config.json").is_file()]
        if lacking and (given / "config.json").is_file():
            raise UserError(
                f"{KEY}: {given}: is one model, the objective trains {names}; give a folder for each: "
                '{"NAME": FOLDER, ...}'
            )
        if lacking:
            model_folder(given, KEY)
        return {name: model_folder(given / name, KEY) for name in targets}
    if given.keys() != targets.keys():
        expected = f"one folder for each of {names}" if names else "one folder, since the objective trains one model"
        raise UserError(f"{KEY}: expected {expected}; got " + ", ".join(f'"{name}"' for name in sorted(given)))
    return {name: model_folder(folder, KEY) for name, folder in given.items()}


# -------------------------------------------------------------------------------------------------------- weights


def _read_model(
    folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig, where: str
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The folder's model in fp32, and what Transformers says of its names.

    Raises:
        UserError: no weights, or weights that cannot be read.
    """
    try:
        with silence_transformers():
            model, info = kind.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                dtype=torch.float32,
                attn_implementation="eager",
            )
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise UserError(f"{where}: weights cannot be read: {error}") from error
    return model, info


def _compare_weights(
    source: PreTrainedModel,
    info: Mapping[str, Any],
    target: PreTrainedModel,
    settings: StartFrom,
    where: str,
    fit: WeightMatch,
) -> None:
    """Notes names that are missing or left over, and shapes that differ; heads as `settings` say."""
    made_anew = {name for name, _ in source.named_buffers()} - set(source.state_dict())
    missing = sorted(info["missing_keys"])
    surplus = sorted(set(info["unexpected_keys"]) - made_anew)
    fit.drawn = [name for name in missing if settings.new_heads and _is_head(name, target)]
    fit.left = [name for name in surplus if settings.drop_heads and _is_head(name, target)]
    for names, allowed, what, key in (
        (missing, fit.drawn, "lacks", "new_heads"),
        (surplus, fit.left, "has weights without a place in the model:", "drop_heads"),
    ):
        wrong = [name for name in names if name not in allowed]
        if allowed:
            ends = "; they are drawn" if key == "new_heads" else "; they are left out"
            fit.notes.append(f"{where}: {what} {join_names(allowed)}{ends}")
        if wrong:
            hint = ""
            if all(_is_head(name, target) for name in wrong):
                hint = f'; allow it with "{KEY}": {{"folder": ..., "{key}": true}}'
            fit.problems.append(f"{where}: {what} {join_names(wrong)}{hint}")
    wrong = [
        f"{name} is {tuple(stored)}, expected {tuple(made)}" for name, stored, made in sorted(info["mismatched_keys"])
    ]
    if wrong:
        fit.problems.append(f"{where}: its weights do not fit its own config.json: {join_names(wrong)}")
    fit.problems += [f"{where}: {text}" for text in info.get("error_msgs", ())]
    ours = {name: value.shape for name, value in named_values(target)}
    theirs = {name: value.shape for name, value in named_values(source)}
    wrong = [
        f"{name} is {tuple(theirs[name])}, expected {tuple(ours[name])}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
    if wrong:
        fit.problems.append(f"{where}: weights of another shape: {join_names(wrong, 3)}")


def _is_head(name: str, target: PreTrainedModel) -> bool:
    """Whether the weight `name` lies outside the body: in a head, or in the pooler that feeds one."""
    first, *_ = parts = name.split(".")
    prefix = target.base_model_prefix
    whole = not prefix or not hasattr(target, prefix)
    # a folder of the body alone bears its names without the prefix
    body = whole or first == prefix or first in dict(target.base_model.named_children())
    return not body or "pooler" in parts


def _keep_initialised(source: PreTrainedModel, target: PreTrainedModel, names: list[str]) -> None:
    """Gives `source` what was drawn for `target` of the weights `names`, which the folder lacks."""
    ours, theirs = target.state_dict(), source.state_dict()
    for name in names:
        theirs[name].copy_(ours[name])


def _hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of the folder's config and weights, by file."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    found = {}
    for path in [folder / "config.json", *weights]:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
