"""What workers of `make test` share: the order of test files, the settings of property tests, a fork server; and the
fixtures that tests of several folders use."""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fork_server
import frozen
import fsspec
import psutil
import pytest
import typer.testing
from hypothesis import settings
from stand_in_programs import Programs

gc.disable()  # until everything is imported: a collection would look through a million objects for nothing

# CliRunner builds the command line of a typer application at each call; once a process is enough.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

# The time of an example is that of the machine, which others may share: it says nothing of the code.
# By day a property is tried on a fifth of the examples that it is at night (--hypothesis-profile night).
settings.register_profile("night", deadline=None)
settings.register_profile("day", deadline=None, max_examples=20)
settings.load_profile("day")

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that each test file takes, and which of its tests are slow; `make durations` writes it."""
SLOW = 0.04
"""A test is slow that takes more seconds, with its fixtures, or whose programs are forks: the first one needs many. A
fixture of the session counts from `COSTLY` on."""
COSTLY = 2.0
LARGE = 12
"""Cases from which on a table is shared by `--nights` nights."""
CI_ONLY = (
    "tools/", "families/clusters/", "families/megatron/", "families/places/", "families/language_pretraining/",
    "families/parallel/test_deepspeed.py", "families/parallel/test_more_processes.py",
    "families/parallel/test_sharded_card.py", "families/precision/test_fused_kernels.py", "families/test_taken_out.py",
    "core/conversion/test_elsewhere.py", "families/planning/test_estimate_engines.py",
    "families/planning/test_estimate_memory.py", "core/test_file_faults.py", "core/training/test_fake_cuda.py",
    "families/pipeline/test_demo.py::test_its_first_steps_on_a_processor_with_avx2_alone",
    "plugins/formats/test_deepspeed_checkpoints.py",
)  # fmt: skip
"""How the names of tests begin that imitate other machines, faults and installations, try a tool, or are of an engine
or a family that few changes reach, and take long: run where `CI` is set in the environment, as continuous integration
does, and where files are named."""
spent: dict[str, float] = defaultdict(float)
slow: dict[str, set[str]] = defaultdict(set)
"""Those of this run."""
fixture_seconds: dict[str, float] = {}
"""What the fixtures of this process have taken that count."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In pytest's own process: gives a worker of xdist the fork server of all workers."""
    node.workerinput["fork_server"] = fork_server.share()


def pytest_configure(config: pytest.Config) -> None:
    # nohup ignores the first, a script's background job the second, and so would every process that a test starts
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        fork_server.use(*config.workerinput["fork_server"])
        _collect_from_own_part(config, config.workerinput["workerid"], config.workerinput["workercount"])
    elif config.getoption("dist", "no") == "no":  # else a pool of the code under test could start one without `warm`
        fork_server.use(*fork_server.share())


