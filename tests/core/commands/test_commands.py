"""The command line: quick, in order, honest about errors."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import call
from documented_commands import verbs

import terakoya.commands
from terakoya.commands import main
from terakoya.errors import RankLostError, UserError
from terakoya.plugins import loading as plugins

PRESET = str(Path(__file__).resolve().parents[3] / "parameters" / "tiny_bert.json")
PLUGIN = """
from terakoya import hookimpl
from terakoya.components import Schedule

class Mine(Schedule):
    pass

@hookimpl
def register_schedules():
    return {"mine": Mine}

@hookimpl
def run_started(run):
    pass
"""


@pytest.fixture(autouse=True)
def _alone(fresh_plugins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAKOYA_DEBUG", "")


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, 74), (errno.ENOSPC, 2)])
def test_a_file_system_that_does_not_answer_has_an_exit_code_of_its_own(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "it failed", "work/store")

    monkeypatch.setattr("terakoya.commands.main.command_line", lambda *_: fail)
    ended, out, err = call(capsys, "status", "work/run")
    assert (ended, out) == (code, "") and err.startswith("error: work/store: it failed; ")


def test_after_a_lost_rank_python_does_not_end_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads of torch wait for that rank for ever, and would make Python's own end an abort."""

    def fail(*_: object, **__: object) -> None:
        raise RankLostError("rank 1 is gone")

    left: list[int] = []
    monkeypatch.setattr("terakoya.commands.main.command_line", lambda *_: fail)
    monkeypatch.setattr(os, "_exit", left.append)
    assert call(capsys, "train", "run.json")[2] == "error: rank 1 is gone\n"
    assert left == [76]


def test_help_lists_every_verb_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    table = out.partition("Commands:\n")[2].partition("\n\n")[0]
    listed = [line.split()[0] for line in table.splitlines() if not line.startswith("   ")]
    assert code == 0 and listed == verbs()


@pytest.mark.parametrize("command", [[], ["store"], ["tokenizer"], ["parameters"], ["plugins"]])
def test_the_list_of_commands_has_whole_sentences(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *command, "--help")
    assert code == 0 and "...\n" not in out.partition("Commands:\n")[2]


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0 and f"Usage: terakoya {verb} " in out


