"""What a run may change at one of its checkpoints: length, logging, saving and the like freely, anything else with the
user's consent, and what its tensors are of not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from terakoya.atomic_files import FileFacts
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import RESUME_MAY_CHANGE, Parameters, changed_keys, decides_tensors, whole_sections
from terakoya.errors import UserError
from terakoya.json_settings import short_json, value_at
from terakoya.rows.stores import Stores
from terakoya.runs.checkpoints import MANIFEST, read_manifest
from terakoya.runs.forks import Fork, read_fork
from terakoya.store.tokenizer_identity import check_tokenizer_of_run

EVALUATION = ("evaluation.steps", "evaluation.batches")
"""Keys of which the losses depend that a schedule follows."""

MODEL_TYPE = "architecture.type"
OPTIMIZER_STATE = ("optimizer.type", "optimizer.bias_correction")
"""Keys that decide what the optimizer's state holds, or means."""


class ChangeError(UserError):
    """A run does not take changes without consent: its arguments are the message and the keys that have changed."""

    def __str__(self) -> str:
        return str(self.args[0])


def refuse_changes(
    run: Path,
    manifest: Mapping[str, Any],
    parameters: Parameters,
    fingerprints: Mapping[str, str],
    allow_change: frozenset[str],
    say: Callable[[str], None],
) -> list[str]:
    """Says every parameter that has changed since the checkpoint; returns warnings of what the run takes.
    `fingerprints` are by the folders of the stores. Raises UserError if parameters or stores have changed that must
    not, and ChangeError if `allow_change` does not name them."""
    before, now = _with_defaults(manifest["parameters"]), parameters.dump()
    old, new = (short_json(value_at(each, MODEL_TYPE)) for each in (before, now))
    if old != new and allow_change.isdisjoint({MODEL_TYPE, "architecture"}):
        raise ChangeError(
            f"{run}: holds a run of another model: {MODEL_TYPE} was {old}, is {new}; choose another --out, or continue "
            f"with --allow-change {MODEL_TYPE}",
            [MODEL_TYPE],
        )
    for key in whole_sections(changed_keys(before, now), before, now):
        old, new = (short_json(value_at(each, key)) for each in (before, now))
        say(f"parameter {key}: was {old}, is {new}")
    refused = needed_consent(manifest, parameters, fingerprints, allow_change)
    if "data" in refused:
        others = [key for key in refused if key != "data"]
        raise ChangeError(
            f"{run}: the token stores are not the ones this run was started with"
            + (f", nor are the values of {', '.join(others)}" if others else "")
            + "; start a new run, or continue with "
            + " ".join(f"--allow-change {key}" for key in refused),
            refused,
        )
    if refused:
        raise ChangeError(
            f"{run}: the run was started with other values of {', '.join(refused)}; start a new run (another --out), "
            "or continue with " + " ".join(f"--allow-change {key}" for key in refused),
            refused,
        )
    previous = manifest["stores"]
    validated = {previous[name] for name in previous.keys() - _training_stores(before)}
    return [
        f"{name}: the run has not validated on this store before; its losses start a new curve"
        for name in sorted(fingerprints.keys() - _training_stores(now))
        if fingerprints[name] not in validated
    ]


def consent_of_fork(run: Path, folder: Path) -> Fork | None:
    """Returns what the run in `run` knows of its parent where it continues from the very checkpoint `folder` at which
    it has left that: the changes that `terakoya fork` took there count as allowed."""
    fork = read_fork(run)
    return fork if fork is not None and FileFacts.of(folder / MANIFEST).sha256 == fork.manifest else None


def check_vocabulary(folder: Path, stores: Stores) -> None:
    """Raises UserError where ids of `stores` mean something else in the checkpoint `folder`, whose embeddings they
    decide."""
    check_tokenizer_of_run(stores.train[0], folder / "tokenizer")
    if stores.vocabulary != Vocabulary.model_validate(read_manifest(folder)["vocabulary"]):
        raise UserError(
            "data: the stores have another vocabulary than those of the checkpoint, whose embeddings it decides: "
            "prepare them with the tokenizer of the run"
        )


def may_read_others(manifest: Mapping[str, Any], parameters: Parameters) -> bool:
    """Whether a run with these `parameters` may read other stores than the checkpoint with this `manifest`."""
    return any(key.startswith(("data.", "phases.")) for key in changed_keys(manifest["parameters"], parameters))


def check_global_batch(folder: Path, manifest: Mapping[str, Any], parameters: Parameters) -> None:
    """Raises UserError if a run without phases has another global batch than at its checkpoint `folder`."""
    before, now = sum(manifest["parameters"]["batch_size"].values()), sum(parameters.batch_size.values())
    if not parameters.phases and before != now:
        raise UserError(
            f"{folder}: {manifest['consumed_rows']:,} rows were used in {manifest['step']:,} steps of {before}, but "
            f"batch_size is now {now}: keep the global batch, which --allow-change cannot change either, or start a "
            "new run from an export of this one"
        )


