"""Whatever a user writes at a key or an option: exit code 2 and a message that names it, never a traceback.

Every key of the parameter JSON gets values of wrong types, signs, sizes and shapes, and so does every option of every
verb, in this process. The normal suite takes a sample with a fixed seed, the nightly one all.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from documented_commands import root_command

from terakoya.commands.main import DEBUG_VARIABLE
from terakoya.config.parameters import COMPONENTS, Parameters
from terakoya.errors import UserError
from terakoya.json_settings import leaves
from terakoya.plugins import loading, registry

PRESETS = Path(__file__).resolve().parents[3] / "parameters"
BASES = ("tiny_bert", "tiny_electra", "tiny_gpt2", "tiny_llama", "tiny_t5", "tiny_lora", "tiny_instruction")

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, -0.5, 10**30, 1e308, float("nan"), float("inf"), float("-inf"), "", "x", "日本語😀",
    "a" * 300, "s3://bucket/x", "../..", [], [[]], [None], [-1], ["x", 1], {}, {"": 1}, {"x": {"y": [1]}}, {"type": 1},
    {"type": "x"}, {"-1": 0},
)  # fmt: skip
TEXTS = (
    "", "x", "-1", "0", "0.5", "1e999", "nan", "inf", "9" * 30, "日本語😀", "a" * 300, "s3://bucket/x", "[1]", "a=b",
    '{"a": {"b": 1}}', "null", "..", "/dev/null", ",", "%", "[bold]",
)  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Runs the command line in this process; returns its exit code and all that it printed."""
    code, out, err = call(capsys, *arguments)
    return code, out + err


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "")
    monkeypatch.setattr(loading, "_current", None)  # --plugin and --without of one call do not reach the next


# --------------------------------------------------------------------------------- keys of the parameter JSON


def key_cases() -> list[tuple[str, str, Any]]:
    """(preset, key path, value) for every key of every preset in `BASES`, and of every section and component."""
    cases = []
    for base in BASES:
        complete = Parameters.load(PRESETS / f"{base}.json").dump()
        paths = {path for path, _ in leaves(complete)}
        paths |= {path.rpartition(".")[0] for path in paths if "." in path}
        cases += [(base, path, value) for path in sorted(paths) for value in VALUES]
    for key, kind in COMPONENTS.items():
        for name in registry().names(kind):
            fields = registry().component(kind, name).model_fields
            cases += [("tiny_bert", f"{key}={name}.{field}", value) for field in sorted(fields) for value in VALUES]
    return cases


