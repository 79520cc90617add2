"""What workers of `make test` share: the order of test files, the settings of property tests, a fork server; and the
fixtures that tests of several folders use."""

from __future__ import annotations

import functools
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
import typer.testing
from hypothesis import settings
from stand_in_programs import Programs

gc.disable()  # until everything is imported: a collection would look through a million objects for nothing

# CliRunner builds the command line of a typer application at each call; once a process is enough.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

# The time of an example is that of the machine, which others may share: it says nothing of the code.
settings.register_profile("terakoya", deadline=None)
settings.load_profile("terakoya")

FIRST = (
    "tools/test_cluster.py",
    "core/training/test_tensor_parallel.py",
    "core/estimation/test_estimate_engines.py",
    "core/training/test_deepspeed.py",
    "test_contract.py",
    "core/training/test_pipeline_parallel.py",
    "core/contract/test_plugin_contract.py",
    "core/training/test_invariants.py",
    "core/test_file_faults.py",
    "core/launch/test_launch.py",
    "core/training/test_fsdp.py",
    "plugins/test_family.py",
    "core/training/test_fake_cuda.py",
    "core/plugins/test_plugin_examples.py",
    "plugins/test_drawn_architectures.py",
    "core/training/test_electra_invariants.py",
    "tools/test_engine_table.py",
    "core/commands/test_plugins_new.py",
    "core/training/test_hangs.py",
    "core/preparation/test_datatrove.py",
    "core/launch/test_torchrun_agent.py",
    "core/estimation/test_estimate_layouts.py",
)
"""The files that take longest. Workers take whole files, so a long one that starts last would leave the others idle."""


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    assert all((folder / name).is_file() for name in FIRST)
    rank = {folder / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Collects garbage from now on, without what the tests have imported."""
    gc.freeze()
    gc.enable()


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
def aws(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An account there with a bucket `models`, which boto3 and s3fs find in their variables: its secret."""
    secret = "a-secret-that-must-not-be-written"
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    pytest.importorskip("boto3").client("s3").create_bucket(Bucket="models")
    return secret