def test_help_is_quick() -> None:
    """It imports nothing that is slow to import, and takes less than four times the computing of imports that it
    needs; what other programs take is not counted."""
    command = [sys.executable, "-X", "importtime", "-m", "terakoya", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "typer" in imported and not re.findall(r"\| +(numpy|pydantic|torch|transformers)$", imported, re.MULTILINE)
    seconds: list[list[float]] = [[], []]
    needed = "import typer.main, importlib.metadata, email.message"
    for _ in range(5):
        for taken, arguments in zip(seconds, (["-m", "terakoya", "--help"], ["-c", needed]), strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert statistics.median(shown / least for shown, least in zip(*seconds, strict=True)) < 4


def test_the_version_is_printed_by_module_and_by_script() -> None:
    for start in ([sys.executable, "-m", "terakoya"], [str(Path(sys.executable).parent / "terakoya")]):
        output = subprocess.run([*start, "--version"], capture_output=True, text=True, check=True).stdout
        assert output.startswith("terakoya 0.")


def test_a_users_error_is_one_line_and_exit_code_2(tmp_path: Path, forks: None) -> None:
    start = [sys.executable, "-m", "terakoya", "parameters", "show", str(tmp_path / "nowhere.json")]
    done = subprocess.run(start, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"error: {tmp_path}/nowhere.json: no such file\n"


def test_the_traceback_is_shown_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> None:
    monkeypatch.setenv("TERAKOYA_DEBUG", "1")
    start = [sys.executable, "-m", "terakoya", "parameters", "show", str(tmp_path / "nowhere.json")]
    done = subprocess.run(start, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "UserError" in done.stderr


def test_plugins_show_lists_settings_defaults_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "plugins", "show", "mecab_wordpiece")
    assert code == 0 and out.startswith("tokenizer mecab_wordpiece: WordPiece inside the words")
    (line,) = [line for line in out.splitlines() if line.startswith("min_frequency ")]
    assert re.split(" {2,}", line.rstrip())[1:] == [
        "integer at least 1", "2", "How often a pair of pieces must occur to be merged."
    ]  # fmt: skip
    code, _, error = call(capsys, "plugins", "show", "mecab_wordpice")
    assert code == 2 and 'no component is called "mecab_wordpice"' in error
    assert 'did you mean "mecab_wordpiece" or "mean_of_pieces"? `terakoya plugins list` lists all' in error


def test_plugins_list_shows_components_events_and_origins(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--plugin", plugin, "--without", "tensorboard", "plugins", "list")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["architecture", "bert", "terakoya_plugins.architectures.bert", "terakoya", "0.1.0"] in rows
    assert ["schedule", "mine", "mine", "--plugin", plugin, "-"] in rows
    assert ["run_started", "mine"] in rows
    assert ["excluded:", "terakoya_plugins.trackers.tensorboard"] in rows
    assert not any(row[:2] == ["tracker", "tensorboard"] for row in rows)


def test_plugins_list_shows_what_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "acme-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[terakoya]\nacme = acme_shown_broken\n")
    (tmp_path / "acme_shown_broken.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = call(capsys, "plugins", "list")
    assert code == 0
    assert "does not load: plugin acme_shown_broken (acme 1.2): ModuleNotFoundError: No module named" in out


def test_a_plugin_that_does_not_load_stops_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "--plugin", str(tmp_path / "none.py"), "parameters", "schema")
    assert code == 2 and "none.py" in err and "not found" in err


def test_trace_plugins_reaches_child_processes(
    plugin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = call(capsys, "--trace-plugins", "--plugin", plugin, "plugins", "list")
    assert "register_schedules" in err
    assert plugins.os.environ[plugins.TRACE_VARIABLE] == "1"


def test_parameters_show_lists_values_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "parameters", "show", PRESET, "--set", "schedule.warmup_steps=7")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["schedule.warmup_steps", "7", "command", "line"] in rows
    assert ["architecture.hidden_size", "256", "file"] in rows
    assert ["architecture.type_vocab_size", "2", "default"] in rows


def test_parameters_show_json_is_a_parameter_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "parameters", "show", PRESET, "--json", "--set", "seed=7")
    (tmp_path / "complete.json").write_text(out)
    code, again, _ = call(capsys, "parameters", "show", str(tmp_path / "complete.json"), "--json")
    assert code == 0 and again == out and json.loads(out)["seed"] == 7


def test_windows_is_told_of_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match=r"does not run on Windows itself\. Install WSL 2"):
        importlib.reload(terakoya.commands)


@pytest.mark.parametrize(
    ("arguments", "usage"), [("prepare", "[OPTIONS] CORPUS...\n"), ("init", "[OPTIONS] [CORPUS...]\n")]
)
def test_what_is_given_several_times_is_shown_plainly(
    capsys: pytest.CaptureFixture[str], arguments: str, usage: str
) -> None:
    _, out, _ = call(capsys, arguments, "--help")
    assert out.startswith(f"Usage: terakoya {arguments} {usage}") and "list[" not in out


class _Left(BaseException):
    """A process that ends at once."""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("the loss is no number"), 2, "error: the loss is no number"),
        (RankLostError("rank 1 is gone"), 76, "error: rank 1 is gone"),
        (RuntimeError("CUDA out of memory"), 1, "RuntimeError: CUDA out of memory"),
    ],
)
def test_a_process_that_must_not_wait_for_others_ends_without_pythons_own_end(
    error: Exception, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error.leaves_at_once = True  # type: ignore[attr-defined]
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise _Left

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(main, "command_line", lambda *_: fail)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(_Left):
        main.main(["doctor"])
    assert codes == [code] and words in capsys.readouterr().err
