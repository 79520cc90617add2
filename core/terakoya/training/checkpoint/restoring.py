"""Rebuilds the root module of a checkpoint, whole in this process, for export and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from terakoya.components.copy_weights import join_names
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters, missing_base_error
from terakoya.errors import UserError
from terakoya.toolkit.deferred_tensors import DeferredTensors
from terakoya.toolkit.formats import model_folder
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.model.start_from import load_start_weights
from terakoya.training.model.transforms import adapt_to_read

log = logging.getLogger("terakoya")

StartFacts = Mapping[str, Any]
"""A manifest's `started_from`: name of a model -> its `folder`, and the SHA-256 of each of the folder's `files`."""


def saved_parameters(folder: Path, manifest: Mapping[str, Any]) -> Parameters:
    """Returns the parameters in the `manifest` of the checkpoint `folder`, with the architecture of its step; without
    `parallel`, as a finished model needs no engine. Raises UserError if a plugin has changed, and no longer takes
    them."""
    raw = {**manifest["parameters"], "parallel": {}}
    parameters = Parameters.from_dict(raw, source=str(folder / "manifest.json"))
    return parameters.built_at(manifest)


def restore_module(
    folder: Path,
    parameters: Parameters,
    vocabulary: Vocabulary,
    *,
    tokenizer_folder: Path,
    started_from: StartFacts | None,
    deferred: DeferredTensors | None = None,
) -> nn.Module:
    """Returns the root module of the checkpoint `folder` with its weights and, with `lora`, its adapters, on the CPU.
    Raises UserError if the folders of the base weights are missing or changed, or the checkpoint is of another model.

    Args:
        folder: the checkpoint; only its `state/` is read.
        started_from: the manifest's entry about the base weights under the adapters.
        deferred: reads the weights when their values are asked for; it is entered.
    """
    module = parameters.objective.build(parameters.architecture, vocabulary)
    if parameters.trained_beside is not None:
        assert parameters.start_from is not None, "adapters have base weights"
        positions = parameters.start_from.model_copy(update={"new_positions": True})  # which later steps may change
        based = parameters.model_copy(update={"start_from": positions})
        try:
            started = load_start_weights(based, module, vocabulary, tokenizer_folder)
        except UserError as error:
            raise missing_base_error(error) from error
        check_base_unchanged(started.facts, started_from)
        adapt_to_read(module, parameters, vocabulary)
    checkpoint_state.load_module(folder, module, deferred)
    return module


def models_to_write(
    folder: Path, parameters: Parameters, vocabulary: Vocabulary, *, tokenizer_folder: Path
) -> Mapping[str, PreTrainedModel]:
    """Returns the models of the checkpoint `folder`, by sub-folder, for `model_folder.write` alone: it reads their
    weights one at a time. Where code of plugins needs weights at once, the models have all of them.
    Raises as `restore_module`."""
    assert parameters.lora is None, "adapters are merged into whole weights"
    restore = partial(
        restore_module, folder, parameters, vocabulary, tokenizer_folder=tokenizer_folder, started_from=None
    )
    deferred = DeferredTensors(draws=False)
    try:
        with deferred:
            models = parameters.objective.exports(restore(deferred=deferred))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever code raises that expects values
        log.info("%s: its models are written from whole weights: %s: %s", folder, type(error).__name__, error)
        return parameters.objective.exports(restore())
    for model in models.values():
        setattr(model, model_folder.VALUE_OF, deferred.value)
    return models


def check_base_unchanged(now: StartFacts, before: StartFacts | None) -> None:
    """Raises UserError where the base weights `now` are not those that the adapters were trained with, `before`."""
    changed = []
    for name, facts in now.items():
        files, old = facts["files"], (before or {}).get(name, {}).get("files", {})
        changed += [
            str(Path(facts["folder"]) / each) for each in sorted({**files, **old}) if files.get(each) != old.get(each)
        ]
    if changed:
        raise UserError(
            f"start_from: {join_names(changed)}: changed since the run started; its adapters fit only the original "
            "weights: restore these files"
        )
