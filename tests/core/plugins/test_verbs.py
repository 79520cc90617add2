"""Verbs of plugins: found, listed in their place, run, excluded, and the errors of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call

import terakoya
from terakoya import Command
from terakoya.commands.main import _before_the_verb
from terakoya.commands.verbs import register_commands
from terakoya.config.other_names import explain_unknown_key
from terakoya.errors import UserError
from terakoya.plugins import PLUGINS_VARIABLE, families, registry
from terakoya.plugins.families import Family
from terakoya.plugins.verbs import _in_order, find_verbs

pytestmark = pytest.mark.usefixtures("fresh_plugins")

GREET = '''
from terakoya import Command, hookimpl

def greet(name: str, loud: bool = False) -> None:
    """Greet somebody."""
    print(name.upper() if loud else name)

@hookimpl
def register_commands():
    return {"greet": Command(greet, "terakoya --plugin greet.py greet Hanako", after="train")}
'''


LOUD = """
from terakoya import Language, hookimpl

def translate_help(command, translate):
    for each in (command, *command.commands.values()):
        each.short_help = translate(each.short_help or "")

@hookimpl
def register_languages():
    return {"loud": lambda: Language(str.upper, lambda text, width: [text], translate_help, lambda error: "how?")}
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str) -> None:
    """Installs a distribution that has the plugin `module`."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[terakoya]\n{module} = {module}\n")
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def greet(tmp_path: Path) -> str:
    file = tmp_path / "greet.py"
    file.write_text(GREET, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("how", ["option", "joined", "variable"])
def test_a_plugin_has_a_verb(
    how: str, greet: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"option": ["--plugin", greet], "joined": [f"--plugin={greet}"], "variable": []}[how]
    if how == "variable":
        monkeypatch.setenv(PLUGINS_VARIABLE, greet)
    assert call(capsys, *before, "greet", "Hanako", "--loud") == (0, "HANAKO\n", "")
    code, out, _ = call(capsys, *before, "--help")
    assert code == 0 and "  greet       Greet somebody\n  status " in out
    assert "Example:\n    terakoya --plugin greet.py greet Hanako" in call(capsys, *before, "greet", "-h")[1]
    code, _, err = call(capsys, *before, "--without", "greet", "greet", "Hanako")
    assert code == 2 and "greet: no such command" in err and "excluded by --without and might have it: greet" in err


def test_only_options_before_the_verb_load_plugins() -> None:
    given = ["--plugin", "a.py", "--trace-plugins", "--without=c", "--plugin=b.py", "train", "--plugin", "d.py"]
    assert _before_the_verb(given, "--plugin") == ("a.py", "b.py")
    assert _before_the_verb(given, "--without") == ("c",)
    assert _before_the_verb(["--plugin"], "--plugin") == ()


def test_an_installed_plugin_that_fails_takes_no_other_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = GREET.replace('{"greet": Command(', '{"greet": print(').replace(', after="train")', ")")
    install(tmp_path, monkeypatch, "breaks_verbs", wrong)
    found = find_verbs(register_commands())
    assert "train" in found.commands and "greet" not in found.commands
    assert "could not be loaded and might have it: plugin breaks_verbs (breaks_verbs 1.0): register_commands: " in (
        found.might_have
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"greet": Command', '"train": Command', 'command "train" is registered twice: by terakoya and by greet'),
        ("return {", "return [", "invalid syntax|does not match"),
        ('"greet": Command', '"train greet": Command', '"train greet" of greet: there is no group "train"'),
        ('Command(greet, "terakoya --plugin greet.py greet Hanako", after="train")', "greet", "expected a mapping of"),
        ("def register_commands():", "def register_commands():\n    1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_verb_is_an_error_that_names_the_plugin(greet: str, old: str, new: str, message: str) -> None:
    Path(greet).write_text(Path(greet).read_text().replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        find_verbs(register_commands(), [greet])
    assert "greet" in str(caught.value)


def test_a_plugin_adds_a_verb_to_a_group(
    greet: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(greet).write_text(Path(greet).read_text().replace('"greet": Command', '"store greet": Command'))
    assert call(capsys, "--plugin", greet, "store", "greet", "Hanako") == (0, "Hanako\n", "")
    assert "  greet " in call(capsys, "--plugin", greet, "store", "-h")[1]
    assert "  greet " not in call(capsys, "--plugin", greet, "-h")[1]


def test_a_verb_finds_options_that_it_does_not_declare(greet: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = GREET.replace("def greet(name: str,", "import typer\ndef greet(context: typer.Context, name: str,")
    source = source.replace("print(", "print(context.args, ").replace('"train")', '"train", passes_options=True)')
    Path(greet).write_text(source)
    said = call(capsys, "--plugin", greet, "greet", "Hanako", "--loud", "--times", "3")
    assert said == (0, "['--times', '3'] HANAKO\n", "")


def test_an_installed_plugin_has_a_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, "loud_language", LOUD)
    monkeypatch.setenv("TERAKOYA_LANG", "loud")
    assert call(capsys, "trian")[2] == "ERROR: HOW?\n"
    assert "GO FROM TOKENIZER TO FINISHED MODEL" in call(capsys, "-h")[1]
    assert "there is no language loud" in call(capsys, "--without", "loud_language", "-h")[2]
    monkeypatch.setenv("TERAKOYA_LANG", "")
    assert "Go from tokenizer to finished model" in call(capsys, "-h")[1]


def test_verbs_stand_behind_those_that_they_name() -> None:
    def named(after: str | None) -> Command:
        return Command(print, "", after)

    commands = {"a": named(None), "b": named(None), "x": named("a"), "y": named("x"), "z": named("a"), "w": named("no")}
    assert list(_in_order(commands)) == ["a", "x", "y", "z", "b", "w"]
    assert set(_in_order({"a": named("b"), "b": named("a")})) == {"a", "b"}


def test_what_a_missing_family_has_is_answered_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brings = Family(
        verbs=("sing", "store sing"),
        functions={"sing": "terakoya_songs.sing"},
        components=("schedules sung",),
        keys=("tune",),
    )
    monkeypatch.setitem(families.FAMILIES, "songs", brings)
    code, _, err = call(capsys, "sing")
    belongs = "it belongs to the family songs, which is not installed or excluded"
    assert code == 2 and err == f"error: terakoya sing: no such command; {belongs}\n"
    code, _, err = call(capsys, "store", "sing")
    assert code == 2 and err == f"error: terakoya store sing: no such command; {belongs}\n"
    with pytest.raises(AttributeError, match=belongs):
        terakoya.sing  # noqa: B018 (looked up)
    with pytest.raises(AttributeError, match=r"terakoya has no attribute 'song'$"):
        terakoya.song  # noqa: B018 (looked up)
    with pytest.raises(UserError, match=f"schedule sung: not installed; {belongs}"):
        registry().component("schedules", "sung")
    assert explain_unknown_key("tune", ["tuna", "seed"]) == f"; {belongs}"


@pytest.mark.parametrize(("family", "verb", "needed"), [("hub", "upload", "report"), ("clusters", "move", "launch")])
def test_a_family_without_one_that_it_needs_has_no_verbs_and_says_why(
    family: str, verb: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verb in find_verbs(register_commands()).commands
    there = families.find_spec
    monkeypatch.setattr(families, "find_spec", lambda name: None if name == f"terakoya_{needed}" else there(name))
    found = find_verbs(register_commands())
    assert verb not in found.commands and "train" in found.commands
    assert f"could not be loaded and might have it: plugin terakoya_{family} (terakoya " in found.might_have
    assert f"): needs the family {needed}, which is not installed" in found.might_have


POLITE = """
from typing import Annotated

