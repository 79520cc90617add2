"""Every number of an evaluation equals that of a plain Transformers loop in this file, one sequence at a time."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import exit_code
from safetensors.torch import load_file, save_file
from small_preparation import prepare_corpus
from small_store import rewrite_store_json
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    ElectraConfig,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from terakoya import evaluate, export, train
from terakoya.config.parameters import Parameters
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.runs.checkpoints import read_manifest, trained_length
from terakoya.store.token_store import TokenStore
from terakoya_evaluation.batches import ScoredSequence, negative_log_likelihood
from terakoya_evaluation.data import CorpusTexts
from terakoya_evaluation.objective import RunObjective
from terakoya_evaluation.result import Evaluation
from terakoya_hub.scores import Measurement, read_evaluation

LINES = ["kami ton", "kato kato nemi saru yohi", "hika " * 30, "mi"]


WORDS = ["kami", "ton", "kato", "nemi", "saru", "yohi", "hika", "mi", "kaka", "toto"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_store(base: Path, tokenizer: Path, *, documents: int, seed: int) -> Path:
    """A store of `documents` documents in which each word predicts the next well."""
    draw = random.Random(seed)
    texts = []
    for _ in range(documents):
        index, text = draw.randrange(10), []
        for _ in range(draw.randint(3, 60)):
            text.append(WORDS[index])
            index = (3 * index + 1 + (draw.random() < 0.2)) % 10
        texts.append(" ".join(text))
    base.mkdir()
    kind = registry().component("tokenizers", "huggingface")()
    prepare_corpus(Corpus([corpus(base, texts)]), kind, tokenizer, base / "store")
    return base / "store"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A training store and a validation store."""
    base = tmp_path_factory.mktemp("evaluate")
    pieces = Tokenizer(WordLevel({piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}, "[UNK]"))
    pieces.pre_tokenizer = Whitespace()
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=pieces, **names).save_pretrained(base / "tokenizer")
    return (
        make_store(base / "train", base / "tokenizer", documents=60, seed=1),
        make_store(base / "val", base / "tokenizer", documents=12, seed=2),
    )


def model_folder(
    folder: Path, store: Path, kind: type[PreTrainedModel], config: PretrainedConfig, **special: str
) -> Path:
    """A model with weights far from their initial values, and the store's tokenizer."""
    torch.manual_seed(3)
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(store / "tokenizer")
    tokenizer.add_special_tokens(special)  # roles for existing pieces
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GPT2Config(vocab_size=15, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3)
    folder = tmp_path_factory.mktemp("gpt2")
    return model_folder(folder, stores[1], GPT2LMHeadModel, config, eos_token="[SEP]")


