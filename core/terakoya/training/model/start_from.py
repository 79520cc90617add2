"""The weights that a run starts from: read from Transformers folders, compared name by name, copied into the module.

Transformers reads the folders, so safetensors, .bin and sharded files all work. One error lists everything that does
not match.

See docs/design/start-from.md.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terakoya.atomic_files import FileFacts
from terakoya.components import StartModel
from terakoya.components.copy_weights import join_names
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.config.start_from import StartFrom, model_folder
from terakoya.distributed.context import DistributedContext
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.store.tokenizer_identity import vocabulary_problems
from terakoya.toolkit.attributes import replace_variables
from terakoya.toolkit.deferred_folder import SYNCHRONOUS, deferred_weights
from terakoya.toolkit.deferred_tensors import CannotDeferError, DeferredTensors
from terakoya.toolkit.formats import folder_digests
from terakoya.toolkit.formats.model_folder import silence_transformers
from terakoya.training.model.module_parts import named_values
from terakoya.training.model.start_config import architecture_settings, compare_settings, read_config

KEY = "start_from"


@dataclass
class WeightMatch:
    """How a folder fits the model that starts from it.

    Attributes:
        initialised: names missing in the folder; these weights stay randomly initialised.
        problems: what prevents the start, one line each.
        notes: what to print about a start that succeeds.
    """

    initialised: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedWeights:
    """What a run started from: `facts` for its records, by the model's name, and `notes` to print."""

    facts: dict[str, Any]
    notes: list[str]


def load_on_rank0_and_broadcast(
    parameters: Parameters,
    module: nn.Module,
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    context: DistributedContext,
    deferred: DeferredTensors | None = None,
) -> LoadedWeights:
    """Runs `load_start_weights` on rank 0, the only rank that needs the folders, and broadcasts its result. The engine
    broadcasts the weights later.

    Raises:
        CannotDeferError: on every rank, `load_start_weights` failed where weights were `deferred`.
        UserError: on every rank, its error where they were not.
    """

    def load() -> LoadedWeights | str:
        try:
            return load_start_weights(parameters, module, vocabulary, tokenizer_folder, deferred)
        except Exception as error:
            if deferred is None:
                raise
            return str(error)

    result = context.decide_on_main(load)
    if isinstance(result, str):
        raise CannotDeferError(result)
    if deferred is not None and not context.is_main:
        for value in module.parameters():
            deferred.forget(value)
    return result


def load_start_weights(
    parameters: Parameters,
    module: nn.Module,
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    deferred: DeferredTensors | None = None,
) -> LoadedWeights:
    """Copies the weights of `start_from` into `module`, which `objective.build` returned; all of them or none.

    Args:
        tokenizer_folder: the stores' tokenizer, to compare with the folder's own.
        deferred: has the weights of `module`, and defers those that are read; it is entered.

    Raises:
        CannotDeferError: these weights cannot be `deferred`.
        UserError: one line for each thing that does not fit: settings, vocabulary, weights that are missing, unused or
            of another shape, and shared weights that differ.
    """
    settings = parameters.start_from
    assert settings is not None
    if deferred is not None and settings.grow is not None:
        raise CannotDeferError(f"{KEY}.grow compares what both models compute")
    targets = parameters.objective.exports(module)
    folders = find_folders(settings, targets)
    architectures = parameters.objective.architectures(parameters.architecture)
    settable = architecture_settings(architectures)
    sources: dict[str, PreTrainedModel] = {}
    initialised: dict[str, list[str]] = {}
    problems, facts, notes = [], {}, []
    for name, target in targets.items():
        folder = folders[name]
        where = f"{KEY}: {folder}"
        match = WeightMatch()
        with folder_digests.check_while_loading(folder):
            config = read_config(folder, target, where, architectures)
            source, info = _read_model(folder, type(target), config, where, deferred)
        start = StartModel(
            source, folder, target, architectures, settings, vocabulary, tokenizer_folder, parameters.seed
        )
        sources[name] = _change("vocabulary", start, where, match) if settings.vocabulary else source
        if settings.vocabulary is None:
            _check_vocabulary(start, where, match)
        conflicts, allowed = compare_settings(config, target.config, settable, settings)
        if settings.grow is not None and not conflicts and not match.problems:
            sources[name] = _change("grow", replace(start, source=sources[name]), where, match)
        match.problems += [f"{where}: {each}" for each in conflicts]
        match.notes += [f"{where}: {each}" for each in allowed]
        _compare_weights(sources[name], info, target, settings, where, match)
        initialised[name] = match.initialised
        if untrained := parameters.untrained_problem(match.initialised):
            match.problems.append(f"{where}: {untrained}")
        problems += match.problems
        notes += match.notes
        facts[name] = {"folder": str(folder), "files": _hashes(folder)}
    if problems:
        raise UserError("\n".join(problems))
    for name, target in targets.items():
        _keep_initialised(sources[name], target, initialised[name])
    try:
        parameters.objective.load_models(module, sources)
    except UserError as error:
        raise UserError("\n".join(f"{KEY}: {line}" for line in str(error).splitlines())) from error
    return LoadedWeights(facts, notes)