def _collect_from_own_part(config: pytest.Config, worker: str, count: int) -> None:
    """Lets each worker begin with other files: in a fresh clone one rewrites the asserts of a file, and the others read
    what it wrote. `pytest_collection_modifyitems` brings all into one order."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
        first = len(files) * int(worker.removeprefix("gw")) // count
        config.args[:] = files[first:] + files[:first]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name} anew")
    parser.addoption("--nights", type=int, default=1, help="how many nights share the cases of large tables")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves cases of large tables to other nights and some tests to continuous integration, marks the slow tests, and
    puts the files first that take longest, before them new ones: workers take whole files, and a long one that starts
    last would leave the others idle."""
    tables = defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly"):
            tables[item.path, _function(item.name)].append(item)
    nights, today = config.getoption("--nights"), datetime.date.today().toordinal()
    later = {
        item for table in tables.values() if len(table) >= LARGE
        for number, item in enumerate(table) if (number + today) % nights
    }  # fmt: skip
    if "CI" not in os.environ and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for start in CI_ONLY:
            named = {item for item in items if item.nodeid.startswith(f"tests/{start}")}
            assert named, f"no test's name begins with {start}"
            later |= named
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]
    known = json.loads(DURATIONS.read_bytes())
    new = {"seconds": math.inf, "slow": []}
    items.sort(key=lambda item: (-known.get(_name(item.path), new)["seconds"], item.path))
    for item in items:
        forks = "warm_python" in getattr(item, "fixturenames", ())
        if forks or _function(item.name) in known.get(_name(item.path), new)["slow"]:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    began = time.monotonic()
    made = yield
    seconds = time.monotonic() - began
    fixture_seconds[fixturedef.argname] = seconds if fixturedef.scope != "session" or seconds > COSTLY else 0.0
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> None:
    fixtures = sum(fixture_seconds.get(name, 0.0) for name in item.fixturenames)
    if call.when == "call" and call.duration + fixtures > SLOW:
        item.user_properties.append(("slow", True))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = _name(DURATIONS.parents[1] / report.location[0])
    spent[file] += report.duration
    if any(name == "slow" for name, _ in report.user_properties):
        slow[file].add(_function(report.location[2]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-durations") and not hasattr(session.config, "workerinput"):
        lines = [
            f"{json.dumps(name)}: {json.dumps({'seconds': round(seconds, 1), 'slow': sorted(slow[name])})}"
            for name, seconds in sorted(spent.items())
        ]
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _function(name: str) -> str:
    return name.partition("[")[0]


@functools.cache
def _name(file: Path) -> str:
    return file.relative_to(DURATIONS.parent).as_posix()


def pytest_collection_finish() -> None:
    """Collects garbage from now on, without what the tests have imported."""
    frozen.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Takes back what the tests of a file made known to this process, which other files share: the loaded plugins, the
    variables that name them, and the classes that AutoTokenizer gives. Fails where a process is left that computes."""
    from terakoya.plugins import loading

    plugins, registries = loading._current, dict(loading._registries)
    variables = {name: value for name, value in os.environ.items() if name.startswith("TERAKOYA_")}
    yield
    loading._current, loading._registries = plugins, registries
    for name in [name for name in os.environ if name.startswith("TERAKOYA_")]:
        del os.environ[name]
    os.environ.update(variables)
    auto = sys.modules.get("transformers.models.auto.tokenization_auto")
    if auto is not None:
        for table in (auto.REGISTERED_FAST_ALIASES, auto.REGISTERED_TOKENIZER_CLASSES):
            table.clear()
        auto.TOKENIZER_MAPPING._extra_content.clear()
    left = list(_orphans(request.node.nodeid))
    if left:  # most end by themselves, and need no processor until then
        busy = list(left)
        for _ in range(60):  # on a busy machine an end takes long
            before = {process: _cpu_seconds(process) for process in busy}
            psutil.wait_procs(left, timeout=1)
            busy = [process for process, seconds in before.items() if _cpu_seconds(process) > seconds + 0.2]
            if not busy:
                break
        for process in busy:
            process.kill()
        assert busy == [], "processes that the tests started, that compute and that nobody ends"


def _orphans(file: str) -> Iterator[psutil.Process]:
    """Yields the processes that a test of `file` started and whose parents are gone."""
    for process in psutil.Process(1).children():
        with suppress(psutil.Error):
            if process.environ().get("PYTEST_CURRENT_TEST", "").startswith(f"{file}::"):
                yield process


def _cpu_seconds(process: psutil.Process) -> float:
    """The processor time of `process`, 0 where it has ended."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Path]:
    """A `python` that starts `-m terakoya` by a fork, see helpers/warm_python.py."""
    import warm_python

    with warm_python.running() as program:
        yield program


@pytest.fixture
def forks(warm_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands and scripts that use `sys.executable` start forks."""
    monkeypatch.setattr(sys, "executable", str(warm_python))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store of 150 documents."""
    import toy

    return toy.make_store(tmp_path_factory.mktemp("toy") / "train", documents=150, seed=1)


@pytest.fixture(scope="session")
def validation_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store of 30 other documents."""
    import toy

    return toy.make_store(tmp_path_factory.mktemp("toy") / "validation", documents=30, seed=2)


@pytest.fixture(scope="module")
def remembered_steps() -> Iterator[None]:
    """Simulates each step of an estimate once for a file whose tests ask for the same ones again and again."""
    from terakoya_planning import fake_step

    simulate, known = fake_step._simulate, {}

    def remember(parameters: Any, **given: Any) -> Any:
        key = f"{parameters.model_dump_json()} {given}"
        if key not in known:
            known[key] = simulate(parameters, **given)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_step, "_simulate", remember)
        yield


@pytest.fixture(scope="session")
def trained(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The runs of every engine that this session has trained."""
    import engine_runs

    return engine_runs.Runs(store, validation_store, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def runs(trained: Any) -> Iterator[Any]:
    """These runs, and processes that train others until the file ends."""
    yield trained
    trained.close()


@pytest.fixture
def fresh_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test load plugins as a new process does."""
    from terakoya.plugins import loading

    monkeypatch.setattr(loading, "_current", None)
    monkeypatch.setattr(loading, "_registries", {})
    for variable in (loading.PLUGINS_VARIABLE, loading.WITHOUT_VARIABLE, loading.TRACE_VARIABLE):
        monkeypatch.setenv(variable, "")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Stand-ins for the programs of a scheduler, first on the PATH."""
    programs = Programs(tmp_path)
    monkeypatch.setenv("PATH", programs.environment["PATH"])
    return programs


@pytest.fixture(scope="module")
def aws_server() -> Iterator[str]:
    """The address of a stand-in for AWS."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An account there with a bucket `models`, which boto3 and s3fs find in their variables: its secret."""
    secret = "a-secret-that-must-not-be-written"
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    pytest.importorskip("boto3").client("s3").create_bucket(Bucket="models")
    yield secret
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # which has the server's address