@pytest.fixture(scope="module")
def bert(stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = BertConfig(
        vocab_size=15, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    return model_folder(tmp_path_factory.mktemp("bert"), stores[1], BertForMaskedLM, config)


def corpus(folder: Path, texts: Sequence[str] = LINES) -> Path:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def guide(folder: Path, documents: Sequence[Sequence[int]], *, length: int, stride: int) -> tuple[float, int]:
    """The loop of Transformers' guide to perplexity of fixed-length models, over one document after another.

    Returns the sum of negative log-likelihoods, and the number of scored tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([document])
        before = 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + length, ids.shape[1])
            target = ids[:, begin:end].clone()
            target[:, : -(end - before)] = -100
            scored = int((target[:, 1:] != -100).sum())
            with torch.no_grad():
                loss = model(ids[:, begin:end], labels=target).loss
            if scored:
                total, count = total + float(loss) * scored, count + scored
            before = end
            if end == ids.shape[1]:
                break
    return total, count


@pytest.mark.parametrize(("length", "stride", "start"), [(32, 16, True), (32, 31, True), (12, 1, True), (16, 5, False)])
def test_perplexity_of_a_corpus_equals_the_guides(
    gpt2: Path, tmp_path: Path, length: int, stride: int, start: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in LINES]
    framed = [[tokenizer.eos_token_id] * start + ids for ids in documents]
    total, count = guide(gpt2, [ids for ids in framed if len(ids) > 1], length=length, stride=stride)
    file = corpus(tmp_path)
    evaluation = evaluate(
        gpt2, corpora={"texts": Corpus([file])}, length=length, stride=stride, start_token=start, batch_tokens=100
    )
    numbers = evaluation.results["texts"]
    assert evaluation.measure == "perplexity" and numbers["tokens"] == count
    assert numbers["loss"] == pytest.approx(total / count, rel=1e-6)
    assert numbers["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
    kept = [text for text, ids in zip(LINES, framed, strict=True) if len(ids) > 1]
    size = sum(len(text.encode()) for text in kept)
    assert numbers["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)


def test_perplexity_of_a_store_equals_that_of_its_documents(gpt2: Path, stores: tuple[Path, Path]) -> None:
    store = TokenStore.open(stores[1])
    offsets = store.offsets[store.documents]
    documents = [[3, *store.tokens[a:b].tolist()] for a, b in pairwise(offsets)]
    assert max(map(len, documents)) > 32, "some are longer than the model"
    total, count = guide(gpt2, documents, length=32, stride=16)
    numbers = evaluate(gpt2, stores=[stores[1]]).results[str(stores[1])]
    assert numbers["documents"] == len(documents) and numbers["tokens"] == count
    assert numbers["loss"] == pytest.approx(total / count, rel=1e-6)
    texts = [json.loads(line)["text"] for line in stores[1].parent.glob("*.jsonl").__next__().read_text().splitlines()]
    characters, size = sum(map(len, texts)), sum(len(text.encode()) for text in texts)
    assert (numbers["characters"], numbers["bytes"]) == (characters, size)
    assert numbers["bits_per_character"] == pytest.approx(total / math.log(2) / characters, rel=1e-6)
    few = evaluate(gpt2, stores=[stores[1]], limit=3).results[str(stores[1])]
    assert few["documents"] == 3


def test_other_causal_models_are_evaluated(stores: tuple[Path, Path], tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=15, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    llama = model_folder(tmp_path / "llama", stores[1], LlamaForCausalLM, config, bos_token="[CLS]")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    framed = [[2, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in LINES]
    assert tokenizer.bos_token_id == 2
    total, count = guide(llama, framed, length=64, stride=32)
    numbers = evaluate(llama, corpora={"t": Corpus([corpus(tmp_path)])}).results["t"]
    assert (numbers["loss"], numbers["tokens"]) == (pytest.approx(total / count, rel=1e-6), count)


def test_pseudo_perplexity_masks_tokens_one_at_a_time(bert: Path, tmp_path: Path) -> None:
    """Equations 2 and 3 of Salazar et al., with one forward pass for each token of each line."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    text = ["kami ton\n\n kato nemi", "hika " * 30]
    lines = ["kami ton", " kato nemi", "hika " * 30]
    score, count, pieces = 0.0, 0, 0
    for line in lines:
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        for begin in range(0, len(ids), 22):
            piece = [tokenizer.cls_token_id, *ids[begin : begin + 22], tokenizer.sep_token_id]
            pieces += 1
            for position in range(1, len(piece) - 1):
                masked = torch.tensor([piece])
                masked[0, position] = tokenizer.mask_token_id
                with torch.no_grad():
                    score += float(model(masked).logits[0, position].double().log_softmax(-1)[piece[position]])
                count += 1
    numbers = evaluate(bert, corpora={"t": Corpus([corpus(tmp_path, text)])}, batch_tokens=64).results["t"]
    assert (numbers["lines"], numbers["tokens"], numbers["pieces"]) == (3, count, pieces)
    assert numbers["pseudo_loss"] == pytest.approx(-score / count, rel=1e-6)
    assert numbers["pseudo_perplexity"] == pytest.approx(math.exp(-score / count), rel=1e-6)
    assert evaluate(bert, corpora={"t": Corpus([corpus(tmp_path, text)])}, limit=2).results["t"]["lines"] == 2


def test_a_bert_with_next_sentence_prediction_has_the_losses_of_its_masked_model(bert: Path) -> None:
    item = ScoredSequence(np.array([2, 4, 6, 3]), np.array([1]), np.array([5]))
    masked = BertForMaskedLM.from_pretrained(bert).eval()
    with_pairs = BertForPreTraining(masked.config).eval()
    with_pairs.bert.load_state_dict(masked.bert.state_dict(), strict=False)
    with_pairs.cls.predictions.load_state_dict(masked.cls.predictions.state_dict())
    losses = [
        float(negative_log_likelihood(model, [item], pad=0, device=torch.device("cpu")))
        for model in (masked, with_pairs)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0.1


@pytest.fixture(scope="module")
def run(stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that validates on the whole second store."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = {
        "data": {"train": [str(stores[0])], "validation": [str(stores[1])], "sequence_length": 32},
        "architecture": {
            "type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 32,
        },
        "objective": {"type": "masked_lm", "mlm_probability": 0.2, "whole_word_mask": False},
        "optimizer": {"type": "adamw", "learning_rate": 0.005},
        "schedule": {"type": "linear"},
        "batch_size": {"-1": 8},
        "max_steps": 4,
        "precision": "fp32",
        "evaluation": {"steps": 4, "batches": 1000},
    }  # fmt: skip
    train(Parameters.from_dict(settings, source="test"), out)
    return out


def test_what_is_written_is_read_for_the_card(tmp_path: Path) -> None:
    results = {"corpora/news.jsonl": {"pseudo_perplexity": 12.5, "bits": float("inf"), "lines": 100}}
    settings = {"length": 512, "limit": 100, "stride": None}
    evaluation = Evaluation(Path("m"), "pseudo-perplexity", settings, results, {"jnli": {"acc,none": 0.75}})
    (tmp_path / "out.json").write_text(json.dumps(evaluation.as_json()))
    shown = {"length": 512, "limit": 100}
    assert read_evaluation(tmp_path / "out.json") == [
        Measurement("news.jsonl", "terakoya evaluate, pseudo-perplexity", {"pseudo_perplexity": 12.5}, shown),
        Measurement("jnli", "lm-eval", {"acc,none": 0.75}, shown),
    ]


def test_a_step_of_a_run_is_evaluated(run: Path) -> None:
    step, checkpoint = Path(f"{run}@4"), run / "checkpoints/step-00000004"
    assert evaluate(step).model == checkpoint and evaluate(step).settings["step"] == 4
    with pytest.raises(UserError, match=r"no checkpoint of step 3; its checkpoints are of 4"):
        evaluate(Path(f"{run}@3"))


def test_evaluating_a_run_gives_the_numbers_of_its_validation(run: Path, stores: tuple[Path, Path]) -> None:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    logged = next(line for line in lines if line["kind"] == "validation" and line["step"] == 4)
    evaluation = evaluate(run)
    numbers = evaluation.results[str(stores[1])]
    assert evaluation.measure == "objective" and evaluation.settings["step"] == 4
    for name in ("loss", "mlm_loss", "masked_accuracy", "masked_bits_per_character", "masked_bits_per_byte"):
        assert numbers[name] == pytest.approx(logged[name], rel=1e-5), name
    assert numbers["masked"] > 10 and numbers["rows"] > 3
    other = evaluate(run / "checkpoints" / "step-00000004", stores=[stores[0]], limit=5)
    assert list(other.results) == [str(stores[0])] and other.results[str(stores[0])]["rows"] == 5


def test_a_run_whose_validation_store_is_gone_is_evaluated_on_another(
    run: Path, stores: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = stores[1].rename(tmp_path / "moved")
    try:
        with pytest.raises(
            UserError, match=f"data.validation: {stores[1]}: no such folder; name a store: --data STORE$"
        ):
            evaluate(run)
        assert list(evaluate(run, stores=[moved]).results) == [str(moved)]
    finally:
        moved.rename(stores[1])


@pytest.mark.parametrize("settings", [{"precision": "fp8"}, {"precision": "bf16", "attention": "flash"}])
def test_a_run_of_a_gpu_is_evaluated_on_a_cpu(run: Path, settings: dict[str, str]) -> None:
    """What cannot run there is replaced, and what is reported is what runs."""
    folder = run / "checkpoints" / "step-00000004"
    manifest = read_manifest(folder)
    manifest["parameters"] = {**manifest["parameters"], **settings}
    objective = RunObjective(folder, manifest, device=torch.device("cpu"), precision=None)
    assert objective.precision == "bf16" and not objective.flash


@pytest.mark.parametrize("kind", ["stages", "split", "phases"])
def test_a_run_is_evaluated_on_the_rows_and_masks_of_its_validation(
    run: Path, stores: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    """Where a later stage adds a training store, and where validation is a part of the training stores, also of those
    that only a later phase has, too."""
    settings = json.loads((run / "parameters.json").read_text())
    changes: dict[str, Any] = {"stages": [{"from_step": 2, "train": [str(stores[1])]}]}
    if kind != "stages":
        changes = {"split": [80, 20], "validation": []}
    phases = [{"steps": 1}, {"data": {"train": [str(stores[1])]}}] if kind == "phases" else []
    settings = {**settings, "data": {**settings["data"], **changes}, "phases": phases, "max_steps": 2}
    train(Parameters.from_dict({**settings, "evaluation": {"steps": 2}}, source="test"), tmp_path / "run")
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    logged = {line["store"]: line for line in lines if line["kind"] == "validation" and line["step"] == 2}
    names = (
        [str(stores[1])] if kind == "stages" else [f"{store} (validation)" for store in stores[: 1 + len(phases[1:])]]
    )
    results = evaluate(tmp_path / "run").results
    assert list(results) == list(logged) == names
    for name in names:
        for each in ("loss", "masked_accuracy"):
            assert results[name][each] == pytest.approx(logged[name][each], rel=1e-5), each


def test_lines_of_a_corpus_are_those_of_a_store(tmp_path: Path) -> None:
    """They end with a line feed: other characters that Python ends a line at are part of it, as in `prepare`."""
    texts = CorpusTexts("t", Corpus([corpus(tmp_path, ["a\u2028b\x0bc\n\n d\x85e"])]), lambda text: [len(text)])
    assert [text.ids.tolist() for text in texts.texts("line", None)] == [[5], [4]]


def test_lines_that_are_no_documents_are_told(gpt2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "mi"}\n{"text":\n{"sentence": "mi"}\nmi\n')
    texts = CorpusTexts("t", Corpus([file]), lambda text: [len(text)])
    assert len(list(texts.texts("document", None))) == 1
    said = "rejected 3 of 4 documents (2 bad JSON, 1 missing field)"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(said)
    file.write_text('{"sentence": "mi"}\n')
    with pytest.raises(UserError, match=r"got 1 of 1 documents \(1 missing field\), .*line 1.*\n.*\n.*--field"):
        evaluate(gpt2, corpora={"t": Corpus([file])})


def test_a_run_is_read_in_windows_as_long_as_its_rows(run: Path, stores: tuple[Path, Path], tmp_path: Path) -> None:
    """Its positions beyond them are as random as at its start."""
    settings = json.loads((run / "parameters.json").read_text())
    settings = {**settings, "data": {**settings["data"], "sequence_length": 16}, "max_steps": 1, "evaluation": None}
    train(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    texts = {"t": Corpus([corpus(tmp_path)])}
    lengths = [evaluate(tmp_path / "run", corpora=texts, length=length).settings["length"] for length in (None, 24)]
    assert lengths == [16, 24]


@pytest.mark.parametrize(("phase", "length"), [(1, 16), (2, 64), (3, 64), (4, 128)])
def test_rows_of_phases_to_come_are_not_trained(phase: int, length: int) -> None:
    lengths = [{}, {"data": {"sequence_length": 64}}, {"data": None}, {"data": {"sequence_length": 128}}]
    manifest = {"parameters": {"data": {"sequence_length": 16}, "phases": lengths}, "phase": {"number": phase}}
    assert trained_length(manifest) == length


def test_a_run_and_its_export_have_the_same_pseudo_perplexity(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    texts = {"t": Corpus([corpus(tmp_path)])}
    of_run, of_export = (evaluate(source, corpora=texts).results["t"] for source in (run, tmp_path / "model"))
    assert of_run == pytest.approx(of_export, rel=1e-6)
    assert of_run["pseudo_perplexity"] < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to evaluate on: name --data STORE"),
        ({"measure": "objective"}, "a Transformers folder has no objective"),
        ({"measure": "pseudo-perplexity", "corpora": True}, "GPT2LMHeadModel has no such measure, only perplexity"),
        ({"stride": 32, "corpora": True}, "--stride 32: expected 1 to 31"),
        ({"length": 33, "corpora": True}, "--length 33: the model takes at most 32 tokens"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    gpt2: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    if arguments.get("corpora"):
        arguments = {**arguments, "corpora": {"t": Corpus([corpus(tmp_path)])}}
    with pytest.raises(UserError) as raised:
        evaluate(gpt2, **arguments)
    assert message in str(raised.value)


def test_folders_without_perplexity_are_errors(bert: Path, stores: tuple[Path, Path], tmp_path: Path) -> None:
    texts = {"t": Corpus([corpus(tmp_path)])}
    with pytest.raises(UserError, match="expected a Transformers folder, a checkpoint or a run"):
        evaluate(tmp_path, corpora=texts)
    with pytest.raises(UserError, match=r"/none: expected a Transformers folder, .*, got no such folder"):
        evaluate(tmp_path / "none")
    config = ElectraConfig(
        vocab_size=15, embedding_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    electra = model_folder(tmp_path / "electra", stores[1], ElectraForPreTraining, config)
    with pytest.raises(UserError, match="ElectraForPreTraining is neither a causal nor a masked language model"):
        evaluate(electra, corpora=texts)
    headless = json.loads((bert / "config.json").read_text())
    broken = model_folder(tmp_path / "broken", stores[1], BertForMaskedLM, BertConfig(**headless))
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "transform.dense" not in name},
        broken / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match=r"has no weights for cls\.predictions\.transform\.dense"):
        evaluate(broken, corpora=texts)


def test_a_store_of_another_tokenizer_is_an_error(gpt2: Path, tmp_path: Path, stores: tuple[Path, Path]) -> None:
    other = shutil.copytree(stores[1], tmp_path / "store")
    file = next(path for path in (other / "tokenizer").iterdir() if path.name in ("tokenizer.json", "vocab.txt"))
    content = file.read_text()
    assert "kaka" in content
    file.write_text(content.replace("kaka", "zaza", 1))
    rewrite_store_json(other)
    with pytest.raises(UserError, match="was prepared with another tokenizer than the model's"):
        evaluate(gpt2, stores=[other])


def test_the_command_prints_a_table_or_json(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(corpus(tmp_path))
    numbers = evaluate(gpt2, corpora={file: Corpus([file])}).results[file]  # type: ignore[list-item]
    assert exit_code("evaluate", gpt2, "--corpus", file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{gpt2}: perplexity"
    assert lines[1] == "length 32, stride 16, start token [SEP], precision fp32"
    assert " ".join(lines[2].split()) == "data loss perplexity bits per character documents tokens characters"
    assert lines[3].split()[:2] == [file, f"{numbers['loss']:.4f}"]
    out = tmp_path / "evaluation.json"
    assert exit_code("evaluate", gpt2, "--corpus", file, "--json", "--out", out) == 0
    shown = capsys.readouterr()
    printed = json.loads(shown.out)
    assert "next:" not in shown.err and json.loads(out.read_text()) == printed
    assert exit_code("evaluate", gpt2, "--corpus", file, "--out", out) == 0
    assert capsys.readouterr().err.rstrip().endswith(f"--evaluation {out} --dry-run {gpt2.with_name('upload')}")
    assert printed["results"] == [{"data": file, **numbers}] and printed["settings"]["stride"] == 16