def needed_consent(
    manifest: Mapping[str, Any],
    parameters: Parameters,
    fingerprints: Mapping[str, str],
    allow_change: frozenset[str] = frozenset(),
) -> list[str]:
    """Returns the keys that `allow_change` must name, too, before a run continues from the checkpoint with these other
    `parameters`: `data` first, for all keys below it, where it would train on other stores. Raises UserError if
    parameters have changed that decide which tensors the checkpoint holds."""
    before, now = _with_defaults(manifest["parameters"]), parameters.dump()
    changed = changed_keys(before, now)
    allowed = RESUME_MAY_CHANGE | _other_tables_of_equal_batches(before, now)
    if now.get("phases") and sum(before["batch_size"].values()) != sum(now["batch_size"].values()):
        allowed -= {"batch_size"}  # phases without a table of their own would have other rows
    allowed |= allow_change
    refused = [key for key in changed if not any(key == name or key.startswith(f"{name}.") for name in allowed)]
    refused = whole_sections(refused, before, now)
    if any(each.schedule.needs_validation for each in parameters.of_phases):
        refused += _changed_validation(changed, manifest, parameters, fingerprints, allow_change)
    fixed = [key for key in OPTIMIZER_STATE if key in changed][:1]  # another type has other keys
    fixed += [key for key in changed if decides_tensors(key)]
    if fixed:
        raise UserError(
            f"the run was started with other values of {', '.join(fixed)}, which determine what its checkpoints hold: "
            "start a new run, with start_from a folder that `terakoya export` writes of this one to continue from here"
        )
    trained = _training_fingerprints(before, manifest["stores"]), _training_fingerprints(now, fingerprints)
    if "data" not in allow_change and trained[0] != trained[1]:
        return ["data", *(key for key in refused if not key.startswith("data."))]
    return refused


def _changed_validation(
    changed: Sequence[str],
    manifest: Mapping[str, Any],
    parameters: Parameters,
    fingerprints: Mapping[str, str],
    allow_change: frozenset[str],
) -> list[str]:
    """Returns the keys of validation that have changed: losses on other rows, or at other steps, are not those that the
    schedule has followed so far."""
    keys = [key for key in (*EVALUATION, "data.validation") if key in changed]
    before, now = manifest["stores"], parameters.dump()
    old = sorted(before[name] for name in before.keys() - _training_stores(_with_defaults(manifest["parameters"])))
    new = sorted(fingerprints[name] for name in fingerprints.keys() - _training_stores(now))
    if old != new and "data.validation" not in keys:
        keys.append("data.validation")
    if old == new and "data.validation" in keys:
        keys.remove("data.validation")  # the same stores in another place
    return [key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in allow_change)]


def _training_stores(parameters: Mapping[str, Any]) -> set[str]:
    """Returns the folders of the stores that a run with these parameters trains on."""
    stages: list[Mapping[str, Any]] = [parameters["data"], *parameters["data"].get("stages", ())]
    stages += [phase["data"] for phase in parameters.get("phases", ()) if phase["data"]]
    return {entry["store"] for stage in stages for entry in stage["train"] or ()}


def _other_tables_of_equal_batches(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the keys of phases that divide a global batch otherwise among nodes and micro-batches, but have as many
    rows as before."""
    keys = set()
    for number, phases in enumerate(zip(before.get("phases", ()), now.get("phases", ()), strict=False)):
        old, new = (sum((phase["batch_size"] or {}).values()) for phase in phases)
        keys |= {f"phases.{number}.micro_batch_size"} | ({f"phases.{number}.batch_size"} if old == new else set())
    return keys


def _training_fingerprints(parameters: Mapping[str, Any], fingerprints: Mapping[str, str]) -> list[str]:
    """Returns the fingerprints of those stores that the run trains on, in no particular order of the stores."""
    return sorted(fingerprints[name] for name in _training_stores(parameters) if name in fingerprints)


def _with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest's parameters, with the defaults of settings that did not exist when they were written."""
    with contextlib.suppress(UserError):
        return Parameters.from_dict(written, source="manifest.json").dump()
    return written


def other_rounding(manifest: Mapping[str, Any], world: Mapping[str, Any]) -> Iterator[str]:
    """Yields what makes steps of the run from `manifest` on differ in their rounding; `world` is that of this start."""
    before, now = _what_rounds(manifest["world"]), _what_rounds(world)
    known = [key for key in now if None not in (before[key], now[key])]
    changed = [key for key in known if before[key] != now[key]]
    for key, comes_with in (("cuda_graphs", "compile"), ("fused_kernels", "bf16_stream")):
        if comes_with in changed and key in changed:  # one notice is enough
            changed.remove(key)
    differently = "rounded differently from those of a run that was never stopped"
    for key in changed:
        was, is_now = (str(each[key]).lower() if each[key] in (True, False) else each[key] for each in (before, now))
        dropout = ", and their dropout is another one" if key == "fused_kernels" else ""
        yield f"{key} was {was}, and is {is_now}: the steps from here on are {differently}{dropout}"
    if not now["deterministic"] and "deterministic" not in changed:
        yield f"deterministic is false: the steps from here on are {differently}"


def _what_rounds(world: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what decides the rounding of steps, of a manifest's `world`; None where an older run does not say it, or
    nothing is summed over processes."""
    nccl = world.get("nccl")
    return {
        "processor": world.get("processor"),
        "compile": world.get("compile", "off"),
        "cuda_graphs": world.get("cuda_graphs", False),
        "deterministic": world.get("deterministic", world.get("device") != "cuda"),
        "nccl": None if nccl is None else " ".join(f"{name}={value}" for name, value in nccl.items()) or "unset",
        "bf16_stream": world.get("bf16_stream", False),
        "fused_kernels": world.get("fused_kernels", False),
    }
