"""Exports a checkpoint as finished model folders. Reads only the checkpoint, never the parameter JSON of the run.

A Transformers folder can also be exported, to another format.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.atomic_files import check_new_folder, copy_folder, new_folder
from terakoya.components import Exporter
from terakoya.components.vocabulary import Vocabulary
from terakoya.config import lora as lora_settings
from terakoya.conversion.import_checkpoint import copy_tokenizer
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.plugins import registry
from terakoya.plugins.create import create_component
from terakoya.plugins.foreign_models import foreign_model_problem
from terakoya.plugins.run_record import check_plugins
from terakoya.runs.checkpoints import read_manifest, while_kept
from terakoya.runs.finding import find_checkpoint
from terakoya.toolkit.formats import folder_digests

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ExportResult:
    """What `export` wrote.

    Attributes:
        out: the new folder.
        checkpoint: the checkpoint or Transformers folder that was exported.
        step: the checkpoint's step; None for a Transformers folder.
        models: sub-folder -> Transformers class that loads the model; empty for formats that are not Transformers'.
        custom_code: sub-folders of the models that contain their code and are loaded with `trust_remote_code`.
        compared: what the exporter has compared with the models, a sentence each.
    """

    out: Path
    checkpoint: Path
    step: int | None
    models: Mapping[str, str]
    custom_code: frozenset[str]
    compared: Sequence[str] = ()

    @property
    def classes(self) -> Mapping[Path, str]:
        """The folder of each model -> the Transformers class that loads it."""
        return {self.out / name: model for name, model in self.models.items()}

    @property
    def trusted(self) -> Sequence[Path]:
        """The folders of the models that are loaded with `trust_remote_code`."""
        return [self.out / name for name in self.custom_code]


def export(
    source: Path | str,
    out: Path | str,
    *,
    format: str = "huggingface",
    only: str | None = None,
    weights: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Writes the models of a run, of a checkpoint, or of a Transformers folder, into the new folder `out`.

    Args:
        source: RUN (its newest whole checkpoint is used), RUN/checkpoints/step-..., or a Transformers folder.
        format: a registered exporter's name.
        only: sub-folder of the only model to write, such as `discriminator`; `out` itself becomes this model.
        weights: the event plugin whose weights to write, `ema` for the average; None for those that were trained.
        settings: settings of the exporter, such as `tp` and `pp` of `megatron`.

    Raises:
        UserError: no checkpoint, a damaged one, a missing plugin or library, no model `only`, settings or a model that
            the format does not support, other outputs than the model's, or `out` already exists.
        TemporaryFailure: the run removed the checkpoint while it was read.
    """
    source, out = Path(source), Path(out)
    check_new_folder(out)
    exporter: Exporter = create_component("exporters", format, settings or {}, where=f"format {format}")
    exporter.check()
    with _open_source(source, weights, to_write=exporter.one_weight_at_a_time) as opened:
        folder, models = opened.folder, opened.models
        if only is not None:
            if only not in models:
                names = ", ".join(sorted(models)) if "" not in models else "one model, without a name"
                raise UserError(f"--only {only}: {folder} has no such model; it has {names}")
            models = {"": models[only]}
        with new_folder(out) as draft:
            exporter.export(models, opened.tokenizer, draft)
            compared = exporter.compare(models, opened.tokenizer, draft)
            for name in opened.adapters if exporter.for_transformers else ():
                if only is None or name == only:
                    copy_folder(opened.adapters[name], draft / (name if only is None else "") / lora_settings.FOLDER)
            if exporter.for_transformers:
                origin = folder if opened.step is not None and weights is None else None
                for name in models:
                    folder_digests.write(draft / name, checkpoint=origin)
    autos = {name: type(model)._auto_class for name, model in models.items()} if exporter.for_transformers else {}
    classes = {name: autos[name] or type(models[name]).__name__ for name in autos}
    return ExportResult(out, folder, opened.step, classes, frozenset(name for name in autos if autos[name]), compared)


@dataclass(frozen=True)
class _Source:
    """What is exported.

    Attributes:
        folder: the checkpoint or Transformers folder.
        step: the checkpoint's step.
        models: sub-folder -> model.
        tokenizer: a folder with only the tokenizer's files.
        adapters: sub-folder -> folder with the adapter that was merged into the model.
    """

    folder: Path
    step: int | None
    models: Mapping[str, PreTrainedModel]
    tokenizer: Path
    adapters: Mapping[str, Path]