import typer

from terakoya import hookimpl

def speak(verb, arguments, *, polite: Annotated[bool, typer.Option("--polite", help="Say san.")] = False) -> None:
    verb(**{**arguments, "name": arguments["name"] + "-san"} if polite else arguments)

@hookimpl
def register_options():
    return {"greet": speak}
"""


def test_a_plugin_adds_options_to_a_verb_of_another(
    greet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    polite = tmp_path / "polite.py"
    polite.write_text(POLITE, encoding="utf-8")
    both = ["--plugin", str(polite), "--plugin", greet, "greet"]
    assert call(capsys, *both, "Hanako", "--polite", "--loud") == (0, "HANAKO-SAN\n", "")
    assert call(capsys, *both, "Hanako") == (0, "Hanako\n", "")
    help = call(capsys, *both, "-h")[1]
    assert help.index("Greet somebody.") < help.index("--loud") < help.index("--polite") < help.index("Say san.")
    monkeypatch.setitem(families.FAMILIES, "manners", Family(verbs=("greet --polite",)))
    code, _, err = call(capsys, "--without", "polite", *both, "Hanako", "--polite")
    assert code == 2 and "--polite: no such option; it belongs to the family manners" in err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{"greet"', '{"greed"', 'options of polite: there is no command "greed"; did you mean "greet"'),
        ("polite: Annotated", "loud: Annotated", "options of polite for greet: loud: it has them already"),
        ("speak}", "1}", "expected a mapping of names to what"),
    ],
)
def test_wrong_options_are_an_error_that_names_the_plugin(
    greet: str, tmp_path: Path, old: str, new: str, message: str
) -> None:
    polite = tmp_path / "polite.py"
    polite.write_text(POLITE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        find_verbs(register_commands(), [greet, str(polite)])


CHOIR = """
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from terakoya import Command, hookimpl
from terakoya.preparation.options import PrepareOptions

