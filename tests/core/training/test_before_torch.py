"""What parameters, manifests and stores tell is refused before torch is loaded, and only what a start would refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.runs import metrics
from terakoya.runs.checkpoints import MANIFEST, read_manifest, with_hash
from terakoya.training.resuming.before_torch import check_start
from terakoya.training.setup import train_in_this_process
from terakoya_forks.fork import fork

STEP = "checkpoints/step-0000000{}".format
FASTER = {"optimizer": {"type": "adamw", "learning_rate": 0.5}}
COMMAND_LINE = """
import sys
from terakoya.commands.main import main
for words in {commands}:
    try:
        main(words)
    except SystemExit as exit:
        assert exit.code in (None, 0, 2), exit.code
    assert "torch" not in sys.modules, words
"""


@pytest.fixture(scope="module")
def started(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with checkpoints of steps 1 and 2, and its parameters."""
    out = tmp_path_factory.mktemp("started") / "run"
    settings = toy.parameters(store, max_steps=2, checkpoint={"save_steps": 1, "keep": 2})
    train_in_this_process(Parameters.from_dict(settings, source="test"), out)
    return out, settings


def check(out: Path, settings: dict[str, Any], *allowed: str) -> None:
    check_start(out, Parameters.from_dict(settings, source="test"), frozenset(allowed))


@pytest.mark.slow
def test_a_resume_that_is_refused_and_a_fork_load_no_torch(
    started: tuple[Path, dict[str, Any]], validation_store: Path, tmp_path: Path
) -> None:
    out, settings = started
    file = tmp_path / "p.json"
    file.write_text(json.dumps(settings))
    missing = [f'data.train=["{tmp_path}/none"]', "seed=7"]
    train = ["train", str(file), "--out", str(out)]
    expected = {
        "other values of optimizer.learning_rate; start": [*train, "--set", "optimizer.learning_rate=0.5"],
        "other values of optimizer.bias_correction, which": [*train, "--set", "optimizer.bias_correction=false"],
        "but batch_size is now 3": [*train, "--set", 'batch_size={"-1":3}'],
        "the token stores are not the ones": [*train, "--set", f'data.train=["{validation_store}"]'],
        "none: expected a finished token store": [*train, "--set", missing[0]],
        "with other values of seed; start": [*train, "--set", missing[0], "--set", missing[1]],
        "--allow-change optimizr: unknown key": [*train, "--allow-change", "optimizr"],
        "holds a run of another model: architecture.type": ["train", "tiny_gpt2", "--out", str(out)],
        "a run's, got a token store": ["train", str(file), "--out", str(validation_store)],
        "nothing would be left to train": ["fork", str(out), "--out", str(tmp_path / "fork")],
        "changed from here on: seed": ["fork", f"{out}@1", "--out", str(tmp_path / "fork"), "--set", "seed=7"],
    }
    script = COMMAND_LINE.format(commands=list(expected.values()))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout + done.stderr
    refused = [text for text, words in expected.items() if str(out) in words and words[0] == "train"]
    recorded = metrics.read(out).of_kind("error")
    assert len(recorded) == len(refused) and all(map(str.__contains__, [each["text"] for each in recorded], refused))


def test_what_an_earlier_checkpoint_takes_is_left_to_the_start(
    started: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, settings = tmp_path / "run", started[1]
    shutil.copytree(started[0], out)
    check(out, settings)
    with pytest.raises(UserError, match=r"other values of optimizer\.learning_rate"):
        check(out, {**settings, **FASTER})
    check(out, {**settings, **FASTER}, "optimizer.learning_rate")
    manifest = out / STEP(1) / MANIFEST
    facts = {key: value for key, value in read_manifest(out / STEP(1)).items() if key != "sha256"}
    facts["parameters"] = Parameters.from_dict({**settings, **FASTER}, source="test").dump()
    manifest.write_text(json.dumps(with_hash(facts)))
    check(out, {**settings, **FASTER})  # the start looks whether step 2 is damaged
    manifest.write_text("{")
    with pytest.raises(UserError, match=r"other values of optimizer\.learning_rate"):
        check(out, {**settings, **FASTER})
    (out / STEP(2) / MANIFEST).write_text("{")
    check(out, {**settings, **FASTER})  # none is whole, of which the start says more


def test_what_a_fork_has_changed_is_allowed(started: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    fork(started[0], tmp_path / "new", ["max_steps=3", "optimizer.learning_rate=0.5"])
    settings = json.loads((tmp_path / "new/parameters.json").read_text())
    check(tmp_path / "new", settings)
    with pytest.raises(UserError, match="other values of seed;"):
        check(tmp_path / "new", {**settings, "seed": 8})


def test_a_plugin_of_the_run_that_is_not_loaded_is_named(started: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(started[0] / STEP(2), out / STEP(2))
    facts = {key: value for key, value in read_manifest(out / STEP(2)).items() if key != "sha256"}
    listener = {"name": "mine", "distribution": None, "version": None, "sha256": "", "components": [], "events": ["x"]}
    (out / STEP(2) / MANIFEST).write_text(json.dumps(with_hash({**facts, "plugins": [listener]})))
    with pytest.raises(UserError, match=r"plugin mine \(--plugin: events only\) is missing; load it"):
        check(out, started[1])
