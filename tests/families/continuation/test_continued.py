"""`terakoya init --from`: what it decides, writes and says, and that its pipeline runs to a plain model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_exports import make_model
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from terakoya import plugins
from terakoya.commands.main import build_app
from terakoya.components import Progress
from terakoya.config.parameters import Parameters
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.json_settings import read_settings
from terakoya.runs import metrics
from terakoya_continuation import plan
from terakoya_pipeline.settings import read_pipeline
from terakoya_planning import choosing
from terakoya_planning.choosing import Machine
from terakoya_planning.devices import find_device
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece

GENERAL = "東京は日本の首都です。今日はよい天気だったので、川の近くを歩きました。"
FIELD = "量子計算機の誤り訂正符号では、表面符号の論理量子ビットを測定します。"
CPU = Machine(find_device("cpu"), 1, "fp32")
pytestmark = pytest.mark.usefixtures("remembered_steps")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with the words of the general text, as plain Transformers saves it."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "general.txt").write_text(f"{GENERAL}\n\n" * 20, encoding="utf-8")
    MecabWordPiece(vocab_size=200).train(Corpus([folder / "general.txt"]), folder / "bert")
    model = make_model("bert", "masked", folder / "bert", "mecab_wordpiece")
    model.save_pretrained(folder / "bert")
    return folder / "bert"


@pytest.fixture
def here(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `model` and two corpora."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choosing, "find_machine", lambda gpu, count, measure: CPU)
    shutil.copytree(published, tmp_path / "model")
    for name, text in (("field", FIELD), ("general", GENERAL)):
        lines = [json.dumps({"text": f"{text}{number}" * 2}, ensure_ascii=False) for number in range(150)]
        Path(f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def init(*words: str) -> tuple[str, Mapping[str, Any]]:
    """What `terakoya init --from model` prints, and the parameters of its pipeline."""
    done = CliRunner().invoke(build_app(), ["init", "--from", "model", *words, "--hours", "0.01", "--force"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert done.stderr.endswith("next: terakoya run pipeline.json\n")
    parameters = read_pipeline(Path("pipeline.json")).parameters
    assert isinstance(parameters, dict)
    return done.stdout, parameters


def refusal(*words: str) -> str:
    done = CliRunner().invoke(build_app(), ["init", *words])
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


def test_a_model_gets_the_words_of_the_field_and_keeps_what_it_knew(here: Path, forks: None) -> None:
    said, parameters = init("field.jsonl", "--replay", "general.jsonl", "--replay-share", "0.25")
    pipeline = read_pipeline(Path("pipeline.json"))
    assert {name: each.weight for name, each in pipeline.corpora.items()} == {"field": 75, "replay": 25}
    assert parameters["start_from"] == {"folder": "model", "drop_heads": True, "vocabulary": "extend"}
    assert parameters["architecture"]["hidden_size"] == 16 and parameters["objective"]["whole_word_mask"]
    assert pipeline.tokenizer is None and str(pipeline.tokenizer_folder) == "work/continued/tokenizer"
    words = AutoTokenizer.from_pretrained("work/continued/tokenizer").tokenize(FIELD)
    assert "量子" in words and "more pieces, which save " in said
    assert (
        "General text is 25% of the rows" in said
        and "forgets" not in said
        and "passes over the field (at most 10 are useful) and " in said
    )
    raw = {**parameters, "data": {**parameters["data"], "train": ["a"], "validation": ["b"]}}
    loaded = Parameters.from_dict(raw, source="pipeline.json")
    steps, rate = loaded.max_steps, loaded.optimizer.learning_rate
    factors = [
        loaded.schedule.factor(Progress(step=at, max_steps=steps, tokens=0, max_tokens=None, learning_rate=rate))
        for at in (0, steps // 10, steps)
    ]
    assert factors[0] < factors[1] and factors[1] > 0.9 and factors[2] <= 0.1, "it rises again and decays"
    # the pipeline, of two steps
    short = {"max_steps": 2, "batch_size": {"-1": 4}, "micro_batch_size": 4, "evaluation": {"steps": 2, "batches": 1}}
    small = read_settings(Path("pipeline.json")) | {"parameters": parameters | short, "processes": 1}
    Path("small.json").write_text(json.dumps(small), encoding="utf-8")
    ran = CliRunner().invoke(build_app(), ["run", "small.json"])
    assert ran.exit_code == 0, ran.output + repr(ran.exception)
    measured = {(each["step"], Path(each["store"]).name) for each in metrics.read(Path("work/continued/run")).records
                if each["kind"] == "validation"}  # fmt: skip
    assert measured == {(step, name) for step in (0, 2) for name in ("field", "replay")}
    model = AutoModelForMaskedLM.from_pretrained("work/continued/model")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained("work/continued/model")) > 64


def test_a_vocabulary_that_fits_stays(here: Path) -> None:
    said, parameters = init("general.jsonl")
    assert "There is no general text, so the model forgets: " in said
    assert parameters["start_from"] == {"folder": "model", "drop_heads": True}
    assert "The vocabulary stays as it is, with " in said and not Path("work/continued").exists()
    assert read_pipeline(Path("pipeline.json")).tokenizer_folder == Path("model")


def test_without_the_family_growth_the_vocabulary_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(plugins.registry().initial_weights, "vocabulary")  # type: ignore[arg-type]
    said, parameters = init("field.jsonl")
    assert "vocabulary" not in parameters["start_from"]
    assert "unknown: the family growth, which gives a model more pieces, is not there." in said


def test_the_shares_of_tokens_that_decide() -> None:
    """An unknown token is worse than one that is known."""
    from terakoya_continuation.fit import Fit

    def fit(tokens: int, unknown: int) -> Fit:
        return Fit(tokens, 1000, unknown, True, False, None)  # type: ignore[arg-type]

    assert fit(500, 0).rate == 0.5 and fit(500, 0).saved_by(fit(450, 0)) == pytest.approx(0.1)
    assert fit(400, 100).saved_by(fit(400, 0)) == pytest.approx(0.2)


def test_bad_input_is_refused(here: Path) -> None:
    Path("short.txt").write_text(f"{FIELD}\n\n{GENERAL}", encoding="utf-8")
    least = choosing.least_rows(96) * 96
    assert f"expected at least 2 documents and {least:,} tokens, which a step takes, got about 2 and" in refusal(
        "--from", "model", "short.txt"
    )
    assert "--replay: is for a model that is trained further" in refusal("field.jsonl", "--replay", "general.jsonl")
    assert "--family: the model of --from decides it" in refusal(
        "--from", "model", "field.jsonl", "--family", "encoder"
    )
    assert "CORPUS: expected files of text" in refusal("--from", "model")
    assert "expected a share between 0 and 1" in refusal(
        "--from", "model", "field.jsonl", "--replay", "general.jsonl", "--replay-share", "20"
    )
    assert "--replay-share 0.5: needs --replay CORPUS" in refusal("--from", "model", "f.jsonl", "--replay-share", "0.5")
    Path("pipeline.json").write_text("{}")
    assert "pipeline.json: exists already" in refusal("--from", "model", "field.jsonl")


def test_few_documents_are_held_out_from_the_end() -> None:
    from terakoya_planning.corpus_facts import CorpusFacts

    facts = CorpusFacts(1, ("txt",), 100, "text", "line", 5000, 40, "ja", 0.9)
    few = plan.Source(["a.txt"], facts, 3000).entry()
    assert few["hold_out"] == 8 and "clean" not in few and few["documents"] == "line" and "field" not in few
