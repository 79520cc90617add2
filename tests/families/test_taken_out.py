"""Each family is removed from a copy of the sources, where the three main uses still pass: a tokenizer and a BERT to an
export, an ELECTRA and its discriminator, an architecture as a plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from selection import at_night
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from terakoya.plugins.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
ALL = "all"


Run = Callable[..., list[str]]


@pytest.fixture(scope="module", params=at_night([ALL, *FAMILIES], always=[ALL]))
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources without one family, or without any, that Python imports instead of the installed ones."""
    folder = tmp_path_factory.mktemp("house")
    gone = list(FAMILIES) if request.param == ALL else [request.param]
    while more := [name for name, family in FAMILIES.items() if name not in gone and set(family.needs) & set(gone)]:
        gone += more
    unwanted = shutil.ignore_patterns(*(f"terakoya_{family}" for family in gone))  # bytecode need not be made anew
    for name in ("core", "plugins", "parameters"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = {name: at for name, at in project["entry-points"]["terakoya"].items() if name not in gone}
    assert len(entries) == len(project["entry-points"]["terakoya"]) - len(gone)
    installed = folder / "terakoya-0.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: terakoya\nVersion: 0.0.0\n")
    (installed / "entry_points.txt").write_text("[terakoya]\n" + "\n".join(f"{k} = {v}" for k, v in entries.items()))
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [path for path in sys.path if not path.startswith({str(ROOT)!r} + '/')"
        f" or 'site-packages' in path]\nsys.path[1:1] = [{str(folder / 'core')!r}, {str(folder / 'plugins')!r}]\n"
    )
    return folder


SERVER = """
import json, os, sys
import torch, transformers.models.bert.modeling_bert, transformers.models.electra.modeling_electra
from terakoya.commands.main import main
from terakoya.conversion import elsewhere
from terakoya.training import setup

elsewhere.PROGRAM = "print('[]')"
for line in sys.stdin:
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    codes, sys.stdin = [], open(os.devnull)
    for number, words in enumerate(json.loads(line)):
        for output in (1, 2):
            os.dup2(os.open(f"../{number}.{output}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), output)
        sys.argv = ["terakoya", *words]
        try:
            main(words)
        except SystemExit as ended:
            codes.append(ended.code or 0)
        sys.stdout.flush(), sys.stderr.flush()
    with open("../codes", "w") as file:
        json.dump(codes, file)
    os._exit(0)
"""
"""Runs the commands of each line in a fork, which need not import torch. The tests here load the exports themselves."""


@pytest.fixture(scope="module")
def run(house: Path) -> Iterator[Run]:
    """Runs commands of `terakoya` one after another in the copy, in its folder `work`; returns what each printed."""
    work = house / "work"
    work.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TERAKOYA_")}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=work, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**environment, "PYTHONPATH": str(house), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def run(*commands: Sequence[str], code: int = 0) -> list[str]:
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(commands), file=server.stdin, flush=True)
        done = int(server.stdout.readline())
        said = ["".join((house / f"{number}.{each}").read_text(encoding="utf-8") for each in (1, 2))
                for number in range(len(commands)) if (house / f"{number}.1").exists()]  # fmt: skip
        assert done == 0, said[-1][-3000:]
        codes = json.loads((house / "codes").read_text())
        assert codes == [code] * len(commands), [text[-3000:] for text in said]
        return said

    yield run
    server.communicate(timeout=30)


@pytest.fixture(scope="module")
def store(run: Run, house: Path) -> Path:
    corpus = str(house / "core" / "terakoya" / "corpus" / "demo_town.txt")
    run(
        ["tokenizer", "train", corpus, "--type", "mecab_wordpiece", "--vocab-size", "400", "--out", "tokenizer"],
        ["prepare", corpus, "--tokenizer", "tokenizer", "--out", "store", "--processes", "1"],
    )
    return house / "work" / "store"


