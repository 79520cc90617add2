"""An upload tries the model, writes a card, pushes every file, and loads the same model back; it writes no token."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import fugashi
import hub_stand_in
import pytest
import torch
import toy
import unidic_lite
from command_line import call, refusal
from huggingface_hub import HfApi, ModelCard, constants, hf_hub_download
from safetensors.torch import load_file
from small_store import rewrite_store_json
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForTokenClassification,
    BertTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
)
from transformers.utils import hub as transformers_hub

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.runs.metrics import Metrics
from terakoya.toolkit.formats import folder_digests
from terakoya.toolkit.formats.model_files import SCORES
from terakoya.training.setup import train_in_this_process
from terakoya_hub import card_training
from terakoya_hub import upload as upload_module
from terakoya_hub.model_card import Card
from terakoya_hub.options import UploadResult
from terakoya_hub.trial import outputs_of
from terakoya_hub.upload import upload

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
BIAS = "cls.predictions.bias"
SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]", *"これは日本の文章です。犬猫山川海空花鳥風月"]


def save_tokenizer(folder: Path, size: int) -> None:
    """Saves a tokenizer of single characters with `size` pieces."""
    words = list(dict.fromkeys(WORDS))
    words += [f"[unused{number}]" for number in range(size - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with validation, whose tokenizer Transformers loads."""
    root = tmp_path_factory.mktemp("upload")
    stores = [toy.make_store(root / name, documents=60, seed=seed) for seed, name in enumerate(("corpus", "held_out"))]
    size = json.loads((stores[0] / "store.json").read_text())["vocabulary"]["size"]
    save_tokenizer(stores[0] / "tokenizer", size)
    facts = json.loads((stores[0] / "store.json").read_text())
    steps = [{"type": "nfkc"}, {"type": "length", "min_characters": 3}]
    clean = {"clean": json.dumps({"steps": steps}), "clean: documents": 67, "clean: dropped by length": 7}
    rewrite_store_json(stores[0], options={**facts["options"], **clean})
    settings = toy.parameters(
        *stores, max_steps=4, logging_steps=1, checkpoint={"save_steps": 2}, evaluation={"steps": 2, "batches": 2}
    )
    train_in_this_process(Parameters.from_dict(settings, source="test"), root / "run")
    return root / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_stand_in.Hub]:
    """A server that huggingface_hub uses in place of the Hub."""
    with hub_stand_in.hub() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.address)
        monkeypatch.setattr(
            transformers_hub, "_hf_api", None, raising=False
        )  # it keeps the address of the first one that it asked
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        template = state.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield state


@pytest.mark.usefixtures("forks")
def test_a_run_is_tried_pushed_and_loaded_back(
    run: Path, hub: hub_stand_in.Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, "upload", run, "--name", "school/tiny", "--prompt", "これは[MASK]です。")
    assert code == 0, err
    assert "[MASK] 1" in out, "the model's output for the prompt"
    assert f"{hub.address}/school/tiny" in out and "the same numbers" in out
    assert is_private(hub, "school/tiny"), "unless it says otherwise"
    files = hub.files["school/tiny"]
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "README.md"} <= files.keys()
    exported = run / "checkpoints/step-00000004/model/model.safetensors"
    assert files["model.safetensors"] == exported.read_bytes()
    everything = b"".join(files.values()) + (out + err).encode()
    assert SECRET.encode() not in everything
    assert any(SECRET in (header or "") for header in hub.authorizations), "only headers contain the token"


