"""From a checkpoint to finished model folders. Reads the checkpoint alone, never the parameter JSON of the run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components import Exporter
from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError
from terakoya.plugins import registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Exported:
    """What `export` wrote: the folder, the checkpoint it came from, and by sub-folder the Transformers class that loads
    each model. `own_code` names those that travel with their code and are loaded with `trust_remote_code`."""

    out: Path
    checkpoint: Path
    step: int
    models: Mapping[str, str]
    own_code: frozenset[str]


def export(source: Path, out: Path, *, format: str = "huggingface", only: str | None = None) -> Exported:
    """Writes the model(s) of a run, or of one of its checkpoints, into the new folder `out`.

    Args:
        source: RUN (its newest checkpoint that is whole is taken) or RUN/checkpoints/step-...
        format: a registered exporter's name.
        only: the one to write of several models, by its sub-folder, which it keeps: `discriminator`.

    Raises:
        UserError: no checkpoint, a damaged one, a plugin that is missing, no model `only`, or `out` is there already.
    """
    from terakoya.training import checkpoint

    exporter: Exporter = registry().component("exporters", format)()
    folder = find_checkpoint(source)
    wrong = checkpoint.problems(folder)
    if wrong:
        raise UserError(f"{folder}: damaged: {'; '.join(wrong[:5])}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out}: is there already; choose a new folder or remove it")
    manifest = checkpoint.read_manifest(folder)
    models = build_models(folder, manifest)
    if only is not None:
        if only not in models:
            there = ", ".join(sorted(models)) if "" not in models else "one model, without a name"
            raise UserError(f"--only {only}: {folder} holds no such model; it holds {there}")
        models = {only: models[only]}
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    exporter.export(models, folder / "tokenizer", staging)
    if out.is_dir():
        out.rmdir()
    staging.rename(out)
    autos = {name: type(model)._auto_class for name, model in models.items()}
    classes = {name: autos[name] or type(model).__name__ for name, model in models.items()}
    return Exported(out, folder, manifest["step"], classes, frozenset(name for name in autos if autos[name]))


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that `source` means: itself, or the newest one of a run.

    Raises:
        UserError: there is none.
    """
    from terakoya.training import checkpoint

    if (source / "manifest.json").is_file():
        return source
    found = checkpoint.committed(source / "checkpoints")
    if not found:
        raise UserError(f"{source}: expected a run or a checkpoint, found no checkpoint in it")
    return found[-1][1]


def build_models(folder: Path, manifest: Mapping[str, Any]) -> Mapping[str, PreTrainedModel]:
    """The models of the checkpoint `folder` with its weights, on the CPU, by sub-folder."""
    from terakoya.parameters import Parameters
    from terakoya.training import checkpoint

    plugins = registry()
    lacking = plugins.check_record(manifest["plugins"]).missing
    if lacking:
        raise UserError(f"{folder}: " + "; ".join(lacking))
    parameters = Parameters.from_dict(manifest["parameters"], source=str(folder / "manifest.json"))
    module = parameters.objective.build(parameters.architecture, Vocabulary.model_validate(manifest["vocabulary"]))
    checkpoint.load_module(folder, module)
    return parameters.objective.exports(module)
