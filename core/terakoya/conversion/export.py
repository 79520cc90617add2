"""From a checkpoint to finished model folders. Reads the checkpoint alone, never the parameter JSON of the run.

A finished Transformers folder is a source too: for other formats than its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components import Exporter
from terakoya.components.vocabulary import Vocabulary
from terakoya.config import lora as lora_settings
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.create import made

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Exported:
    """What `export` wrote: the folder, where it came from, its step (None for a Transformers folder), and by sub-folder
    the Transformers class that loads each model; none where the format is not Transformers'. `own_code` names those
    that travel with their code and are loaded with `trust_remote_code`."""

    out: Path
    checkpoint: Path
    step: int | None
    models: Mapping[str, str]
    own_code: frozenset[str]


def export(
    source: Path,
    out: Path,
    *,
    format: str = "huggingface",
    only: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Exported:
    """Writes the model(s) of a run, of one of its checkpoints, or of a Transformers folder, into the new folder `out`.

    Args:
        source: RUN (its newest checkpoint that is whole is taken), RUN/checkpoints/step-..., or a Transformers folder.
        format: a registered exporter's name.
        only: the one to write of several models, by its sub-folder, which it keeps: `discriminator`.
        settings: the exporter's, such as `tp` and `pp` of `megatron`.

    Raises:
        UserError: no checkpoint, a damaged one, a plugin that is missing, no model `only`, settings or a model that the
            format does not take, or `out` is there already.
    """
    exporter: Exporter = made("exporters", format, settings or {}, where=f"format {format}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out}: is there already; choose a new folder or remove it")
    with _opened(source) as opened:
        folder, models = opened.folder, opened.models
        if only is not None:
            if only not in models:
                there = ", ".join(sorted(models)) if "" not in models else "one model, without a name"
                raise UserError(f"--only {only}: {folder} holds no such model; it holds {there}")
            models = {only: models[only]}
        staging = out.with_name(f".{out.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            exporter.export(models, opened.tokenizer, staging)
            for name in opened.adapters if exporter.for_transformers else ():
                if name in models:
                    shutil.copytree(opened.adapters[name], staging / name / lora_settings.FOLDER)
            if out.is_dir():
                out.rmdir()
            staging.rename(out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    autos = {name: type(model)._auto_class for name, model in models.items()} if exporter.for_transformers else {}
    classes = {name: autos[name] or type(models[name]).__name__ for name in autos}
    return Exported(out, folder, opened.step, classes, frozenset(name for name in autos if autos[name]))


@dataclass(frozen=True)
class _Opened:
    """What is exported: the folder that was meant, its step, its models by sub-folder, a folder with its tokenizer
    alone and, by sub-folder too, a folder with the adapter that was merged into each model."""

    folder: Path
    step: int | None
    models: Mapping[str, PreTrainedModel]
    tokenizer: Path
    adapters: Mapping[str, Path]


@contextmanager
def _opened(source: Path) -> Iterator[_Opened]:
    """What `source` means.

    Raises:
        UserError: as `export`.
    """
    from terakoya.conversion.import_checkpoint import copy_tokenizer
    from terakoya.training.checkpoint import checkpoint

    if (source / "config.json").is_file() and not (source / "manifest.json").is_file():
        with tempfile.TemporaryDirectory() as tokenizer:
            copy_tokenizer(source, Path(tokenizer))
            yield _Opened(source, None, {"": load_model(source)}, Path(tokenizer), {})
        return
    folder = find_checkpoint(source)
    wrong = checkpoint.find_problems(folder)
    if wrong:
        raise UserError(f"{folder}: damaged: {'; '.join(wrong[:5])}")
    manifest = checkpoint.read_manifest(folder)
    with tempfile.TemporaryDirectory() as temporary:
        models, adapters = _build(folder, manifest, Path(temporary))
        yield _Opened(folder, manifest["step"], models, folder / "tokenizer", adapters)


def load_model(folder: Path) -> PreTrainedModel:
    """The model of a Transformers folder, of the class that its config names, in its own dtype.

    Raises:
        UserError: no class of Transformers, or weights that are missing or cannot be read.
    """
    import transformers

    try:
        name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        kind: type[PreTrainedModel] = getattr(transformers, name)
        model, told = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, dtype="auto")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: expected a run, a checkpoint or a Transformers folder: {reason}") from error
    if told["missing_keys"]:
        raise UserError(f"{folder}: lacks weights: {', '.join(sorted(told['missing_keys'])[:8])}")
    return model


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that `source` means: itself, or the newest one of a run.

    Raises:
        UserError: there is none.
    """
    from terakoya.training.checkpoint import checkpoint

    if (source / "manifest.json").is_file():
        return source
    found = checkpoint.list_checkpoints(source / "checkpoints")
    if not found:
        raise UserError(f"{source}: expected a run or a checkpoint, found no checkpoint in it")
    return found[-1][1]


def build_models(folder: Path, manifest: Mapping[str, Any]) -> Mapping[str, PreTrainedModel]:
    """The models of the checkpoint `folder` with its weights, on the CPU, by sub-folder; adapters are merged."""
    return _build(folder, manifest, None)[0]


def _build(
    folder: Path, manifest: Mapping[str, Any], adapters: Path | None
) -> tuple[Mapping[str, PreTrainedModel], Mapping[str, Path]]:
    """`build_models`, and where the adapters that they have were written before, below the new folder `adapters`."""
    from terakoya.config.parameters import Parameters
    from terakoya.training.checkpoint.restoring import restore_module
    from terakoya.training.model import lora

    plugins = registry()
    lacking = plugins.check_record(manifest["plugins"], manifest["parameters"], events=False).missing
    if lacking:
        raise UserError(f"{folder}: " + "; ".join(lacking))
    parameters = Parameters.from_dict(manifest["parameters"], source=str(folder / "manifest.json"))
    module = restore_module(
        folder, parameters, Vocabulary.model_validate(manifest["vocabulary"]),
        tokenizer_folder=folder / "tokenizer", started_from=manifest.get("started_from"),
    )  # fmt: skip
    written: dict[str, Path] = {}
    if parameters.lora is not None:
        if adapters is not None:
            written = lora.write_adapters(parameters.objective.exports(module), adapters, manifest["started_from"])
        lora.merge(module)
    return parameters.objective.exports(module), written