if TYPE_CHECKING:
    import typer
    from nowhere import Key

@dataclass(frozen=True, kw_only=True)
class Options:
    songs: Annotated[Sequence[str], typer.Argument(help="What is sung.")]
    voices: Annotated[Sequence[int], typer.Option("--voice", min=1, help="Singers of a voice.")] = (2, 3)
    key: Annotated[Key | tuple[str, str], typer.Option(help="The key.", parser=lambda text: tuple(text.split()))] = "F"
    encoding: Annotated[str | None, PrepareOptions] = None
    report: Callable[[str], None] = print

def sing(options: Options) -> None:
    'Sing songs.'
    options.report(f"{options.songs} {options.voices} {options.key} {options.encoding}")

def twice(verb, arguments, *, again: bool = False):
    for _ in range(2 if again else 1):
        verb(**arguments)
    print(arguments["options"].voices)

@hookimpl
def register_commands():
    return {"sing": Command(sing, "terakoya sing Sakura")}

@hookimpl
def register_options():
    return {"sing": twice}
"""


def test_the_fields_of_an_options_object_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choir = tmp_path / "choir.py"
    choir.write_text(CHOIR, encoding="utf-8")
    verb = ["--plugin", str(choir), "sing"]
    assert call(capsys, *verb, "Sakura")[1] == "['Sakura'] (2, 3) ('F',) None\n(2, 3)\n"
    given = ["Sakura", "Kojo", "--voice", "4", "--voice", "5", "--key", "g major", "--encoding", "shift_jis", "--again"]
    line = "['Sakura', 'Kojo'] [4, 5] ('g', 'major') shift_jis\n"
    assert call(capsys, *verb, *given)[1] == f"{line}{line}[4, 5]\n"
    help = call(capsys, *verb, "-h")[1]
    places = [
        help.index(each) for each in ("SONGS...", "--voice", "The key.  [default: F]", "--encoding NAME", "--again")
    ]
    assert places == sorted(places) and "report" not in help
    assert "greater than or equal to 1" in call(capsys, *verb, "Sakura", "--voice", "0")[2]
