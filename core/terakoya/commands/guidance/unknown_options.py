"""What to give instead of an option that does not exist: the names of other trainers' flags, and keys as options."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer import BadParameter, TyperException

from terakoya.errors import UserError
from terakoya.plugins.families import missing_family

WITH_SET = ("train", "estimate", "launch")
"""The verbs whose --set takes keys of the parameter JSON."""

_FILE = "the parameter file is the first argument: terakoya {verb} PARAMETERS.json"
_OUT = "give --out {value}"
_RESUME = "the same command with the same --out continues a run; leave it out"
_PREPARE = (
    "text becomes a token store first: terakoya prepare CORPUS --tokenizer FOLDER --out STORE; then --set "
    "'data.train=[\"STORE\"]', or --data STORE with --model-type"
)
_TOKENIZER = (
    "a token store has its tokenizer: terakoya tokenizer train --type mecab_wordpiece --dictionary ipadic|unidic_lite, "
    "then terakoya prepare --tokenizer FOLDER"
)
_LAUNCHER = "torchrun sets it for `-m terakoya train`, and so does terakoya launch; leave it out"
_CHECKPOINT = "a checkpoint holds it; leave it out"


def _words(answers: Mapping[str, str]) -> dict[str, str]:
    return {name: sentence for names, sentence in answers.items() for name in names.split()}


_RUN = _words({
    "config config_file parameter_file parameters params": _FILE,
    "output_dir out_dir output save_dir model_dir": _OUT,
    "from load finetune init_from": "give --set start_from=MODEL, a Transformers folder; of a run: terakoya export RUN "
    "--out MODEL",
    "do_continue resume resume_from_checkpoint continue overwrite_output_dir": _RESUME,
    "disable_overwrite_cache overwrite_cache": "a token store is made once and only read by runs; leave it out",
    "input_file input train_file corpus": _PREPARE,
    "tokenizer tokenizer_dir tokenizer_type tokenizer_name mecab_dic_type": _TOKENIZER,
    "nnodes num_nodes num_machines": "the nodes follow from batch_size, which has an entry for each: "
    "--set 'batch_size={\"0\": ROWS, \"1\": ROWS}'; equal nodes are --nodes {value} with 'batch_size={\"*\": ROWS}'",
    "gpus num_gpus n_gpus nproc_per_node num_processes devices": "give --processes {value}",
    "local_rank master_addr master_port rank world_size": _LAUNCHER,
})  # fmt: skip

ANSWERS: Mapping[str, Mapping[str, str]] = {
    "train": _RUN,
    "estimate": {name: sentence for name, sentence in _RUN.items() if not sentence.startswith("give ")},
    "launch": {name: sentence for name, sentence in _RUN.items() if "--processes" not in sentence},
    "tokenizer train": _words({
        "input_file": "the corpus is the first argument: terakoya tokenizer train CORPUS",
        "model_dir": _OUT,
        "intermediate_dir": "there are no intermediate files; leave it out",
        "num_files": "give --processes {value}",
        "tokenizer_type": "give --type mecab_wordpiece or --type sentencepiece",
        "mecab_dic_type": "give --dictionary {value}",
    }),
    "export": _words({
        "input_dir": "the run or checkpoint is the first argument: terakoya export RUN",
        "output_dir": _OUT,
        "generator": "give --only generator; without --only both models are written",
        "discriminator": "give --only discriminator; without --only both models are written",
        "parameter_file model_type": _CHECKPOINT,
    }),
    "prepare": _words({
        "input input_file": "the corpus is the first argument: terakoya prepare CORPUS",
        "output_dir output_prefix": _OUT,
        "tokenizer_dir tokenizer_model tokenizer_name_or_path": "give --tokenizer {value}",
        "workers num_workers num_proc": "give --processes {value}",
        "append_eod": "give --append-eos",
        "json_keys text_column": "give --field {value}",
    }),
}  # fmt: skip
"""Verb -> option of another program, with underscores -> what to do here. `{value}` is the option's value."""


