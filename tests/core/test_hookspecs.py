"""Every hook is typed, documented and tested; a new one without its test fails here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from word_tokenizer import WordTokenizer, make_folder

from terakoya import hookspecs
from terakoya.components import KINDS
from terakoya.config.keys import find_key
from terakoya.corpus.corpus import Corpus, Document
from terakoya.errors import UserError
from terakoya.plugins import loading as plugins
from terakoya.plugins.cleaning import read_cleaning
from terakoya.preparation.job import PrepareJob
from terakoya.preparation.local import prepare_locally
from terakoya.preparation.options import PrepareOptions
from terakoya.store.token_store import TokenStore

HOOKS = {
    name: function
    for name, function in vars(hookspecs).items()
    if inspect.isfunction(function) and hasattr(function, "terakoya_spec")
}

REGISTER_HOOKS = {
    "register_tokenizers": "Tokenizer",
    "register_architectures": "Architecture",
    "register_objectives": "Objective",
    "register_optimizers": "Optimizer",
    "register_schedules": "Schedule",
    "register_exporters": "Exporter",
    "register_importers": "Importer",
    "register_trackers": "Tracker",
    "register_word_finders": "WordFinder",
    "register_launchers": "Launcher",
    "register_initializers": "Initializer",
    "register_cleaning_steps": "CleaningStep",
    "register_events": "EventPlugin",
}

RUN, REPORT, FOLDER, ERROR = "the run", "the report", Path("folder"), KeyboardInterrupt()

EVENTS: dict[str, dict[str, Any]] = {
    "run_started": {"run": RUN},
    "step_finished": {"run": RUN, "report": REPORT},
    "evaluate": {"run": RUN},
    "validation_finished": {"run": RUN, "values": {"store": {"loss": 1.0}}},
    "checkpoint_saved": {"run": RUN, "folder": FOLDER},
    "run_finished": {"run": RUN, "error": ERROR},
}

Load = Callable[[str], plugins.Registry]


@pytest.fixture
def load(fresh_plugins: None, tmp_path: Path) -> Load:
    """Returns a function that loads the bundled plugins and one with the given source."""

    def load(source: str) -> plugins.Registry:
        file = tmp_path / "mine.py"
        file.write_text(source, encoding="utf-8")
        return plugins.load([str(file)])

    return load


def test_every_hook_has_a_test_in_this_file() -> None:
    assert set(HOOKS) == {*plugins.FURTHER_HOOKS, *REGISTER_HOOKS, *EVENTS}
    assert set(REGISTER_HOOKS) == set(plugins.REGISTER_HOOKS.values())
    assert tuple(EVENTS) == plugins.EVENTS


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_documented(name: str) -> None:
    text = " ".join((HOOKS[name].__doc__ or "").split())
    assert text.startswith("Called "), "when"
    assert re.search(r"on every rank|in every process|on rank 0", text), "on which ranks"
    assert re.search(r"\bReturns? \w+", text), "what the return means"


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_typed_and_has_the_arguments_of_its_wrapper(name: str) -> None:
    signature = inspect.signature(HOOKS[name])
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())
    if name in EVENTS:
        assert list(signature.parameters) == list(EVENTS[name])
        wrapper = inspect.signature(getattr(plugins.Events, name))
        assert list(wrapper.parameters)[1:] == list(EVENTS[name])
        assert {each: parameter.annotation for each, parameter in wrapper.parameters.items() if each != "self"} == {
            each: parameter.annotation for each, parameter in signature.parameters.items()
        }


@pytest.mark.parametrize(("hook", "base"), REGISTER_HOOKS.items())
def test_a_registration_hook_registers_its_classes_by_name(load: Load, hook: str, base: str) -> None:
    registry = load(
        f"from terakoya import hookimpl\nfrom terakoya.components import {base}\n"
        f"class Mine({base}):\n    size: int = 3\n"
        f"@hookimpl\ndef {hook}():\n    return {{'my_own': Mine}}\n"
    )
    kind = hook.removeprefix("register_")
    component = registry.component(kind, "my_own")
    assert issubclass(component, KINDS[kind]) and component().size == 3
    assert "my_own" in registry.names(kind)


@pytest.mark.parametrize(("event", "arguments"), EVENTS.items())
def test_an_event_reaches_its_listener_with_its_arguments(load: Load, event: str, arguments: dict[str, Any]) -> None:
    names = ", ".join(arguments)
    registry = load(
        "from terakoya import hookimpl\ncalls = []\n"
        f"@hookimpl\ndef {event}({names}):\n    calls.append(({names},))\n    return {{}}\n"
    )
    getattr(registry.hook, event)(**arguments)
    module = next(plugin.module for plugin in registry.plugins if plugin.name == "mine")
    assert module.calls == [tuple(arguments.values())]  # type: ignore[attr-defined]


SETTINGS = """
from pydantic import BaseModel
from terakoya import hookimpl

class Wishes(BaseModel):
    volume: int = 3
    \"\"\"How loud. Unit: dB.\"\"\"

@hookimpl
def register_settings():
    return {"train --wishes": Wishes}
