"""How the processes of a run meet: each opens its stores, all connect, none goes on where they were given different
things, and they hold one folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from terakoya.atomic_files import check_writable
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import RANKS_MAY_DIFFER, Parameters
from terakoya.distributed.context import DistributedContext, connect
from terakoya.distributed.signals import StopRequest
from terakoya.distributed.topology import LaunchInfo
from terakoya.errors import FileError, RankLostError, TemporaryFailure, UserError
from terakoya.json_settings import leaves
from terakoya.places import HERE, Place
from terakoya.plugins import registry
from terakoya.plugins.run_record import record_plugins
from terakoya.rows.stores import Stores
from terakoya.runs.checkpoints import DamagedError, list_checkpoints, read_manifest
from terakoya.runs.folder import check_place, lock_run
from terakoya.store.tokenizer_identity import recorded_vocabulary
from terakoya.toolkit.fast_products import fastest_precision, multiplies_fast
from terakoya.training.engines.build import find_plugin_engine
from terakoya.training.model.transforms import find_transforms
from terakoya.version import __version__, find_commit

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "tokenizers", "safetensors", "numpy")
"""Packages whose versions a manifest records."""
COMPUTING = ("terakoya", "torch", "transformers", "accelerate", "deepspeed", "numpy")
"""Those that decide what a step computes, or what processes send each other."""
CODE = ("components", "config", "distributed", "rows", "store", "toolkit", "training")
"""The folders of terakoya's code that do."""
SHOWN_DIGITS = 16
"""The digits of a hash that are compared and shown."""
_STORE = re.compile(r"(.+\.)?data\.(validation\.\d+|(.+\.)?store)")
"""The keys whose values are folders of stores."""


Advice = Callable[[Parameters, Vocabulary, DistributedContext], AbstractContextManager[None]]
"""Returns a context in which a run is built and trained, and which may add advice to an error."""