_MERGE = "`terakoya average` takes the mean of the weights of models, `terakoya store merge` joins token stores"
_TRAIN = (
    "`terakoya prepare` makes a token store of the text, and `terakoya train PARAMETERS.json --out RUN` trains on it"
)
COMMANDS: Mapping[str, str] = _words({
    "merge soup merge_datasets": _MERGE,
    "train_tokenizer train_tok spm_train": "`terakoya tokenizer train CORPUS --type KIND --out FOLDER` makes one",
    "create_datasets preprocess_data tokenize": "`terakoya prepare CORPUS --tokenizer FOLDER --out STORE` encodes text",
    "run_pretraining run_mlm run_clm run_language_modeling pretrain pretrain_bert pretrain_gpt": _TRAIN,
    "extract_electra_model convert": "`terakoya export RUN --out MODEL` writes a Transformers folder",
    "run_glue": "`terakoya finetune MODEL --task classification` trains on labelled examples",
})  # fmt: skip
"""Command or script of another program -> what there is here."""


def answer(verb: str, option: str, value: str | None, options: Iterable[str] = ()) -> str | None:
    """Returns what to do instead of `option`, which `verb` does not have; None if nothing is known.

    `value` is what was given with it, and `options` are those that the verb has.
    """
    name = option.lstrip("-").replace("-", "_").lower()
    same = [each for each in options if each.lstrip("-").replace("-", "_") == name]
    if same:
        return f"give {same[0]}"
    sentence = ANSWERS.get(verb, {}).get(name)
    if sentence is not None:
        return sentence.replace("{verb}", verb).replace("{value}", value or "VALUE")
    if verb == "run":
        found = _find(name)[0]
        return f'set "{found[0]}" in "parameters", which is a parameter file or its content' if found else None
    return _as_set(name, value) if verb in WITH_SET else None


def explain(error: TyperException, arguments: Sequence[str]) -> Exception:
    """Returns the error to raise for `error` of the command line's parser: a UserError that says what to do, for an
    unknown option and for a missing one, or `error` itself."""
    context = getattr(error, "ctx", None)
    if context is None:
        return error
    path = context.command_path
    known = Path(arguments[0]).stem.replace("-", "_") if arguments and path == "terakoya" else ""
    if (advice := COMMANDS.get(known)) is not None:
        return UserError(f"{path} {arguments[0]}: no such command; {advice}")
    if isinstance(error, BadParameter) and error.param is not None and not error.message:
        missing = error.param
        name = missing.opts[0] if missing.param_type_name == "option" else getattr(missing, "metavar", None)
        return UserError(
            f"{path}: expected {name or missing.name}: {getattr(missing, 'help', None) or 'it is missing'}"
        )
    option = getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):
        return error
    options = [flag for parameter in context.command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    flags = [flag for flag in options if flag.startswith("--")]
    verb = path.partition(" ")[2]
    if family := missing_family("verbs", f"{verb} {option}"):
        return UserError(f"{path}: {option}: no such option{family}")
    advice = answer(verb, option, _value_of(option, arguments), flags)
    if advice is None:
        names = [flag.removeprefix("--") for flag in flags]
        near = difflib.get_close_matches(option.lstrip("-"), names, n=2, cutoff=0.6)
        advice = (
            "did you mean " + " or ".join(f"--{name}" for name in near) + "?"
            if near
            else f"see `{path} --help` for its options"
        )
    return UserError(f"{path}: {option}: no such option; {advice}")


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and not following.startswith("--"):
            return following
    return None


def _find(name: str) -> tuple[list[str], str | None]:
    """Returns the key paths of the parameter JSON that the option `name` means, and the sentence if there is none."""
    from terakoya.config.other_names import find_equivalent
    from terakoya.config.parameters import all_key_paths
    from terakoya.plugins import registry

    paths = all_key_paths(registry())
    return ([name], None) if name in paths else find_equivalent(name, paths)


def _as_set(name: str, value: str | None) -> str | None:
    """Returns the --set that means the option `name`, or what to do where no key means it; None if nothing is known."""
    from terakoya.config.other_names import VALUES

    found, sentence = _find(name)
    options = " or ".join(_format_set(path, VALUES.get(name, value)) for path in found)
    return f"give {options} instead" if found else sentence


def _format_set(path: str, value: str | None) -> str:
    shown: Any = value or "VALUE"
    if path == "batch_size":
        shown = f'{{"-1": {shown}}}'
    elif path == "trackers":
        shown = json.dumps([{"type": shown}])
    elif path in ("data.train", "data.validation"):
        shown = json.dumps([shown])
    return f"--set {shlex.quote(f'{path}={shown}')}"