def check_start_configs(parameters: Parameters, module: nn.Module) -> None:
    """Compares the configs of the folders of `start_from` with those of `module`, and reads no weight.
    Raises as `find_folders` and `read_config`, or one line for each setting that changes the weights' meaning."""
    if parameters.start_from is None:
        return
    targets = parameters.objective.exports(module)
    architectures = parameters.objective.architectures(parameters.architecture)
    settable = architecture_settings(architectures)
    problems = []
    for name, folder in find_folders(parameters.start_from, targets).items():
        where = f"{KEY}: {folder}"
        config = read_config(folder, targets[name], where, architectures)
        conflicts, _ = compare_settings(config, targets[name].config, settable, parameters.start_from)
        problems += [f"{where}: {each}" for each in conflicts]
    if problems:
        raise UserError("\n".join(problems))


def find_folders(settings: StartFrom, targets: Mapping[str, PreTrainedModel]) -> dict[str, Path]:
    """Returns the folder of each model, by its name in `Objective.exports`. Raises UserError if names differ from those
    of the objective, or a folder holds no model."""
    given = settings.folder
    names = ", ".join(sorted(f'"{name}"' for name in targets if name))
    if isinstance(given, Path):
        missing = [name for name in targets if name and not (given / name / "config.json").is_file()]
        if missing and model_folder(given, KEY):
            raise UserError(
                f"{KEY}: {given}: is one model, the objective trains {names}; give a folder for each: "
                '{"NAME": FOLDER, ...}'
            )
        return {name: model_folder(given / name, KEY) for name in targets}
    if given.keys() != targets.keys():
        expected = f"one folder for each of {names}" if names else "one folder, since the objective trains one model"
        raise UserError(f"{KEY}: expected {expected}; got " + ", ".join(f'"{name}"' for name in sorted(given)))
    return {name: model_folder(folder, KEY) for name, folder in given.items()}


# -------------------------------------------------------------------------------------------------------- weights