@contextmanager
def _open_source(source: Path, weights: str | None, *, to_write: bool) -> Iterator[_Source]:
    """Loads what `source` refers to; see `models_to_write` for those `to_write`. Raises UserError as `export` does."""
    if (source / "config.json").is_file() and not (source / "manifest.json").is_file():
        if weights is not None:
            raise UserError(f"--weights {weights}: expected a run or a checkpoint, got {describe_found(source, 'run')}")
        with tempfile.TemporaryDirectory() as tokenizer:
            copy_tokenizer(source, Path(tokenizer))
            if _finds_class_by_config(source):
                shutil.copyfile(source / "config.json", Path(tokenizer) / "config.json")
            yield _Source(source, None, {"": load_model(source)}, Path(tokenizer), {})
        return
    folder = find_checkpoint(source)
    with while_kept(folder), tempfile.TemporaryDirectory() as temporary:
        manifest = read_manifest(folder)
        copied = Path(temporary) / "tokenizer"
        copy_folder(folder / "tokenizer", copied)  # before the rest: what is missing of that is noticed
        models, adapters = _build(folder, manifest, Path(temporary) / "adapters", weights, to_write=to_write)
        yield _Source(folder, manifest["step"], models, copied, adapters)


def _finds_class_by_config(folder: Path) -> bool:
    """Returns whether AutoTokenizer takes the class of the tokenizer in `folder` from config.json, as for the published
    BERT and GPT-2, because tokenizer_config.json names none."""
    from terakoya.store.tokenizer_identity import FILES

    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return "tokenizer_class" not in settings and any((folder / name).is_file() for name in FILES)


def load_model(folder: Path) -> PreTrainedModel:
    """Loads the model of a Transformers folder with the class that its config names, in its own dtype. Raises UserError
    if the config names no class of Transformers, or one that an importer reads; if weights are missing or cannot be
    read, or a file is not that which an export wrote."""
    import transformers

    if problem := foreign_model_problem(folder):
        raise UserError(problem)
    try:
        with folder_digests.check_while_loading(folder):
            name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
            kind: type[PreTrainedModel] = getattr(transformers, name)
            model, info = kind.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, dtype="auto"
            )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder}: expected a run, a checkpoint or a Transformers folder: {reason}") from error
    if info["missing_keys"]:
        raise UserError(f"{folder}: missing weights: {', '.join(sorted(info['missing_keys'])[:8])}")
    if hasattr(model.config, "auto_map"):  # the folder's own code, which has not been run
        del model.config.auto_map
    return model


def build_models(folder: Path, manifest: Mapping[str, Any]) -> Mapping[str, PreTrainedModel]:
    """Builds the models of the checkpoint `folder` with its weights, on the CPU, by sub-folder; adapters are merged."""
    with while_kept(folder):
        return _build(folder, manifest, None)[0]


def _build(
    folder: Path,
    manifest: Mapping[str, Any],
    adapters: Path | None,
    weights: str | None = None,
    *,
    to_write: bool = False,
) -> tuple[Mapping[str, PreTrainedModel], Mapping[str, Path]]:
    """Builds the models as `build_models` does, with the `weights` of an event plugin if one is named, and first writes
    their adapters below the new folder `adapters`.

    Returns the models, and the folder of each adapter, both by sub-folder. See `models_to_write` for those `to_write`.
    """
    from terakoya.training.checkpoint import event_tensors
    from terakoya.training.checkpoint.restoring import models_to_write, restore_module, saved_parameters
    from terakoya.training.model import lora

    plugins = registry()
    missing = check_plugins(plugins, manifest["plugins"], manifest["parameters"], events=False).missing
    if missing:
        raise UserError(f"{folder}: " + "; ".join(missing))
    parameters = saved_parameters(folder, manifest)
    vocabulary = Vocabulary.model_validate(manifest["vocabulary"])
    if to_write and weights is None and parameters.lora is None:
        return models_to_write(folder, parameters, vocabulary, tokenizer_folder=folder / "tokenizer"), {}
    module = restore_module(
        folder, parameters, vocabulary, tokenizer_folder=folder / "tokenizer",
        started_from=manifest.get("started_from"),
    )  # fmt: skip
    if weights is not None:
        event_tensors.load_weights(folder, weights, module)
    written: dict[str, Path] = {}
    if parameters.lora is not None:
        if adapters is not None:
            written = lora.write_adapters(parameters.objective.exports(module), adapters, manifest["started_from"])
        module = lora.merged_copy(parameters, module, vocabulary)
    return parameters.objective.exports(module), written
