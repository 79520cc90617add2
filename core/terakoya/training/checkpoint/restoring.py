"""The root module of a checkpoint, whole in this process, and what is made of it for programs that do not know us."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from terakoya.components.copy_weights import join_names
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.model import lora
from terakoya.training.model.start_from import load_start_weights

Facts = Mapping[str, Any]
"""What a manifest says under `started_from`: by model's name its `folder`, and the SHA-256 of each of its `files`."""


def restore_module(
    folder: Path,
    parameters: Parameters,
    vocabulary: Vocabulary,
    *,
    tokenizer_folder: Path,
    started_from: Facts | None,
) -> nn.Module:
    """The root module of the checkpoint `folder` with its weights and, where it has them, its adapters, on the CPU.

    Args:
        folder: of which `state/` alone is read.
        started_from: the manifest's; what lies under adapters.

    Raises:
        UserError: the folders under the adapters are gone or changed, or the checkpoint is of another model.
    """
    module = parameters.objective.build(parameters.architecture, vocabulary)
    if parameters.lora is not None:
        try:
            started = load_start_weights(parameters, module, vocabulary, tokenizer_folder)
        except UserError as error:
            raise without_base(error) from error
        check_base(started.facts, started_from)
        lora.add_adapters(module, parameters.lora, seed=parameters.seed)
    checkpoint_state.load_module(folder, module)
    return module


def without_base(error: UserError) -> UserError:
    """`error`, which says that the weights under adapters cannot be read, with the reason why they are needed."""
    return UserError(
        f"{error}\n{lora.KEY}: a checkpoint holds the adapters alone; the folder that they were trained over must be "
        "there as it was"
    )


def check_base(now: Facts, before: Facts | None) -> None:
    """Whether the weights `now` read are those `before`, which adapters were trained over.

    Raises:
        UserError: files differ.
    """
    changed = [
        str(Path(facts["folder"]) / file)
        for name, facts in now.items()
        for file in sorted({**facts["files"], **_files(before, name)})
        if facts["files"].get(file) != _files(before, name).get(file)
    ]
    if changed:
        raise UserError(
            f"start_from: {join_names(changed)}: not what it was when the run started; its adapters fit the weights "
            "from then alone: put them back"
        )


def _files(facts: Facts | None, name: str) -> Mapping[str, str]:
    """The hash of each file of the folder that the model `name` started from."""
    files: Mapping[str, str] = (facts or {}).get(name, {}).get("files", {})
    return files
