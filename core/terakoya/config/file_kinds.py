"""Recognises a configuration file that was given in the place of another: of a pipeline, a model or another trainer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from terakoya.config.other_names import find_equivalent
from terakoya.errors import UserError

PARAMETERS, PIPELINE = "a parameter file", "a pipeline file"
LANGUAGE_PRETRAINING = "a parameter.json of retarfi/language-pretraining"


class FileKind(NamedTuple):
    """A kind of file: it has at least `least` of `keys` at its top.

    `advice` says what to do with the file, `{file}`, or its folder, `{folder}`; "" lists what its keys are called here.
    """

    name: str
    least: int
    keys: str
    advice: str


KINDS = (
    FileKind(
        PARAMETERS,
        3,
        "data architecture objective optimizer schedule batch_size",
        "start it with `terakoya train {file} --out RUN`",
    ),
    FileKind(
        PIPELINE,
        2,
        "corpus corpora tokenizer tokenizer_folder store parameters run export",
        "start it with `terakoya run {file}`, which with --no-train makes stores and a parameter file",
    ),
    FileKind(
        "a checkpoint's manifest",
        3,
        "step consumed_rows parameters stores files",
        "to continue the run: `terakoya train RUN/parameters.json --out RUN`",
    ),
    FileKind(
        "a DeepSpeed configuration",
        1,
        "zero_optimization train_micro_batch_size_per_gpu",
        'name it in a parameter file: "parallel": {{"engine": "deepspeed", "deepspeed_config": "{file}"}}',
    ),
    FileKind(
        "a configuration of axolotl", 2, "base_model datasets sequence_len micro_batch_size adapter val_set_size", ""
    ),
    FileKind(
        "a configuration of LLaMA-Factory",
        2,
        "model_name_or_path stage finetuning_type template dataset cutoff_len dataset_dir",
        "",
    ),
    FileKind(
        "TrainingArguments of Transformers",
        2,
        "per_device_train_batch_size per_device_eval_batch_size num_train_epochs output_dir overwrite_output_dir "
        "lr_scheduler_type gradient_accumulation_steps save_total_limit report_to learning_rate",
        "",
    ),
    FileKind(
        "the configuration of a Transformers model",
        2,
        "model_type architectures transformers_version hidden_size vocab_size n_embd num_hidden_layers",
        'a run describes the model in "architecture", with names of Transformers; to begin with the weights of its '
        'folder: "start_from": "{folder}"',
    ),
    FileKind(
        "the configuration of a tokenizer",
        1,
        "tokenizer_class added_tokens_decoder added_tokens",
        "a run takes the tokenizer from its token stores: `terakoya prepare CORPUS --tokenizer {folder} --out STORE`",
    ),
    FileKind(
        "a token store's record",
        3,
        "tokens sequences documents fingerprint vocabulary",
        'name the store in a parameter file: "data": {{"train": ["{folder}"]}}',
    ),
)
"""The known kinds; a file is of the first that fits."""


def kind_of(raw: Mapping[str, Any]) -> str | None:
    """Returns the name of the kind of file that has the keys of `raw`; None if it is none of the known ones."""
    entries = list(raw.values())
    if all(isinstance(entry, Mapping) for entry in entries) and any("number-of-layers" in entry for entry in entries):
        return LANGUAGE_PRETRAINING
    return next((kind.name for kind in KINDS if len(raw.keys() & set(kind.keys.split())) >= kind.least), None)


def refuse_other_kind(file: Path, raw: Mapping[str, Any], *, expected: str, paths: Sequence[str] = ()) -> None:
    """Raises UserError if `raw`, the content of `file`, is of a known kind other than `expected`: with what it is and
    what to do. `paths` are the key paths of the parameter JSON."""
    kind = kind_of(raw)
    if kind is None or kind == expected:
        return
    if kind == LANGUAGE_PRETRAINING:
        advice = f"choose one of its entries: --model-type {'|'.join(raw)}, and name the stores: --data STORE"
    else:
        text = next(each.advice for each in KINDS if each.name == kind)
        quoted = (shlex.quote(str(path)) if "`terakoya " in text else path for path in (file, file.parent))
        advice = text.format(**dict(zip(("file", "folder"), quoted, strict=True))) or (
            "begin with a preset of parameters/, and set there:" + _translate(raw, paths)
        )
    raise UserError(f"{file}: expected {expected}, got {kind}; {advice}")


def _translate(raw: Mapping[str, Any], paths: Sequence[str]) -> str:
    """Returns a line for each key of `raw` that has an equivalent among `paths`."""
    lines = []
    for key in raw:
        found, sentence = find_equivalent(key, paths)
        if found or sentence:
            lines.append(f"\n  {key}: {' or '.join(found) or sentence}")
    return "".join(lines)