def set_at(raw: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at `path`; `optimizer=muon.betas` is a key of another component."""
    head, equals, rest = path.partition("=")
    if equals:
        name, _, field = rest.partition(".")
        raw[head] = {"type": name, field: value}
        return
    place: Any = raw
    *above, last = path.split(".")
    for key in above:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value


def check_message(case: tuple[str, str, Any], said: str) -> None:
    """Checks that the message names the file, and the key, its section or its last word."""
    _, path, value = case
    assert re.match(r"given\.json:(\d+:\d+:)? ", said), (case, said)
    key, last = path.partition("=")[0].partition(".")[0], path.rpartition(".")[2]
    assert last in said or key in said or (isinstance(value, float) and not math.isfinite(value)), (case, said)


def check_key(case: tuple[str, str, Any]) -> bool:
    """Reads the parameters of a case; returns whether they are refused."""
    raw = json.loads(preset(case[0]))
    set_at(raw, case[1], case[2])
    try:
        Parameters.from_dict(raw, source="given.json")
    except UserError as error:
        check_message(case, str(error))
        return True
    return False


@functools.cache
def preset(name: str) -> str:
    """The complete JSON of a preset."""
    return json.dumps(Parameters.load(PRESETS / f"{name}.json").dump())


def test_a_sample_of_values_at_keys() -> None:
    refused = [check_key(case) for case in random.Random(7).sample(key_cases(), 2000)]
    assert refused.count(True) > 1500 and refused.count(False) > 50


def test_a_sample_of_values_at_keys_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "given.json"
    for case in random.Random(8).sample(key_cases(), 15):
        raw = json.loads(preset(case[0]))
        set_at(raw, case[1], case[2])
        file.write_text(json.dumps(raw))  # NaN and Infinity, which are not JSON, too
        code, said = run(capsys, "parameters", "show", str(file), "--json")
        assert code in (0, 2), (case, said)
        if code == 2:
            check_message(case, said.removeprefix("error: ").replace(f"{tmp_path}/", ""))


@pytest.mark.nightly
def test_every_value_at_every_key() -> None:
    assert sum(check_key(case) for case in key_cases()) > 20_000


# ------------------------------------------------------------------------------------------- options of the verbs


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the words and the command of every verb."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


FIRST: dict[tuple[str, ...], tuple[str, ...]] = {
    ("launch",): ("local", "missing.json"),
    ("import",): ("deepspeed", "missing"),
    ("parameters", "import"): ("megatron", "missing.sh"),
    ("plugins", "new"): ("my_model",),
}
"""The arguments of a verb whose first argument is a name; of the others it is a file or folder that is missing."""
NEEDED: dict[str, str] = {
    "--out": "out", "--tokenizer": "missing", "--name": "a/b", "--parts": "1,1", "--kind": "schedule",
    "--corpus": "missing.txt", "--clean": "missing.json", "--type": "mecab_wordpiece", "--format": "huggingface",
    "--train": "missing.jsonl", "--eval": "missing.jsonl", "--task": "classification",
}  # fmt: skip


def option_cases() -> list[tuple[str, ...]]:
    """A command line for every option of every verb and every text in `TEXTS`; and the text as each argument."""
    cases = []
    for words, command in commands(root_command()):
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
        first = FIRST.get(words, tuple("missing" for each in arguments if each.required))
        extra = ("--type", "mecab_wordpiece") if words[:1] == ("tokenizer",) and words[1:] != ("report",) else ()
        needed = [(each.opts[0], NEEDED[each.opts[0]]) for each in options if each.required]
        for text in TEXTS:
            for option in options:
                flag = next(flag for flag in option.opts if flag.startswith("--"))
                others = [word for name, value in needed if name != flag for word in (name, value)]
                given = [flag] if getattr(option, "is_flag", False) else [f"{flag}={text}"]
                cases.append((*words, *first, *extra, *others, *given))
            others = [word for pair in needed for word in pair]
            cases.append((*words, *first[:-1], *extra, *others, "--", text) if first else (*words, *others, text))
    return sorted({case for case in cases if case[0] not in LONG})


def corpora_and_paths() -> list[tuple[str, ...]]:
    """A command line for every option and argument that takes a file or a folder, with each of `ODD_FILES` there."""
    cases = []
    for words, command in commands(root_command()):
        first = FIRST.get(words, tuple("missing" for each in command.params if is_argument(each) and each.required))
        options = [each for each in command.params if not is_argument(each)]
        needed = [(each.opts[0], NEEDED[each.opts[0]]) for each in options if each.required]
        extra = ("--type", "mecab_wordpiece") if words[:1] == ("tokenizer",) and words[1:] != ("report",) else ()
        for option in command.params:
            if "Path" not in str(option.type_descriptor.annotation) and option.name not in TAKES_FILES:
                continue
            flag = "" if is_argument(option) else next(each for each in option.opts if each.startswith("--"))
            others = [word for name, value in needed if name != flag for word in (name, value)]
            for name in ODD_FILES:
                given = (*first, f"{flag}={name}") if flag else (*first[:-1], name)
                cases.append((*words, *given, *extra, *others))
    return sorted({case for case in cases if case[0] not in LONG})


def is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


TAKES_FILES = ("arguments", "corpus", "documents", "files", "model", "plugin", "sources", "template")
"""The names of parameters that take a file without being of the type of paths: they may be addresses or names, too."""
BINARY = bytes(range(256)) * 4
ODD_FILES: dict[str, bytes | None] = {
    "folder": None, "folder.json": None, "folder.jsonl": None, "folder.yaml": None, "folder.py": None, "empty": b"",
    "empty.json": b"", "empty.jsonl": b"", "empty.parquet": b"", "empty.yaml": b"", "empty.py": b"", "binary": BINARY,
    "binary.json": BINARY, "binary.jsonl": BINARY, "binary.jsonl.gz": BINARY, "binary.jsonl.zst": BINARY,
    "binary.parquet": BINARY, "binary.csv": BINARY, "binary.yaml": BINARY, "binary.py": BINARY,
    "latin.json": '{"é": 1}'.encode("latin-1"), "latin.txt": "é\n".encode("latin-1"), "sjis.csv": "表".encode("cp932"),
    "deep.json": b"[" * 100_000, "number.json": b"1", "list.json": b"[1]", "null.yaml": b"null",
    "null.jsonl": b"null\n", "model/config.json": b"{", "model/tokenizer.json": b"{", "store/store.json": b"{",
    "store/tokens.bin": BINARY, "run/metrics.jsonl": BINARY, "run/parameters.json": b"[]", "dangling": None,
    "loop": None,
}  # fmt: skip
"""Name -> content; None for what is no file. A named pipe is none of them: whoever reads it waits for a writer."""


@pytest.fixture
def odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with `ODD_FILES`, and with the folders of a model, a store and a run that hold broken files."""
    monkeypatch.chdir(tmp_path)
    for name, content in ODD_FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        if content is not None:
            Path(name).write_bytes(content)
        elif name in ("dangling", "loop"):
            Path(name).symlink_to("nowhere" if name == "dangling" else "loop")
        else:
            Path(name).mkdir()


def test_a_sample_of_odd_files(odd_files: None, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [check_option(case, capsys) for case in random.Random(9).sample(corpora_and_paths(), 60)]
    assert codes.count(2) > 40


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_every_odd_file_everywhere(odd_files: None, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [check_option(case, capsys) for case in corpora_and_paths()]
    assert len(codes) > 1500


LONG = ("demo",)
"""The verb that does its whole work without a file of the user's."""


def check_option(case: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> int:
    code, said = run(capsys, *case)
    assert code in (0, 2) and "Traceback" not in said, (case, code, said)
    if code == 2:
        is_report = case[:2] == ("plugins", "check")  # of what holds and what does not
        assert is_report or said.startswith(("error: ", "Usage: ")) or "\nerror: " in said, (case, said)
        flag = next((word.partition("=")[0] for word in case if word.startswith("--") and "=" in word), "")
        assert "Invalid value" not in said or flag in said, (case, said)
    return code


def test_a_sample_of_texts_at_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = [check_option(case, capsys) for case in random.Random(7).sample(option_cases(), 45)]
    assert codes.count(2) > 35


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_every_text_at_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = [check_option(case, capsys) for case in option_cases()]
    assert len(codes) > 3000