def train(house: Path, preset: str, **architecture: object) -> list[str]:
    """The command that trains a toy of a preset."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    settings = json.loads((ROOT / "parameters" / f"{preset}.json").read_text(encoding="utf-8"))
    settings["architecture"] |= small | architecture
    settings |= {
        "data": {"train": ["store"], "sequence_length": 32}, "batch_size": {"-1": 8}, "max_steps": 2,
        "checkpoint": {"save_steps": 2}, "evaluation": None, "trackers": [],
    }  # fmt: skip
    (house / "work" / f"{preset}.json").write_text(json.dumps(settings))
    return ["train", f"{preset}.json", "--out", preset]


def test_no_verb_of_a_missing_family_is_listed(run: Run, house: Path) -> None:
    verbs = {verb: name for name, family in FAMILIES.items() for verb in family.verbs}
    missing = [verb for verb, name in verbs.items() if not (house / "plugins" / f"terakoya_{name}").exists()]
    groups = sorted({verb.rpartition(" ")[0] for verb in verbs}.difference(missing))
    listed = dict(zip(groups, run(*([*group.split(), "--help"] for group in groups)), strict=True))
    assert "  train " in listed[""]
    for verb in verbs:
        group, _, last = verb.rpartition(" ")
        if group not in listed:  # the family has it, too
            continue
        lines = re.search(rf"^ +(-\w, )?{last}\b", listed[group], re.MULTILINE)  # options may have two names
        assert bool(lines) == (verb not in missing), verb
    for verb, said in zip(missing, run(*map(str.split, missing), code=2), strict=True):
        first = next(each for each in accumulate(verb.split(), "{} {}".format) if each in missing)
        assert f"it belongs to the family {verbs[first]}" in said  # which has the verb, or else the option


@pytest.mark.usefixtures("store")
def test_a_bert_from_text_to_an_export(run: Run, house: Path) -> None:
    run(train(house, "tiny_bert"), ["export", "tiny_bert", "--out", "bert"])
    model = AutoModelForMaskedLM.from_pretrained(house / "work" / "bert")
    tokenizer = AutoTokenizer.from_pretrained(house / "work" / "bert")
    assert model(**tokenizer("町の人", return_tensors="pt")).logits.shape[-1] == model.config.vocab_size


@pytest.mark.usefixtures("store")
def test_settings_and_options_name_a_missing_family(run: Run, house: Path) -> None:
    (house / "work" / "clean.json").write_text('[{"type": "nfkc"}]')
    bert = [*train(house, "tiny_bert"), "--out", "refused", "--set"]
    sharded = [*bert, 'parallel={"engine": "deepspeed", "zero_stage": 0}']
    prepare = ["prepare", "clean.json", "--tokenizer", "tokenizer", "--out", "other"]
    commands = {
        "parallel": sharded, "memory": [*bert, "activation_offloading=true"],
        "cleaning": [*prepare, "--clean", "clean.json"],
        "conversations": [*prepare, "--conversations"],
    }  # fmt: skip
    missing = [name for name in commands if not (house / "plugins" / f"terakoya_{name}").exists()]
    for name, said in zip(missing, run(*(commands[name] for name in missing), code=2), strict=True):
        assert f"it belongs to the family {name}" in said
        assert name != "parallel" or "no plugin has the engine of" in said


@pytest.mark.usefixtures("store")
def test_an_electra_and_its_discriminator(run: Run, house: Path) -> None:
    run(
        train(house, "tiny_electra", embedding_size=16, hidden_size=32, num_attention_heads=4),
        ["export", "tiny_electra", "--only", "discriminator", "--out", "discriminator"],
    )
    model = AutoModelForPreTraining.from_pretrained(house / "work" / "discriminator")
    assert type(model).__name__ == "ElectraForPreTraining"


@pytest.mark.usefixtures("store")
def test_an_architecture_as_a_plugin(run: Run, house: Path) -> None:
    source = house / "plugins" / "examples" / "funnel.py"
    settings = {"type": "funnel", "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2}
    file = {
        "data": {"train": ["store"], "sequence_length": 32}, "architecture": {**settings, "d_head": 4, "d_inner": 32},
        "objective": {"type": "masked_lm", "layout": "stream"}, "optimizer": {"type": "adamw", "learning_rate": 1e-3},
        "schedule": {"type": "linear", "warmup_steps": 1}, "batch_size": {"-1": 8}, "max_steps": 2,
    }  # fmt: skip
    (house / "work" / "funnel.json").write_text(json.dumps(file))
    plugin = ["--plugin", str(source)]
    run([*plugin, "train", "funnel.json", "--out", "funnel"], [*plugin, "export", "funnel", "--out", "exported"])
    assert type(AutoModelForMaskedLM.from_pretrained(house / "work" / "exported")).__name__ == "FunnelForMaskedLM"
