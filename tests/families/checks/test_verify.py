"""`terakoya verify` finds every damage that can be found in a run, a checkpoint, a store or a model, and names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import toy
from checkpoint_folders import write_manifest
from command_line import call
from safetensors.torch import load_file, save_file

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.toolkit.formats import folder_digests
from terakoya.training.setup import train_in_this_process


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two checkpoints, `run`, and its export, `model`."""
    root = tmp_path_factory.mktemp("verify")
    settings = toy.parameters(store, max_steps=2, checkpoint={"save_steps": 1})
    train_in_this_process(Parameters.from_dict(settings, source="test"), root / "run")
    export(root / "run", root / "model")
    return root


@pytest.fixture
def work(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained` to damage."""
    return Path(shutil.copytree(trained, tmp_path / "work"))


def verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    """The exit code, the lines on standard output, and what is on standard error."""
    code, out, err = call(capsys, "verify", folder)
    return code, out.splitlines(), err


def flip(file: Path, *, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_what_is_sound_is_described(trained: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = verify(trained / "run", capsys)
    assert (code, len(lines)) == (0, 3) and err.startswith("next: terakoya try ")
    assert "step-00000001: whole; " in lines[0] and "tensors, all finite" in lines[0]
    assert "metrics.jsonl has 6 records" in lines[2]
    code, lines, _ = verify(trained / "run/checkpoints/step-00000002", capsys)
    assert code == 0 and len(lines) == 1
    code, lines, _ = verify(trained / "model", capsys)
    number = len(load_file(trained / "model/model.safetensors"))
    assert code == 0 and f"a model; {number} tensors, all finite; no tokenizer" in lines[0], lines
    code, lines, _ = verify(store, capsys)
    assert code == 0 and "a sound store; " in lines[0]
    code, _, err = verify(trained, capsys)
    assert code == 2 and "expected a run, a checkpoint, a token store or a model folder, got a folder of" in err
    code, _, err = verify(store / "tokenizer", capsys)
    assert code == 2 and "or a model folder, got a" in err


def test_every_damage_of_a_run_is_one_line(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sorted((work / "run/checkpoints").iterdir())
    flip(first / "model/model.safetensors")
    (first / "tokenizer/size.txt").unlink()
    flip(second / "manifest.json", at=(second / "manifest.json").read_bytes().index(b'"step": ') + 8)
    lines = (work / "run/metrics.jsonl").read_text().splitlines()
    (work / "run/metrics.jsonl").write_text("\n".join(["{" + lines[0], *lines[1:]]) + "\n")
    code, lines, err = verify(work / "run", capsys)
    assert code == 2 and "error: " in err and "4 problems, listed above" in err
    assert [line.split(": ", 1)[1] for line in lines] == [
        "model/model.safetensors: content changed",
        "tokenizer/size.txt: missing",
        f"{second / 'manifest.json'}: content changed: it has another SHA-256 than when it was written",
        "line 1 of metrics.jsonl is damaged",
    ]


def test_checkpoints_that_plugins_keep_are_read_too(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = work / "run"
    kept = [run / "model-best", run / "permanent/step-00000001", run / ".new-model-best"]
    for folder in kept:
        shutil.copytree(run / "checkpoints/step-00000001", folder)
        flip(folder / "model/model.safetensors")
    code, lines, err = verify(run, capsys)
    assert code == 2 and [line for line in lines if "changed" in line] == [
        f"{folder}: model/model.safetensors: content changed" for folder in (kept[1], kept[0])
    ]
    advice = "next: restore {} from a copy, or remove it and take another checkpoint; its run does not need it"
    assert err.splitlines()[-1] == advice.format(kept[1]), "a run sets none of them aside"
    assert verify(kept[0], capsys)[2].splitlines()[-1] == advice.format(kept[0])
    flip(run / "checkpoints/step-00000002/model/model.safetensors")
    for damaged in (run, run / "checkpoints/step-00000002"):
        assert "which sets damaged checkpoints aside" in verify(damaged, capsys)[2]


def test_a_state_is_read_to_the_last_number(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that an earlier version saved may hold numbers that are not finite, under valid hashes."""
    folder = work / "run/checkpoints/step-00000002"
    file = folder / "state/model-00000.safetensors"
    values = load_file(file)
    name = max(values)
    values[name].view(-1)[-1] = float("inf")
    save_file(values, file, {"format": "pt"})
    kept = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, **{key: kept[key] for key in kept if key not in ("sha256", "files", "format")})
    code, lines, _ = verify(folder, capsys)
    assert code == 2 and lines == [f"{folder}: state/: {name} is not finite"]


def test_a_checkpoint_that_its_run_removes_meanwhile_is_passed_over(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(work / "run", tmp_path / "run")

    def remove(folder: Path) -> tuple[int, list[str]]:
        shutil.rmtree(folder)
        raise RuntimeError("unable to open file")  # as safetensors has it

    monkeypatch.setattr("terakoya_checks.verify._check_tensors", remove)
    code, lines, _ = verify(tmp_path / "run", capsys)
    assert code == 0 and [line for line in lines if "step-0" in line] == []


def test_damage_of_a_model_is_found_where_it_can_be(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = work / "model"
    (model / folder_digests.NAME).unlink()  # as a folder that another program wrote
    weights = load_file(model / "model.safetensors")

    def problem() -> str:
        code, lines, _ = verify(model, capsys)
        assert code == 2 and len(lines) == 1
        return lines[0].removeprefix(f"{model}: ")

    name = min(weights)
    broken = {**weights, name: weights[name] * float("nan")}
    save_file(broken, model / "model.safetensors", {"format": "pt"})
    assert problem() == f"model.safetensors: {name} is not finite"
    save_file({key: weights[key] for key in weights if key != name}, model / "model.safetensors", {"format": "pt"})
    assert problem() == f"missing weights: {name}"
    content = (work / "run/checkpoints/step-00000002/model/model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-1])
    whole = f"{len(content):,}"
    assert problem() == (
        f"model.safetensors: expected {whole} bytes by its header, got {len(content) - 1:,}; download it again"
    )
    (model / "model.safetensors").write_bytes(content)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text("")
    assert "config.json: is empty; expected a JSON object" in problem()
    (model / "config.json").write_text(config)
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(300))]
    size = json.loads(config)["vocab_size"]
    (model / "vocab.txt").write_text("\n".join(words[:size]))
    code, lines, _ = verify(model, capsys)
    assert code == 0 and lines[0].endswith(f"a tokenizer of {size} pieces")
    (model / "vocab.txt").write_text("\n".join(words))
    assert problem() == f"its tokenizer has 305 pieces, its embeddings are for {size}"
    (model / "tokenizer_config.json").write_text("{")
    assert problem().startswith("its tokenizer cannot be loaded: ")
    (model / "model.safetensors").unlink()
    assert problem() == "has no weights in *.safetensors"


def test_a_damaged_store_is_found(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    flip(copy / "tokens.words")
    code, lines, err = verify(copy, capsys)
    assert code == 2 and len(lines) == 1 and "tokens.words: content changed" in lines[0] and "1 problem," in err