def no_advice(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> AbstractContextManager[None]:
    """Returns a context that leaves errors as they are."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class StartOptions:
    """What the start of a run is given besides its parameters and its folder.

    Attributes:
        node_rank: `--node-rank`; None takes the launcher's.
        expected_processes: `--processes`: the number of processes that the launcher should have started.
        allow_change: keys of parameters that may have changed since the checkpoint.
        start_over: whether the run may begin at step 0 although it has had checkpoints, of which none is whole.
        advice: see `Advice`.
        stop: receives stop requests; the caller closes it. None listens while the run trains.
        place: where the run is kept, and from where it continues if that is further than its folder.
    """

    node_rank: int | None = None
    expected_processes: int | None = None
    allow_change: frozenset[str] = frozenset()
    start_over: bool = False
    advice: Advice = no_advice
    stop: StopRequest | None = None
    place: Place = HERE


DEFAULTS = StartOptions()


def meet(parameters: Parameters, out: Path, options: StartOptions) -> tuple[Parameters, Stores, DistributedContext]:
    """Settles the precision, opens the stores, and joins the processes that the launcher started, which the caller
    leaves at the end.

    Raises:
        RankLostError: not all processes have come in time.
        UserError: other processes came up than expected; on every rank, one of them cannot use a store or `out` or
            lacks the engine, or two of them were given different things.
    """
    launch, expected_processes = LaunchInfo.from_environment(node_rank=options.node_rank), options.expected_processes
    if expected_processes is not None and launch.launcher and launch.world_size != expected_processes:
        raise UserError(f"--processes {expected_processes}, but {launch.launcher} started {launch.world_size}")
    stores, given, error = None, {}, None
    try:
        check_place(out)
        parameters = settle_precision(parameters, out)
        find_plugin_engine(parameters.parallel, processes=launch.world_size)
        stores = Stores.of_run(parameters)
        given = describe_given(parameters, stores, options.place) if launch.world_size > 1 else {}
    except UserError as failed:
        if launch.world_size == 1:
            raise
        error = failed  # which the others hear of when they have met: they would wait for this process
    parallel = parameters.parallel
    for name, value in parallel.nccl.variables(out).items():
        os.environ.setdefault(name, value)  # read when processes connect
    try:
        context = connect(
            launch,
            replica_size=parallel.replica_size,
            timeout_seconds=parallel.timeout_seconds,
            deterministic=parameters.deterministic,
            given=given,
            error=error,
        )
    except RankLostError:
        if error is not None:
            raise error from None
        raise
    assert stores is not None, "connect has raised the error"
    return parameters, stores, context


def settle_precision(parameters: Parameters, out: Path) -> Parameters:
    """Returns the parameters with what "auto" means for the run in `out`: the precision of its newest checkpoint, or
    else the fastest of this process's device. Raises UserError where other parameters rule it out."""
    if parameters.precision != "auto":
        return parameters
    with contextlib.suppress(TemporaryFailure):  # of which more is said when the run is opened
        for _, folder in reversed(list_checkpoints(out / "checkpoints")):
            with contextlib.suppress(DamagedError):
                return parameters.with_precision(read_manifest(folder)["parameters"]["precision"])
    return parameters.with_precision(fastest_precision(_own_device()))


@contextlib.contextmanager
def hold_folder(out: Path, context: DistributedContext) -> Iterator[None]:
    """Creates the folder of a run and holds its lock while the context is open; collective. A file with a nonce proves
    that all nodes see the same file system; the lock, that only one run uses the folder. Raises UserError on every rank
    if either does not hold."""
    error: Exception | None = None
    handle = None
    nonce = context.broadcast(os.urandom(8).hex())
    nonce_file = out / f".nonce-{nonce}"
    if context.is_main:
        try:
            check_writable(out)
            out.mkdir(parents=True, exist_ok=True)
            handle = lock_run(out / "run.lock")
            (out / "checkpoints").mkdir(exist_ok=True)
            nonce_file.write_text(nonce)
        except (OSError, UserError) as raised:
            error = raised
    try:
        if context.world_size == 1 and error:
            raise error if isinstance(error, UserError) else FileError(f"{out}: {error}", getattr(error, "errno", None))
        context.raise_on_all_ranks(f"opening {out}", error)
        if not nonce_file.exists():
            error = UserError(f"{out} is not the folder that rank 0 sees; all nodes need one shared file system")
        context.raise_on_all_ranks("sharing the run's folder", error)
        context.run_on_main(f"opening {out}", nonce_file.unlink)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def describe_given(parameters: Parameters, stores: Stores, place: Place = HERE) -> dict[str, Any]:
    """Returns what all processes of a run must be given alike, by the name that a message calls it: versions,
    parameters, what stores hold, the tokenizer, plugins, and terakoya's own code."""
    plugins = registry()
    dumped = parameters.model_copy(update={"trackers": ()}).dump(plugins)  # rank 0's alone are used
    return {
        **{f"version of {name}": each for name, each in _versions_that_compute().items()},
        **_parameters(dumped, stores),
        **({} if parameters.optimizer.elementwise else {"fast products in bf16": _has_fast_bf16()}),
        "number of stores": len(stores.train),
        "tokenizer of the stores": _short_hash(json.dumps(recorded_vocabulary(stores.train[0])).encode()),
        "place in --out": None if place.is_local else place.name,
        **{
            f"SHA-256 of plugin {each['name']}": (each["sha256"] or "")[:SHOWN_DIGITS]
            for each in record_plugins(plugins, dumped, find_transforms(parameters))
        },
        **{f"SHA-256 of terakoya/{name}": each for name, each in _code().items()},
    }


def _parameters(dumped: Mapping[str, Any], stores: Stores) -> dict[str, Any]:
    """Returns the parameters by their keys, with what a store holds in place of where it lies, and without those that
    may differ."""
    opened = {**stores.validation, **{store.name: store for store in stores.train}}
    result = {}
    for key, value in leaves(dumped):
        if _STORE.fullmatch(key) and value in opened:
            result[f"fingerprint of {key}"] = opened[value].fingerprint[:SHOWN_DIGITS]
        elif not any(key == name or key.startswith(f"{name}.") for name in RANKS_MAY_DIFFER):
            result[key] = value
    return result


def _has_fast_bf16() -> bool:
    """Returns whether this process's device multiplies bf16 fast; otherwise Muon, which every process computes for
    itself, takes float32."""
    return multiplies_fast("bf16", _own_device())


def _own_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _versions_that_compute() -> dict[str, str]:
    """Returns versions, without what names the build for some hardware: `2.9.1` for `2.9.1+cu128`."""
    versions = {name: each.partition("+")[0] for name, each in package_versions().items() if name in COMPUTING}
    return {**versions, "Python": ".".join(platform.python_version_tuple()[:2])}


def _code() -> dict[str, str]:
    """Returns the hash of each file of `CODE` by its path in the package."""
    package = f"{Path(__file__).parents[2]}/"
    result = {}
    for top in CODE:
        for folder, _, names in os.walk(package + top):
            for name in names:
                if name.endswith(".py"):
                    with FileIO(f"{folder}/{name}") as file:  # a Path would take longer than all else
                        result[f"{folder}/{name}".removeprefix(package)] = _short_hash(file.readall())
    return dict(sorted(result.items()))


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SHOWN_DIGITS]


@cache
def package_versions() -> Mapping[str, str]:
    """Returns the versions of terakoya, of its commit and of `PACKAGES`, where they are installed; read once, as each
    takes a millisecond."""
    versions = {"terakoya": __version__}
    if commit := find_commit():
        versions["terakoya's commit"] = commit
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