def _read_model(
    folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig, where: str, deferred: DeferredTensors | None
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Returns the folder's model in fp32, and Transformers' loading info. Raises UserError if there are no weights, or
    they cannot be read."""
    try:
        with silence_transformers():
            source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
            if deferred is not None:
                source = {"pretrained_model_name_or_path": None, "state_dict": deferred_weights(folder, deferred)}
            with replace_variables({SYNCHRONOUS: "1"}):
                model, info = kind.from_pretrained(
                    **source,
                    config=config,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    dtype=torch.float32,
                    attn_implementation="eager",
                )
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise UserError(f"{where}: weights cannot be read: {error}") from error
    model.name_or_path = str(folder)
    return model, info


def _change(key: str, start: StartModel, where: str, match: WeightMatch) -> PreTrainedModel:
    """Returns the model that a plugin makes of that of `start`, as the `key` of `start_from` says. Fills in `match`.
    Raises UserError if no plugin has the key."""
    plugins = registry()
    if key not in plugins.initial_weights:
        raise UserError(f"{KEY}.{key}: no plugin has it{plugins.missing('keys', f'{KEY}.{key}')}")
    try:
        changed, note = plugins.initial_weights[key][0](start)
    except UserError as error:
        match.problems.append(f"{where}: {error}")
        return start.source
    match.notes.append(f"{where}: {note}")
    model: PreTrainedModel = changed
    return model


def _check_vocabulary(start: StartModel, where: str, match: WeightMatch) -> None:
    """Compares the vocabulary of the folder's model with the stores', and leaves out its rows that belong to no token.
    Fills in `match`."""
    config, size = start.source.config, start.vocabulary.size
    differences = vocabulary_problems(start.folder, config, start.vocabulary, start.tokenizer_folder)
    match.problems += [f"{where}: {each}" for each in differences]
    if config.vocab_size > size and not differences:
        match.notes.append(
            f"{where}: its last {config.vocab_size - size:,} embeddings belong to no token; they are left out"
        )
        start.source.resize_token_embeddings(size)


def _compare_weights(
    source: PreTrainedModel,
    info: Mapping[str, Any],
    target: PreTrainedModel,
    settings: StartFrom,
    where: str,
    match: WeightMatch,
) -> None:
    """Fills in `match`: names that are missing or unused, and shapes that differ; `settings` may allow other heads."""
    recomputed = {name for name, _ in source.named_buffers()} - set(source.state_dict())
    missing = sorted(info["missing_keys"])
    unused = sorted(set(info["unexpected_keys"]) - recomputed)
    match.initialised = [name for name in missing if settings.new_heads and _is_head(name, target)]
    dropped = [name for name in unused if settings.drop_heads and _is_head(name, target)]
    for names, allowed, key in ((missing, match.initialised, "new_heads"), (unused, dropped, "drop_heads")):
        refused = [name for name in names if name not in allowed]
        if allowed:
            text = f"{where}: {_name_weights(key, allowed)}"
            match.notes.append(
                f"{text}; they are randomly initialised" if key == "new_heads" else f"{text}; they are not used"
            )
        if refused:
            text = f"{where}: {_name_weights(key, refused)}"
            if all(_is_head(name, target) for name in refused):
                text = f'{text}; allow it with "{KEY}": {{"folder": ..., "{key}": true}}'
            match.problems.append(text)
    surplus = sorted(source.state_dict().keys() - target.state_dict().keys())
    if surplus and not match.problems:  # such as a convolution, which no setting of the run's architecture adds
        match.problems.append(f"{where}: {_name_weights('drop_heads', surplus)}")
    mismatched = [
        f"{name} {tuple(stored)} for {tuple(built)}" for name, stored, built in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        match.problems.append(f"{where}: its weights do not fit its own config.json: {join_names(mismatched)}")
    match.problems += [f"{where}: {text}" for text in info.get("error_msgs", ())]
    ours = {name: value.shape for name, value in named_values(target)}
    theirs = {name: value.shape for name, value in named_values(source)}
    reshaped = [
        f"{name} {tuple(theirs[name])} for {tuple(ours[name])}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
    if reshaped:
        match.problems.append(f"{where}: weights of another shape: {join_names(reshaped, 3)}")


def _name_weights(key: str, names: Sequence[str]) -> str:
    shown = join_names(names)
    return f"has no {shown}" if key == "new_heads" else f"has weights without a place in the model: {shown}"


def _is_head(name: str, target: PreTrainedModel) -> bool:
    """Whether the weight `name` is outside the body: in a head, or in the pooler that feeds one."""
    first, *_ = parts = name.split(".")
    prefix = target.base_model_prefix
    all_body = not prefix or not hasattr(target, prefix)
    # a folder of the body alone has names without the prefix
    body = all_body or first == prefix or first in dict(target.base_model.named_children())
    return not body or "pooler" in parts


def _keep_initialised(source: PreTrainedModel, target: PreTrainedModel, names: list[str]) -> None:
    """Copies the randomly initialised weights `names`, which the folder does not have, from `target` to `source`."""
    ours, theirs = target.state_dict(), source.state_dict()
    for name in names:
        theirs[name].copy_(ours[name])


def _hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of the folder's config and weights, by file."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return {path.name: FileFacts.of(path).sha256 for path in [folder / "config.json", *weights]}