def test_the_card_describes_the_run(run: Path, tmp_path: Path) -> None:
    upload(
        run, "school/tiny", license="apache-2.0", datasets=["wikimedia/wikipedia", "our own essays"],
        dataset_license="cc-by-sa-4.0", languages=["ja"], dry_run=tmp_path / "pushed",
    )  # fmt: skip
    text = (tmp_path / "pushed/README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.language == ["ja"]
    assert card.data.datasets == ["wikimedia/wikipedia"], "what the Hub knows"
    cleaned = "- store store: cleaned with nfkc, length (min_characters 3): 67 documents, 7 dropped by length (10.45%)"
    assert (
        f"## Text\n\n- wikimedia/wikipedia\n- our own essays\n{cleaned}\n\nLicence of the text: cc-by-sa-4.0\n" in text
    )
    assert "| hardware | 1 x cpu |" in text
    assert card.data.pipeline_tag == "fill-mask" and card.data.library_name == "transformers"
    manifest = json.loads((run / "checkpoints/step-00000004/manifest.json").read_text())
    for fingerprint in manifest["stores"].values():
        assert fingerprint in text
    assert f"| tokens | {manifest['consumed_tokens']:,} |" in text
    assert 'BertForMaskedLM.from_pretrained("school/tiny")' in text
    assert '"hidden_size"' in text and str(run.parent) not in text, "no folders of this machine"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {entry["step"]: entry["loss"] for entry in metrics if entry["kind"] == "step"}
    checks = {entry["step"]: entry["loss"] for entry in metrics if entry["kind"] == "validation"}
    chart = ElementTree.parse(tmp_path / "pushed/training.svg").getroot()
    curves = list(chart.iter("{http://www.w3.org/2000/svg}polyline"))
    numbers = [len(curve.attrib["points"].split()) for curve in curves]
    assert numbers == [4, 3, 2, 2], "four steps, three validations, and their keys in the legend"
    texts = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[-2:] == ["training", "validation on store"]
    validated = [entry for entry in metrics if entry["kind"] == "validation"][-1]
    results = {each.metric_type: each for each in card.data.eval_results or ()}
    assert results["accuracy"].metric_value == pytest.approx(validated["masked_accuracy"], abs=1e-6)
    assert results["loss"].metric_value == pytest.approx(validated["mlm_loss"], abs=1e-6)
    assert results["perplexity"].metric_value == pytest.approx(math.exp(validated["mlm_loss"]), abs=1e-5)
    assert results["loss"].dataset_name == "store" and results["loss"].metric_args == {"step": 4}
    assert "](training.svg)" in text
    assert f"| {steps[2]:.4f} | {checks[2]:.4f} |" in text, "a loss with the last validation before it"
    assert f"| {steps[3]:.4f} |  |" in text, "which stands in one row"


def test_the_card_says_what_the_model_is_for_and_how_to_cite_it(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"authors": ["Hanako Yamada", "R&D of School"]}
    upload(run, "school/tiny", dry_run=tmp_path / "one", **options)
    text = (tmp_path / "one/README.md").read_text(encoding="utf-8")
    manifest = json.loads((run / "checkpoints/step-00000004/manifest.json").read_text())
    use = text.partition("## Use and limits\n")[2].partition("##")[0]
    share = manifest["consumed_tokens"] / manifest["parameter_count"]
    assert "- It fills in [MASK], and" in use and f"trained on {manifest['consumed_tokens']:,} tokens in all" in use
    assert f": {share:,.2g} for each of its parameters" in use and "is not finished" not in use
    assert "The authors do not say where the text comes from." in text
    digest = hashlib.sha256((tmp_path / "one/model.safetensors").read_bytes()).hexdigest()
    assert f"| model.safetensors | `{digest}` |" in text
    shown = text.partition("```json\n")[2].partition("\n```")[0]
    assert f"SHA-256 of this JSON: `{hashlib.sha256(shown.encode()).hexdigest()}`" in text
    assert "energy" not in text or "| energy | not measured |" in text, "of a processor nothing is known"
    cited = text.partition("```bibtex\n")[2].partition("\n```")[0]
    assert r"author = {Hanako Yamada and R\&D of School}" in cited and "@software{terakoya," in cited
    assert cited.count("{") == cited.count("}") and f"year = {{{time.gmtime().tm_year}}}" in cited

    entry = tmp_path / "own.bib"
    entry.write_text("@inproceedings{we, title = {Ours}}\n", encoding="utf-8")
    upload(run / "checkpoints/step-00000002", "school/tiny", citation=entry, dry_run=tmp_path / "two", **options)
    text = (tmp_path / "two/README.md").read_text(encoding="utf-8")
    assert "@inproceedings{we, title = {Ours}}\n\n@software{terakoya," in text and "Yamada" not in text
    assert "Its training is not finished: this is step 2 of 4." in text
    entry.write_text("We, 2026", encoding="utf-8")
    with pytest.raises(UserError, match=r"--citation .*own\.bib: expected a file with an entry of BibTeX"):
        upload(run, "school/tiny", citation=entry, dry_run=tmp_path / "three")


def test_energy_is_the_measured_power_over_the_hours_of_all_gpus() -> None:
    """2,000 tokens at 1 token/s with 300 W, then 1,600 tokens with 600 W: 1,500 kJ of each of four GPUs."""
    manifest = {
        "parameters": {
            "architecture": {"type": "bert"}, "objective": {"type": "masked_lm"}, "precision": "bf16",
            "data": {"sequence_length": 8, "train": []},
        },
        "world": {"processes": 4, "device": "cuda", "engine": "ddp"}, "versions": {"terakoya": "1"}, "stores": {},
        "parameter_count": 5, "vocabulary": {"size": 9}, "step": 2, "max_steps": 2, "consumed_rows": 1,
        "consumed_tokens": 3600, "started_from": {
            "model": {"folder": "/home/a/hub/models--school--base/snapshots/12ab"}, "other": {"folder": "/home/b/mine"}
        },
    }  # fmt: skip
    start: dict[str, Any] = {"kind": "start", "step": 0, "devices": {"NVIDIA H100": 4}}
    steps = [
        {"kind": "step", "step": 1, "tokens": 2000, "tokens_per_second": 1.0, "loss": 1.0, "gpu_power": 300.0},
        {"kind": "step", "step": 2, "tokens": 3600, "tokens_per_second": 1.0, "loss": 1.0, "gpu_power": 600.0},
    ]
    text = card_training.describe(manifest, Metrics((start, *steps)))
    joules = 4 * (2000 * 300 + 1600 * 600)
    assert f"| energy | {joules / 3.6e6:.3g} kWh: 433 W on average, read from one GPU, times 4 GPUs and 1.00" in text
    assert "| started from | school/base |\n| started from | mine |" in text and "/home" not in text
    fewer = {**start, "devices": {"NVIDIA H100": 2}, "step": 1}
    text = card_training.describe(manifest, Metrics((start, steps[0], fewer, steps[1])))
    assert "| energy | not measured |" in text, "nobody knows which hours had how many"


def test_the_card_of_an_older_checkpoint_has_no_later_steps(run: Path, tmp_path: Path) -> None:
    upload(run / "checkpoints/step-00000002", "school/tiny", dry_run=tmp_path / "pushed")
    text = (tmp_path / "pushed/README.md").read_text(encoding="utf-8")
    assert "| steps | 2 of 4 |" in text
    losses = text.partition("## Losses")[2].partition("##")[0]
    cells = [[each.strip() for each in line.split("|")[1:-1]] for line in losses.splitlines() if line.startswith("| ")]
    assert [row[0] for row in cells] == ["step", "0", "1", "2"]
    assert cells[1][1:3] == ["0", ""] and cells[1][3] and not cells[2][3], "validation before the first step"


def test_the_card_is_that_of_the_checkpoint_that_the_folder_was_exported_from(run: Path, tmp_path: Path) -> None:
    older = Path("checkpoints/step-00000002")
    export(run / older, tmp_path / "model")
    upload(tmp_path / "model", "school/tiny", run=run, dry_run=tmp_path / "one")
    assert "| steps | 2 of 4 |" in (tmp_path / "one/README.md").read_text(encoding="utf-8")
    shutil.copytree(run, tmp_path / "moved")
    upload(tmp_path / "model", "school/tiny", run=tmp_path / "moved", dry_run=tmp_path / "two")
    assert "| steps | 2 of 4 |" in (tmp_path / "two/README.md").read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "moved" / older)
    with pytest.raises(
        UserError, match=r"exported from, run/checkpoints/step-00000002, got .*step-00000004 with other"
    ):
        upload(tmp_path / "model", "school/tiny", run=tmp_path / "moved", dry_run=tmp_path / "three")