"""


def test_a_settings_file_of_a_plugins_option_is_known(load: Load) -> None:
    registry = load(SETTINGS)
    (entry,) = find_key("volume", registry)
    assert (entry.file, entry.setting.unit, entry.defaults) == ("command", "dB", {"3": ["train --wishes"]})


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("[Wishes]", "register_settings: expected a mapping of name to subclass of BaseModel, got list"),
        ('{"train --wishes": 1}', '"train --wishes": expected a subclass of BaseModel, got 1'),
    ],
)
def test_wrong_settings_are_an_error_that_names_the_plugin(load: Load, new: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load(SETTINGS.replace('{"train --wishes": Wishes}', new))
    assert "mine" in str(caught.value)


@pytest.mark.usefixtures("fresh_plugins")
def test_two_settings_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    files = [tmp_path / "mine.py", tmp_path / "yours.py"]
    for file in files:
        file.write_text(SETTINGS, encoding="utf-8")
    with pytest.raises(UserError, match=r'plugin yours .*"train --wishes" is registered twice'):
        plugins.load([str(file) for file in files])


CLEANING = """
from dataclasses import dataclass, replace
from terakoya import hookimpl

@dataclass(frozen=True)
class Shouting:
    words: tuple
    settings: str = "loud"
    facts = {"clean": "loud"}
    documents = 2

    def make_plan(self, corpus, *, processes, name=""):
        assert corpus.cleaning is self

    def explain_empty(self):
        return None

    def apply(self, block, items):
        return (replace(each, text=each.text.upper()) for each in items if each.text not in self.words)

@hookimpl
def read_cleaning(clean, source):
    if source == "mine":
        return lambda corpus, folder, held_out: replace(corpus, cleaning=Shouting(tuple(clean)))
"""


@pytest.mark.usefixtures("fresh_plugins")
def test_a_plugin_cleans_in_its_own_way_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CLEANING, encoding="utf-8")
    plugins.load([str(tmp_path / "mine.py")], ("cleaning",))
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    corpus = read_cleaning(["two"], "mine")(Corpus([tmp_path / "a.txt"]), tmp_path, False)
    texts = [item.text for block in corpus.blocks() for item in corpus.read(block) if isinstance(item, Document)]
    assert texts == ["ONE"] and corpus.facts["cleaning"] == "loud"


def test_without_a_plugin_that_cleans_the_family_is_named(fresh_plugins: None) -> None:
    plugins.load((), ("cleaning",))
    with pytest.raises(UserError, match=r"^clean: no plugin cleans documents; it belongs to the family cleaning"):
        read_cleaning([{"type": "nfkc"}])


def test_a_plugin_keeps_prepare_from_a_folder_that_it_uses(load: Load, tmp_path: Path) -> None:
    load(
        "from terakoya import hookimpl\nfrom terakoya.errors import UserError\n@hookimpl\ndef check_parts(parts):\n"
        "    raise UserError(f'{parts.parent.name}: others are at work')\n"
    )
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    make_folder(tmp_path / "tokenizer")
    options = PrepareOptions(sources=[tmp_path / "a.txt"], tokenizer=tmp_path / "tokenizer", out=tmp_path / "store")
    (tmp_path / "store" / ".parts").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^store: others are at work"):
        PrepareJob.create(options, Corpus([tmp_path / "a.txt"]), WordTokenizer()).find_finished()


FORMAT = """
from terakoya import hookimpl
from terakoya.components import EncodedDocuments
from terakoya.corpus.documents import Document
import numpy as np

class Numbers:
    name, remedies = "numbers", {}
    recorded, inputs, tokenizer_files = {"base": "ten"}, {"base": "10"}, {"base.txt": "10"}

    def read(self, file, line, value, record):
        return Document(" ".join(map(str, value["numbers"])), file, line)

    def encoder(self, tokenizer, folder, vocabulary):
        def encode(documents):
            ids = [np.array(list(map(int, each.split()))) for each in documents]
            lengths = np.array([len(each) for each in ids], np.int32)
            ids = np.concatenate(ids)
            return EncodedDocuments(ids, lengths, np.ones(len(lengths), np.int32), None, learned=ids % 2 == 0)
        return encode

    def tell(self, notes, documents):
        pass

    def tell_store(self, folder, learned):
        (folder / "told").write_text(str(learned))

@hookimpl
def register_record_formats():
    return {"numbers": lambda options, tokenizer: Numbers()}
"""


def test_records_of_a_plugin_become_a_store_that_marks_what_is_learned(load: Load, tmp_path: Path) -> None:
    records = load(FORMAT).record_format("numbers")(None, None)
    file, out = tmp_path / "a.jsonl", tmp_path / "store"
    file.write_text('{"numbers": [6, 7, 8]}\n{"numbers": [9]}\n', encoding="utf-8")
    make_folder(tmp_path / "tokenizer")
    options = PrepareOptions(sources=[file], tokenizer=tmp_path / "tokenizer", out=out, processes=1)
    prepare_locally(PrepareJob.create(options, Corpus([file], records=records), WordTokenizer(), records))
    store = TokenStore.open(out)
    assert store.tokens.tolist() == [6, 7, 8, 9] and store.facts.options["base"] == "ten"
    assert store.read_learned(0, 4).tolist() == [True, False, True, False] and (out / "told").read_text() == "0.5"
    assert (store.tokenizer_folder / "base.txt").read_text() == "10" and store.facts.inputs["base"] == "10"
    with pytest.raises(UserError, match="no plugin reads them"):
        load(FORMAT).record_format("letters")
