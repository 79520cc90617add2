"""Options that do not exist: each is answered with what to give instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import call
from documented_commands import check_command, find_command

from terakoya.commands.guidance.unknown_options import ANSWERS

PRESET = str(Path(__file__).resolve().parents[3] / "parameters" / "tiny_bert.json")
TRAIN = ("train", PRESET, "--out", "r")
SLURM = ("launch", "slurm", PRESET, "--out", "r")
TOKENIZER = ("tokenizer", "train", "c.jsonl", "--type", "mecab_wordpiece", "--out", "t")


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, err = call(capsys, *arguments)
    announced, mark, said = err.partition("error: ")  # a command may have said what it begins with
    assert code == 2 and not out and "Traceback" not in err
    assert mark and (not announced or announced.endswith(" ...\n"))
    return said.rstrip()


def test_a_command_of_other_programs_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    told = error(capsys, "merge", "a", "b", "--out", "c")
    assert "merge: no such command; `terakoya average`" in told.replace("\n", " ") and "store merge" in told
    for script, verb in {
        "train_tokenizer.py": "tokenizer train", "create_datasets.py": "prepare", "run_pretraining.py": "train",
        "extract_electra_model.py": "export", "./run_mlm.py": "train", "tools/merge_datasets.py": "store merge",
    }.items():  # fmt: skip
        assert f"`terakoya {verb}" in error(capsys, script, "--input_file", "a.txt")


@pytest.mark.parametrize(
    ("arguments", "do"),
    [
        ((*TRAIN, "--max-steps", "100"), "--max-steps: no such option; give --set max_steps=100"),
        ((*TRAIN, "--max_steps=100"), "--max_steps: no such option; give --set max_steps=100"),
        ((*TRAIN, "--lr", "1e-4"), "--lr: no such option; give --set optimizer.learning_rate=1e-4"),
        ((*TRAIN, "--learning_rate", "1e-4"), "give --set optimizer.learning_rate=1e-4"),
        ((*TRAIN, "--batch_size", "32"), "give --set 'batch_size={\"-1\": 32}'"),
        ((*TRAIN, "--per_device_train_batch_size", "8"), " or --set micro_batch_size=8"),
        ((*TRAIN, "--bf16"), "give --set precision=bf16"),
        ((*TRAIN, "--report_to", "wandb"), 'give --set \'trackers=[{"type": "wandb"}]\''),
        ((*TRAIN, "--n_embd", "8"), "give --set architecture.hidden_size=8"),
        ((*TRAIN, "--vocab_size", "8"), "`terakoya tokenizer train --vocab-size N`"),
        (("train", "--config", PRESET, "--out", "r"), "the first argument: terakoya train PARAMETERS.json"),
        (("train", "--parameter_file", PRESET), "the first argument: terakoya train PARAMETERS.json"),
        (("train", PRESET, "--output_dir", "r"), "--output_dir: no such option; give --out r"),
        (("train", PRESET, "--model_dir", "r"), "--model_dir: no such option; give --out r"),
        ((*TRAIN, "--do_continue"), "the same command with the same --out continues a run; leave it out"),
        ((*TRAIN, "--disable_overwrite_cache"), "a token store is made once"),
        ((*TRAIN, "--input_file", "c.txt"), "terakoya prepare CORPUS --tokenizer FOLDER --out STORE"),
        ((*TRAIN, "--tokenizer_dir", "t"), "a token store has its tokenizer"),
        ((*TRAIN, "--tokenizer_type", "wordpiece"), "a token store has its tokenizer"),
        ((*TRAIN, "--mecab_dic_type", "ipadic"), "--dictionary ipadic"),
        ((*TRAIN, "--node_rank", "1"), "--node_rank: no such option; give --node-rank"),
        ((*TRAIN, "--local_rank", "1"), "torchrun sets it"),
        ((*TRAIN, "--nproc_per_node", "8"), "give --processes 8"),
        ((*TRAIN, "--nnodes", "4"), "the nodes follow from batch_size"),
        ((*TRAIN, "--outt", "4"), "--outt: no such option; did you mean --out?"),
        ((*TRAIN, "--qqq"), "--qqq: no such option; see `terakoya train --help` for its options"),
        (("estimate", PRESET, "--max_steps", "3"), "give --set max_steps=3"),
        (("run", "pipe.json", "--max_steps", "3"), 'set "max_steps" in "parameters"'),
        ((*SLURM, "--nnodes", "4"), "the nodes follow from batch_size"),
        ((*SLURM, "--lr", "4"), "give --set optimizer.learning_rate=4"),
        ((*TOKENIZER, "--mecab_dic_type", "ipadic"), "give --dictionary ipadic"),
        ((*TOKENIZER, "--num_files=8"), "give --processes 8"),
        ((*TOKENIZER, "--intermediate_dir", "x"), "there are no intermediate files"),
        ((*TOKENIZER, "--tokenizer_type", "wordpiece"), "give --type mecab_wordpiece or --type sentencepiece"),
        ((*TOKENIZER, "--model_dir", "x"), "give --out x"),
        (("export", "run", "--out", "m", "--generator"), "give --only generator"),
        (("export", "--input_dir", "run", "--out", "m"), "the first argument: terakoya export RUN"),
        (("prepare", "c.jsonl", "--tokenizer", "t", "--out", "s", "--workers", "8"), "give --processes 8"),
        (("train", PRESET), "terakoya train: expected --out: The run's folder"),
        (("train", "--out", "r"), "terakoya train: expected PARAMETERS.json: The parameter JSON, or"),
    ],
)
def test_a_foreign_option_is_answered_with_what_to_give(
    arguments: tuple[str, ...], do: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert do in error(capsys, *arguments)


def test_the_answers_name_commands_and_options_that_exist() -> None:
    for verb, answers in ANSWERS.items():
        command, rest = find_command(verb.split())
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert not rest
        for option, sentence in answers.items():
            assert f"--{option}" not in flags and f"--{option.replace('_', '-')}" not in flags
            text = sentence.replace("{verb}", verb).replace("{value}", "8")
            for given in re.findall(r"give (--[\w-]+)", text):
                assert given in flags | {"--dictionary"}, text
            for quoted in re.findall(r"terakoya (?:train|prepare|tokenizer train|export) [^;,]*", text):
                check_command(quoted.replace("'", ""))