def test_a_run_that_trains_gives_weights_and_card_of_one_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "run"
    shutil.copytree(run, live)
    (live / "checkpoints/step-00000004").rename(tmp_path / "later")

    def save_another(source: Path, out: Path, **options: Any) -> None:
        export(source, out, **options)
        (tmp_path / "later").rename(live / "checkpoints/step-00000004")

    monkeypatch.setattr(upload_module, "export", save_another)
    upload(live, "school/tiny", dry_run=tmp_path / "pushed")
    assert "| steps | 2 of 4 |" in (tmp_path / "pushed/README.md").read_text(encoding="utf-8")


def test_a_step_of_a_run_is_uploaded_and_tried(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, checkpoint = Path(f"{run}@2"), run / "checkpoints/step-00000002"
    weights = load_file(checkpoint / "model/model.safetensors")
    upload(step, "school/tiny", dry_run=tmp_path / "pushed")
    assert "| steps | 2 of 4 |" in (tmp_path / "pushed/README.md").read_text(encoding="utf-8")
    assert torch.equal(load_file(tmp_path / "pushed/model.safetensors")[BIAS], weights[BIAS])
    code, out, err = call(capsys, "try", step, "これは[MASK]です。")
    assert code == 0 and "[MASK] 1" in out and f"next: terakoya export {step} --out" in err
    assert not torch.equal(load_file(run / "checkpoints/step-00000004/model/model.safetensors")[BIAS], weights[BIAS])
    with pytest.raises(UserError, match=r"no checkpoint of step 3; its checkpoints are of 2, 4"):
        upload(Path(f"{run}@3"), "school/tiny", dry_run=tmp_path / "none")


def test_the_run_of_its_best_checkpoint_is_found(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "metrics.jsonl", tmp_path)
    shutil.copytree(run / "checkpoints/step-00000004", tmp_path / "model-best")
    assert card_training.TrainingFacts.read(tmp_path / "model-best").loss_chart() is not None


def test_scores_beside_a_model_are_on_the_card_once(tmp_path: Path) -> None:
    """They are also in a file that `evaluate --out` wrote, and of an ELECTRA they are beside its discriminator."""
    folder = tmp_path / "model"
    for name in ("discriminator", "generator"):
        export_bert(folder / name)
    likeness = {"title": "Toy", "settings": {}, "scores": {"eval": {"pearson": {"mean": 0.5, "interval": None}}}}
    text = json.dumps({"results": [], "tasks": {}, "finetuned": {"toy": likeness}})
    for file in (tmp_path / "scores.json", folder / "discriminator" / SCORES):
        file.write_text(text)
    upload(folder, "school/two", evaluations=[tmp_path / "scores.json"], dry_run=tmp_path / "pushed")
    assert (tmp_path / "pushed/README.md").read_text().count("| Toy | without training | pearson | 0.5000 |") == 1
    assert (tmp_path / "pushed/discriminator" / SCORES).read_text() == text


def test_a_discriminator_of_any_architecture_is_no_model_for_one_task(tmp_path: Path) -> None:
    """Transformers has a class of its own for ELECTRA's alone; that of the others classifies tokens."""
    folder = tmp_path / "model"
    export_bert(folder)
    config = BertConfig.from_pretrained(folder, num_labels=2, label2id={"original": 0, "replaced": 1})
    BertForTokenClassification(config).save_pretrained(folder)
    upload(folder, "school/detector", dry_run=tmp_path / "pushed")
    card = ModelCard.load(tmp_path / "pushed/README.md")
    assert "It tells which tokens of a text were replaced, and is meant to be fine-tuned" in card.text
    assert "for one task" not in card.text and card.data.pipeline_tag is None
    assert "BertForTokenClassification.from_pretrained" in card.text


def test_an_existing_card_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = export_bert(tmp_path / "model")
    (folder / "README.md").write_text("# Mine\n", encoding="utf-8")
    upload(folder, "school/tiny", dry_run=tmp_path / "pushed")
    assert (tmp_path / "pushed/README.md").read_text(encoding="utf-8") == "# Mine\n" and not caplog.messages
    upload(folder, "school/tiny", license="mit", datasets=["a/b"], dry_run=tmp_path / "again")
    assert [f"{folder}: its README.md is kept" in each for each in caplog.messages] == [True]
    assert "have no effect: --license, --dataset; move it away" in caplog.text


def is_private(hub: hub_stand_in.Hub, name: str) -> bool:
    asked = hub.created[name]
    return asked.get("visibility") == "private" or bool(asked.get("private"))


def test_the_files_are_listed_before_they_are_pushed_and_strangers_stay_here(
    tmp_path: Path, hub: hub_stand_in.Hub
) -> None:
    folder = export_bert(tmp_path / "model")
    (folder / ".env").write_text(f"HF_TOKEN={SECRET}\n")
    (folder / "corpus.jsonl").symlink_to("/etc/passwd")
    (folder / "LICENSE").write_text("Do what you like.\n")
    said: list[tuple[str, int]] = []
    upload(
        folder, "school/tiny", public=True, also=[folder / "LICENSE"],
        report=lambda text: said.append((text, len(hub.files.get("school/tiny", {})))),
    )  # fmt: skip
    assert not is_private(hub, "school/tiny")
    pushed = hub.files["school/tiny"]
    own = {path.name for path in folder.iterdir()} - {".env", "corpus.jsonl"}
    assert pushed.keys() == {*own, "README.md"} and {"model.safetensors", "LICENSE"} <= own
    lines = [f"{len(content):>15,} bytes  {name}" for name, content in sorted(pushed.items())]
    lines.append(f"{sum(map(len, pushed.values())):>15,} bytes in all, {len(lines)} files")
    lines.append("not pushed, as it is no part of the model: .env, corpus.jsonl; --also FILE pushes a file, too")
    assert [text for text, _ in said[: len(lines)]] == lines and not any(count for _, count in said[: len(lines)])
    assert SECRET.encode() not in b"".join(pushed.values())


@pytest.mark.parametrize("what", ["run", "folder"])
def test_no_weights_go_through_the_temporary_folder(
    what: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = run if what == "run" else export_bert(tmp_path / "model")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: list[int] = []

    def outputs(source: Path, text: str, **options: Any) -> bytes:
        files = [path for path in temporary.rglob("*") if path.is_file() and not path.is_symlink()]
        seen.extend(path.stat().st_size for path in files if path.suffix == ".safetensors")
        assert (source / "model.safetensors").is_file()
        return outputs_of(source, text, **options)

    monkeypatch.setattr(upload_module, "outputs_of", outputs)
    before = {*source.parent.iterdir()}
    upload(source, "school/tiny", dry_run=tmp_path / "pushed/here")
    assert not seen
    assert not (tmp_path / "pushed/here/model.safetensors").is_symlink()
    assert {*source.parent.iterdir()} - before <= {tmp_path / "pushed"}, "nor is anything left where they went"
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == ["here"]


def test_a_new_card_leaves_the_folder_as_it_was(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    (tmp_path / "model/training.svg").write_text("of another card")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    upload(tmp_path / "model", "school/tiny", run=run, dry_run=tmp_path / "pushed")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert "<svg" in (tmp_path / "pushed/training.svg").read_text(encoding="utf-8")


def test_loading_back_another_model_is_an_error(tmp_path: Path, hub: hub_stand_in.Hub) -> None:
    folder = export_bert(tmp_path / "model")
    upload(folder, "school/tiny")
    sent = hub.files["school/tiny"]["model.safetensors"]

    class Swapped(dict[str, bytes]):
        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, other if key == "model.safetensors" else value)

    other = (export_bert(tmp_path / "other", seed=2) / "model.safetensors").read_bytes()
    assert other != sent
    hub.files["school/tiny"] = Swapped()
    with pytest.raises(UserError, match="the model loaded back differs"):
        upload(folder, "school/tiny")


def test_nothing_is_pushed_without_a_token_or_a_working_model(
    tmp_path: Path, hub: hub_stand_in.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_bert(tmp_path / "model")
    with pytest.raises(UserError, match="--name school/a/b"):
        upload(folder, "school/a/b")
    with pytest.raises(UserError, match="expected a run, a checkpoint or an exported folder, got no such folder"):
        upload(tmp_path / "nowhere", "school/tiny")

    def fails(folder: Path, prompt: str) -> str:
        raise UserError("no mask")

    with pytest.raises(UserError, match="no mask"):
        upload(folder, "school/tiny", prompt="text", try_model=fails)
    hub.refuse = 403
    with pytest.raises(UserError, match="the Hub refused"):
        upload(folder, "school/tiny")
    hub.refuse = None
    with monkeypatch.context() as patch, pytest.raises(PermissionError):  # the Hub has no part in it
        patch.setattr(HfApi, "upload_folder", MagicMock(side_effect=PermissionError(13, "denied", "model.safetensors")))
        upload(folder, "school/tiny")
    hub.files.clear()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="HF_TOKEN"):
        upload(folder, "school/tiny")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer_config\.json"):
        upload(folder, "school/tiny")
    assert not hub.files


def test_a_folder_that_changed_since_its_export_is_refused(tmp_path: Path) -> None:
    folder = export_bert(tmp_path / "model")
    folder_digests.write(folder)
    upload(folder, "school/tiny", dry_run=tmp_path / "pushed")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"hidden_size": 8', '"hidden_size": 4'))
    with pytest.raises(UserError, match=rf"{folder}: changed since it was exported: config.json: "):
        upload(folder, "school/tiny", dry_run=tmp_path / "again")
    (folder / folder_digests.NAME).unlink()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n")
    with pytest.raises(UserError, match=r"model.safetensors: is a pointer of Git LFS in place of the file"):
        upload(folder, "school/tiny", dry_run=tmp_path / "again")


def test_an_upload_that_was_tried_is_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("", encoding="utf-8")
    monkeypatch.setattr(upload_module, "upload_model", lambda options: UploadResult("", None, tmp_path, {}))
    words = ["upload", "model", "--name", "a/b", "--public", "--trust-remote-code", "--also", "LICENSE"]
    code, _, err = call(capsys, *words, "--dry-run", "files")
    assert code == 0 and err == f"next: terakoya {' '.join(words)}\n"


def test_custom_code_runs_only_if_allowed(tmp_path: Path) -> None:
    folder = export_bert(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForMaskedLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise RuntimeError('ran')\n")
    with pytest.raises(UserError, match="--trust-remote-code"):
        upload(folder, "school/tiny", dry_run=tmp_path / "pushed")


USER = "-u user.dic"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mecab_kwargs": {"mecab_dic": "unidic_lite", "mecab_option": "-u {home}/user.dic"}}, "{home}/user.dic"),
        ({"mecab_kwargs": {"mecab_dic": "unidic_lite", "mecab_option": "-u other.dic"}}, "other.dic"),
        ({"mecab_kwargs": {"mecab_dic": None, "mecab_option": f"-d '{unidic_lite.DICDIR}' -r /dev/null {USER}"}},
         unidic_lite.DICDIR),
        ({"word_tokenizer_type": "sudachi", "sudachi_kwargs": {"sudachi_config_path": "/etc/sudachi.json"}},
         "/etc/sudachi.json"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_reads_files_of_this_machine_is_refused(
    arguments: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = japanese_bert(tmp_path / "model")
    for home in (folder, tmp_path):
        (home / "other.dic").write_bytes((folder / "user.dic").read_bytes())
    (folder / "other.dic").unlink()
    file = folder / "tokenizer_config.json"
    text = json.dumps({**json.loads(file.read_text()), **arguments}).replace("{home}", str(folder))
    file.write_text(text)
    named = re.escape(named.replace("{home}", str(folder)))
    with pytest.raises(UserError, match=f"names {named}, which is not in the folder: nobody else could load"):
        upload(folder, "school/tiny", dry_run=tmp_path / "pushed")


def test_a_user_dictionary_of_mecab_is_pushed_and_loaded_back(
    tmp_path: Path, hub: hub_stand_in.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = japanese_bert(tmp_path / "model")
    said: list[str] = []
    upload(folder, "school/tiny", report=said.append)
    (recipe,) = (each.partition(" with: ")[2] for each in said if "user dictionary" in each)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    load, _, code = recipe.partition("; ")
    tokenizer = eval(code, {"hf_hub_download": hf_hub_download, "AutoTokenizer": AutoTokenizer})
    assert load == "from huggingface_hub import hf_hub_download"
    assert "山川海" in tokenizer.word_tokenizer.tokenize("山川海が")
    files = hub.files["school/tiny"]
    assert files["user.dic"] == (folder / "user.dic").read_bytes()
    assert b"`user.dic` of this repository in the working directory" in files["README.md"]
    assert not any(str(tmp_path).encode() in content for content in files.values())


class Refuses:
    """In place of the process that loads what was written."""

    def check(self, models: dict[Path, str], *, trusted: object) -> None:
        assert not trusted
        loads = {folder: kind for folder, kind in models.items() if (folder / "config.json").is_file()}
        raise UserError(f"refused {loads}")


def test_what_loads_nowhere_else_is_not_pushed(tmp_path: Path, hub: hub_stand_in.Hub) -> None:
    folder = export_bert(tmp_path / "model")
    with pytest.raises(UserError, match=r"refused \{.*/model'\): 'BertForMaskedLM'\}"):
        upload(folder, "school/tiny", process=Refuses())  # type: ignore[arg-type]
    assert "school/tiny" not in hub.files
    with pytest.raises(UserError, match=r"refused \{.*/dry'\): 'BertForMaskedLM'\}"):
        upload(folder, "school/tiny", dry_run=tmp_path / "dry", process=Refuses())  # type: ignore[arg-type]
    assert (tmp_path / "dry/README.md").is_file()


def test_upload_on_the_command_line_loads_elsewhere_what_it_would_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("terakoya.conversion.elsewhere.PROGRAM", "raise SystemExit('nothing loads here')")
    folder = export_bert(tmp_path / "model")
    said = refusal(capsys, "upload", folder, "--name", "school/tiny", "--dry-run", tmp_path / "dry")
    assert "python: exit code 1: nothing loads here" in said
    assert (tmp_path / "dry/README.md").is_file()


def japanese_bert(folder: Path) -> Path:
    """The model of `export_bert` with a tokenizer of MeCab and a user dictionary."""
    export_bert(folder)
    (folder / "u.csv").write_text("山川海,,,-20000,名詞,固有名詞,一般" + ",*" * 14, encoding="utf-8")
    fugashi.build_dictionary(f"x -d '{unidic_lite.DICDIR}' -u {folder}/user.dic -f utf8 -t utf8 {folder}/u.csv")
    (folder / "u.csv").unlink()
    for file in folder.glob("*token*"):
        file.unlink()
    config = {
        "tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab",
        "mecab_kwargs": {"mecab_dic": "unidic_lite", "mecab_option": USER},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def export_bert(folder: Path, *, seed: int = 1) -> Path:
    """Writes an exported folder of a small BERT."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    save_tokenizer(folder, 40)
    return folder


def test_a_card_tells_later_stages_from_validation_and_says_how_long_inputs_may_be() -> None:
    stores = [Path("general"), Path("math"), Path("held")]
    data = {
        "train": [{"store": "general", "weight": 1}],
        "validation": ["held"],
        "stages": [{"from_step": 3, "train": [{"store": "math", "weight": 1}]}],
        "sequence_length": 32,
    }
    parameters = Parameters.from_dict(toy.parameters(stores[0], data=data), source="test").dump()
    manifest = {
        "parameters": parameters, "world": {"processes": 1, "device": "cpu", "engine": "ddp"}, "versions": {},
        "parameter_count": 9, "vocabulary": {"size": 64}, "step": 4, "max_steps": 4, "consumed_rows": 64,
        "consumed_tokens": 100, "stores": {str(store): "f" for store in stores},
    }  # fmt: skip
    numbers = ((0, 0), (32, 0), (48, 16))
    read = [[{"store": "general", "rows": rows}, {"store": "math", "rows": later}] for rows, later in numbers]
    cards = [card_training.describe({**manifest, "positions": positions}, Metrics(())) for positions in read]
    for card in cards[:2]:
        assert "| general | 100.00% | `f` |" in card
        assert "| math | in a later stage | `f` |" in card
    card = cards[2]
    assert "| general | 75.00% | `f` |" in card
    assert "| math | 25.00% | `f` |" in card
    assert "| held | validation | `f` |" in card
    assert "| longest input | 32 tokens |" in card


def test_a_card_tells_the_phases_that_have_begun() -> None:
    phase = {"number": 1, "name": "short rows", "first_step": 0, "steps": 5, "global_rows": 16, "sequence_length": 32}
    later = {"number": 2, "name": "", "first_step": 5, "steps": 4, "global_rows": 6, "sequence_length": 64}
    manifest = {"phases": [phase, later, {**later, "first_step": 9}], "step": 6, "consumed_rows": 86}
    assert card_training.describe_rows(manifest) == [
        "| rows | 86 |",
        "| phase 1, short rows | 5 steps, 16 rows of 32 tokens a step |",
        "| phase 2 | 1 step, 6 rows of 64 tokens a step |",
    ]


def test_a_card_tells_the_devices_and_the_hours() -> None:
    def starts(name: str) -> dict[str, object]:
        return {"kind": "start", "devices": {name: 8}}

    def step(number: int) -> dict[str, object]:
        return {"kind": "step", "step": number, "tokens": 3_600_000 * number, "tokens_per_second": 500.0, "loss": 2.0}

    resume = {"kind": "resume", "step": 1}
    written = Metrics((starts("H100"), step(1), starts("H200"), resume, step(2), starts("H200")))
    assert card_training._hardware(written) == [
        "| hardware | 8 x H100; then 8 x H200 |", "| hours of training | 4.00 |", "| energy | not measured |"
    ]  # fmt: skip
    assert card_training._hardware(Metrics(())) == []


def test_the_cleaning_of_a_store_that_was_made_again_is_not_told(run: Path, tmp_path: Path) -> None:
    facts = card_training.TrainingFacts.read(run / "checkpoints/step-00000004")
    assert len(facts.cleaning) == 1
    others = dict.fromkeys(facts.manifest["stores"], "f" * 64)
    assert card_training._read_cleaning({**facts.manifest, "stores": others}) == {}
    settings = json.dumps({"steps": [{"type": "nfkc"}]})
    merged = {"clean": settings, "clean: documents": "1, 2"}
    assert card_training._describe_cleaning(merged) == "cleaned with nfkc"
    assert card_training._describe_cleaning({**merged, "clean": f"{settings}, {settings}"}) is None
    assert card_training._describe_cleaning({}) is None


def test_the_longest_input_of_a_roberta_is_tried(tmp_path: Path) -> None:
    config = RobertaConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=12 + 6, pad_token_id=5,
    )  # fmt: skip
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 64)
    assert len(outputs_of(tmp_path, "これは日本の文章です。" * 9, trust=False)) == 12 * 64 * 4


def test_a_model_that_chooses_among_answers_is_tried(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    )  # fmt: skip
    BertForMultipleChoice(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 40)
    assert len(outputs_of(tmp_path, "これは日本の文章です。", trust=False)) == 4


@pytest.mark.parametrize(("settings", "said"), [
    ({"tokenizer_class": "BertJapaneseTokenizer", "mecab_kwargs": {"mecab_dic": "ipadic"}},
     "a BertJapaneseTokenizer over the words of mecab. It needs `pip install fugashi ipadic`. The package "
     "`terakoya_tokenizer` reads it as a fast tokenizer, with offsets and the same ids: `pip install"),
    ({"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}, "a BertJapaneseTokenizer."),
    ({"tokenizer_class": "BertGenerationTokenizer"}, "It needs `pip install sentencepiece`."),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, "a PreTrainedTokenizerFast."),
])  # fmt: skip
def test_a_card_says_what_its_tokenizer_needs(settings: dict[str, object], said: str) -> None:
    assert said in Card("a/b", {"": "BertForMaskedLM"}, tokenizer=settings).text()
