"""Finding, loading, excluding and recording plugins, and the errors of wrong ones."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from terakoya import hookspecs
from terakoya.errors import UserError
from terakoya.plugins import PluginError, load
from terakoya.plugins import loading as plugins
from terakoya.plugins.events import call
from terakoya.plugins.run_record import check_plugins, record_plugins
from terakoya_contract import check_plugin

pytestmark = pytest.mark.usefixtures("fresh_plugins")

SCHEDULE = """
from terakoya import hookimpl
from terakoya.components import Schedule

class Mine(Schedule):
    speed: int = 1

@hookimpl
def register_schedules():
    return {"NAME": Mine}
"""

Write = Callable[[str, str], str]
Install = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a plugin file and returns its path."""

    def write(name: str, source: str) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        return str(file)

    return write


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution: its files and its entry point of the group `terakoya`."""

    def install(name: str, files: Mapping[str, str], *, entry: str, version: str = "1.2") -> None:
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[terakoya]\n{name}_entry = {entry}\n")
        for path, source in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(site))

    return install


def schedule(name: str) -> str:
    return SCHEDULE.replace("NAME", name)


# -------------------------------------------------------------------------------------------------- finding


def test_the_bundled_set_is_found_and_every_module_is_one_plugin() -> None:
    registry = load()
    registered = {(component.kind, component.name): component for component in registry.components()}
    assert registered["architectures", "bert"].module == "terakoya_plugins.architectures.bert"
    assert registered["architectures", "bert"].distribution == "terakoya"
    names = [plugin.name for plugin in registry.plugins]
    assert len(names) == len(set(names))
    assert not any(word.startswith("_") for name in names for word in name.split("."))
    assert registry.broken == []


def test_a_file_is_a_plugin_and_child_processes_inherit_it(write: Write, tmp_path: Path) -> None:
    file = write("mine.py", schedule("mine"))
    registry = load([file])
    assert registry.component("schedules", "mine")(speed=3).speed == 3
    program = "from terakoya.plugins import registry; print(registry().names('schedules'))"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True, env=os.environ
    )
    assert "'mine'" in child.stdout


def test_a_relative_path_is_inherited_by_children_elsewhere(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("mine.py", schedule("mine"))
    monkeypatch.chdir(tmp_path)
    load(["mine.py"])
    assert os.environ[plugins.PLUGINS_VARIABLE] == str(Path(file).resolve())


def test_a_package_is_one_plugin_if_it_has_a_hook_and_else_each_of_its_modules(write: Write, tmp_path: Path) -> None:
    write("pack/__init__.py", "")
    write("pack/one.py", schedule("one"))
    write("pack/deep/__init__.py", "")
    write("pack/deep/two.py", schedule("two"))
    write("pack/whole/__init__.py", schedule("whole"))
    write("pack/whole/part.py", schedule("part"))
    write("pack/_hidden.py", schedule("hidden"))
    write("pack/plain.py", "VALUE = 1")
    registry = load([str(tmp_path / "pack")])
    assert {"one", "two", "whole"} <= set(registry.names("schedules"))
    assert not {"hidden", "part"} & set(registry.names("schedules"))
    assert [plugin.name for plugin in registry.plugins][-3:] == ["pack.deep.two", "pack.one", "pack.whole"]


def test_a_module_of_the_working_directory_is_found_by_name(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("here_now_plugin.py", schedule("here"))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert "here" in load(["here_now_plugin"]).names("schedules")
    assert sys.path == before


def test_an_installed_module_and_an_installed_package_are_found_with_their_distribution(install: Install) -> None:
    install("acme", {"acme_module.py": schedule("acme")}, entry="acme_module")
    install(
        "beta", {"beta_pack/__init__.py": "", "beta_pack/one.py": schedule("beta")}, entry="beta_pack", version="7.0"
    )
    registered = {component.name: component for component in load().components()}
    assert (registered["acme"].distribution, registered["acme"].version) == ("acme", "1.2")
    assert (registered["beta"].distribution, registered["beta"].version, registered["beta"].module) == (
        "beta",
        "7.0",
        "beta_pack.one",
    )


def test_loading_the_same_plugins_again_returns_the_same_registry(write: Write) -> None:
    file = write("mine.py", schedule("mine"))
    first = load([file])
    assert load([file]) is first
    assert load() is first, "plugins that the environment names are loaded, too"
    assert plugins.registry() is first


# -------------------------------------------------------------------------------------------------- excluding


@pytest.mark.parametrize("name", ["acme", "acme_entry", "acme_module", "third-party"])
def test_without_excludes_by_distribution_entry_point_or_module_or_all_third_party(install: Install, name: str) -> None:
    install("acme", {"acme_module.py": "raise RuntimeError('imported')"}, entry="acme_module")
    registry = load(without=[name])
    assert registry.broken == [], "an excluded plugin is not imported"
    assert registry.excluded == ["acme_module"]
    assert "bert" in registry.names("architectures")


def test_without_accepts_the_last_part_of_a_name_and_is_inherited() -> None:
    registry = load(without=["tensorboard"])
    assert "tensorboard" not in registry.names("trackers")
    assert os.environ[plugins.WITHOUT_VARIABLE] == "tensorboard"
    with pytest.raises(UserError, match=r"excluded by --without and might have it: terakoya_plugins\.trackers"):
        registry.component("trackers", "tensorboard")


def test_excluding_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UserError, match='--without tensorbord: there is no such plugin; did you mean "tensorboard"'):
        load(without=["tensorbord"])


# -------------------------------------------------------------------------------------------------- wrong plugins


def test_a_name_that_is_registered_twice_names_both_modules(write: Write) -> None:
    with pytest.raises(UserError) as caught:
        load([write("mine.py", schedule("linear"))])
    assert 'schedule "linear" is registered twice' in str(caught.value)
    assert "terakoya_plugins.schedules.linear (terakoya)" in str(caught.value)
    assert "by mine (--plugin" in str(caught.value)


def test_a_broken_installed_plugin_is_reported_skipped_and_named_when_missed(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme", {"acme_broken.py": "import no_such_thing"}, entry="acme_broken")
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        registry = load()
    message = "plugin acme_broken (acme 1.2): ModuleNotFoundError: No module named 'no_such_thing'"
    assert message in caplog.text
    assert "bert" in registry.names("architectures")
    with pytest.raises(UserError) as caught:
        registry.component("architectures", "acme_bert")
    assert "architecture acme_bert: not installed" in str(caught.value)
    assert "terakoya" in str(caught.value) and "installed with" in str(caught.value)
    assert f"could not be loaded and might have it: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        (schedule("a").replace("return {", "return 1 / 0, {"), "ZeroDivisionError"),
    ],
)
def test_a_broken_requested_plugin_is_an_error_with_its_place(write: Write, source: str, message: str) -> None:
    file = write("bad.py", source)
    with pytest.raises(PluginError) as caught:
        load([file])
    assert message in str(caught.value)
    assert "bad" in caught.value.plugin
    if "import no" not in source:
        assert f"{file}:" in str(caught.value)
    if "return 1 / 0" not in source:
        assert str(caught.value).endswith(". Start without it: --without bad")
        assert load([file], ["bad"]).excluded == ["bad"]


def test_an_installed_plugin_whose_hook_fails_is_skipped_too(install: Install) -> None:
    source = schedule("a").replace("return {", "return 1 / 0, {")
    install("acme", {"acme_late.py": source}, entry="acme_late")
    registry = load()
    assert [str(broken)[:50] for broken in registry.broken] == ["plugin acme_late (acme 1.2): register_schedules: Z"]
    assert "linear" in registry.names("schedules")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("register_schedules", "register_schedule", 'no hook register_schedule; did you mean "register_schedules"'),
        ("@hookimpl\n", "", "register_schedules is not marked with @hookimpl"),
        ("register_schedules()", "register_schedules(model)", "Argument.*model.*hookspecs"),
        ('{"mine": Mine}', '["mine"]', "expected a mapping of name to class, got list"),
        ("Mine}", "Mine()}", "expected a subclass of Schedule"),
        ("Mine}", "dict}", "expected a subclass of Schedule, got <class 'dict'>"),
    ],
)
def test_a_wrong_hook_is_an_error(write: Write, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load([write("wrong.py", schedule("mine").replace(old, new))])


def test_a_misspelt_hook_of_an_installed_plugin_is_an_error_too(install: Install) -> None:
    source = "from terakoya import hookimpl\n@hookimpl\ndef step_finish(run): pass"
    install("acme", {"acme_misspelt.py": source}, entry="acme_misspelt")
    with pytest.raises(UserError, match=r'no hook step_finish; did you mean "step_finished".*--without acme_misspelt'):
        load()


def test_a_plugin_without_hooks_is_an_error_if_requested_and_reported_if_installed(
    write: Write, install: Install
) -> None:
    install("acme", {"acme_empty.py": "VALUE = 1"}, entry="acme_empty")
    assert "has no hook" in str(load().broken[0])
    with pytest.raises(UserError, match=r"--plugin .*empty\.py: has no hook"):
        load([write("empty.py", "VALUE = 1")])


def test_an_installed_module_may_be_requested_and_checked_too() -> None:
    name = "terakoya_plugins.schedules.linear"
    assert "linear" in load([name]).names("schedules")
    results = list(check_plugin(name, train=False))
    assert {result.status for result in results} == {"passed"}
    assert {result.component for result in results} == {name, "schedule linear"}


def test_a_missing_file_and_two_files_of_one_name_are_errors(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        load([str(tmp_path / "nowhere.py")])
    with pytest.raises(UserError, match="two plugins are called mine"):
        load([write("a/mine.py", schedule("a")), write("b/mine.py", schedule("b"))])


def test_an_unknown_component_lists_the_nearest_name_and_all_registered_names() -> None:
    with pytest.raises(
        UserError,
        match=r'schedule lineer: not installed; did you mean "linear".*\n  installed with terakoya .*: constant',
    ):
        load().component("schedules", "lineer")


# -------------------------------------------------------------------------------------------------- events

EVENT = "from terakoya import hookimpl\n@hookimpl\ndef "


def test_an_exception_in_an_event_names_plugin_and_place_and_can_be_pickled(write: Write) -> None:
    file = write("clumsy.py", EVENT + "run_started(run):\n    run.nothing")
    with pytest.raises(PluginError) as caught:
        load([file]).hook.run_started(object())  # type: ignore[arg-type]
    assert caught.value.plugin == "clumsy"
    assert "AttributeError" in str(caught.value) and f"{file}:4" in str(caught.value)
    assert isinstance(caught.value.__cause__, AttributeError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.plugin, str(again)) == ("clumsy", str(caught.value))


def test_numbers_of_evaluate_are_merged_and_a_duplicate_name_is_an_error(write: Write) -> None:
    one = write("one.py", EVENT + "evaluate(run):\n    return {'a': run}")
    two = write("two.py", EVENT + "evaluate():\n    return {'b': 2.0}")
    run: Any = 1.0
    assert load([one, two]).hook.evaluate(run) == {"a": 1.0, "b": 2.0}
    three = write("three.py", EVENT + "evaluate(run):\n    return {'a': 3.0}")
    with pytest.raises(UserError, match='evaluate: "a" is returned twice, by one and by three'):
        load([three]).hook.evaluate(run)
    with pytest.raises(PluginError, match="plugin four: evaluate: expected a mapping"):
        load([write("four.py", EVENT + "evaluate(run):\n    return 3.0")], without=["three"]).hook.evaluate(run)


def test_an_event_without_listeners_costs_almost_nothing() -> None:
    step_finished: Any = load().hook.step_finished
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(1000):
            step_finished(None, None)
        times.append((time.perf_counter() - start) / 1000)
    assert min(times) < 5e-6


def test_tracing_logs_every_call(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugins.TRACE_VARIABLE, "1")
    hook: Any = load([write("quiet.py", EVENT + "step_finished(report):\n    pass")]).hook
    with caplog.at_level(logging.INFO, logger="terakoya"):
        hook.step_finished(run=1, report=77)
    assert "step_finished" in caplog.text and "77" in caplog.text


# -------------------------------------------------------------------------------------------------- records


USES_MINE = {"schedule": {"type": "mine"}, "architecture": {"type": "bert", "hidden_size": 8}}


def load_fresh(requested: Sequence[str]) -> plugins.Registry:
    """Returns the registry of a new process that loads `requested`."""
    os.environ[plugins.PLUGINS_VARIABLE] = ""
    plugins._registries.clear()
    return load(requested)


def test_a_record_has_only_the_plugins_that_the_run_uses(write: Write) -> None:
    files = [write("mine.py", schedule("mine")), write("unused.py", schedule("unused"))]
    record = record_plugins(load([*files, write("other.py", EVENT + "run_started(run):\n    pass")]), USES_MINE)
    assert [(each["name"], each["components"], each["events"]) for each in record] == [
        ("terakoya_plugins.architectures.bert", ["architectures/bert"], []),
        ("mine", ["schedules/mine"], []),
        ("other", [], ["run_started"]),
    ]
    assert all(len(each["sha256"]) == 64 for each in record)


def test_a_record_names_a_nested_component(write: Write) -> None:
    record = record_plugins(
        load([write("mine.py", schedule("mine"))]), {"objective": {"parts": [{"inner": {"type": "mine"}}]}}
    )
    assert [each["name"] for each in record] == ["mine"]


def test_a_record_names_missing_and_changed_plugins(write: Write) -> None:
    mine, other = write("mine.py", schedule("mine")), write("other.py", EVENT + "run_started(run):\n    pass")
    record = record_plugins(load([mine, other]), USES_MINE)
    entry = next(each for each in record if each["name"] == "mine")
    assert check_plugins(load(), record, USES_MINE) == ([], [])

    Path(mine).write_text(schedule("mine") + "# edited\n")
    check = check_plugins(load_fresh([mine]), record, USES_MINE)
    assert check.missing == [f"plugin other (--plugin: events only) is missing; load it: terakoya --plugin {other} ..."]
    assert check.changed == ["plugin mine (--plugin: schedules/mine) has changed (same version)"]
    older = [{**entry, "version": "1"}]
    assert "(1 -> None)" in check_plugins(load(), older, USES_MINE).changed[0]


def test_plugins_that_a_run_no_longer_uses_may_be_missing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = write("mine.py", schedule("mine")), write("other.py", EVENT + "run_started(run):\n    pass")
    record = record_plugins(load([mine, other]), USES_MINE)
    check = check_plugins(load_fresh([other]), record, {"schedule": {"type": "linear"}})
    assert check == ([], [])
    check = check_plugins(load_fresh([]), record, USES_MINE, events=False)
    missing = "plugin mine (--plugin: schedules/mine) is missing; load it: terakoya --plugin"
    assert check == ([f"{missing} {mine} ..."], [])
    monkeypatch.chdir(Path(mine).parent)
    assert check_plugins(load(), record, USES_MINE, events=False).missing == [f"{missing} mine.py ..."]
    older = [{name: value for name, value in each.items() if name != "requested"} for each in record]
    assert check_plugins(load(), older, USES_MINE, events=False).missing == [f"{missing} FILE ..."]


def test_a_component_that_moved_to_another_plugin_is_not_missing(write: Write) -> None:
    record = record_plugins(load([write("mine.py", schedule("mine"))]), USES_MINE)
    check = check_plugins(load_fresh([write("renamed.py", schedule("mine"))]), record, USES_MINE)
    assert check.missing == []
    assert check.changed == ["plugin mine (--plugin: schedules/mine) is missing; its components come from renamed"]


# -------------------------------------------------------------------------------------------- deprecated hooks


@pytest.fixture
def _deprecated_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a deprecated hook."""

    @hookspecs.hookspec(warn_on_impl=hookspecs.DeprecatedHook("0.9", "use run_finished"))
    def run_paused(run: object) -> None: ...

    monkeypatch.setattr(hookspecs, "run_paused", run_paused, raising=False)
    monkeypatch.setattr(plugins, "EVENTS", (*plugins.EVENTS, "run_paused"))


@pytest.mark.usefixtures("_deprecated_hook")
def test_a_deprecated_hook_warns_at_every_start_and_still_works(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    file = write(
        "mine.py", EVENT + "run_paused(run):\n    run.append('paused')\n@hookimpl\ndef run_started(run):\n    pass"
    )
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        loaded = load([file])
    expected = f"plugin mine (--plugin {file}): hook run_paused is removed in terakoya 0.9: use run_finished"
    assert [str(each) for each in loaded.deprecated_hooks] == [expected]
    assert caplog.messages == [expected]
    seen: list[str] = []
    call(loaded.hook.listeners["run_paused"], run=seen)
    assert seen == ["paused"]
    results = [result for result in check_plugin(file) if result.status == "warning"]
    assert [result.text for result in results] == [expected]


def test_a_removed_hook_is_an_error(write: Write) -> None:
    with pytest.raises(UserError, match="there is no hook run_paused"):
        load([write("mine.py", EVENT + "run_paused(run):\n    pass")])
