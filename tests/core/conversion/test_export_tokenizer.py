"""The tokenizer of an export is that of its source, fitted to the model, and no code of the source runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import CHATML, make_chat_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizer,
)

from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.toolkit.formats import transformers_folder
from terakoya_inference.generation import Sampling, TextGenerator

SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 66,
}  # fmt: skip
PIECES = {piece: number for number, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefg"])}
BYTES = {piece: number for number, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefg"])}


def make_folder(folder: Path, kind: str, settings: Mapping[str, Any]) -> Path:
    """A model with its tokenizer in tokenizer.json, and `settings` as its tokenizer_config.json."""
    if kind == "bert":
        BertForMaskedLM(BertConfig(vocab_size=len(PIECES), **SIZES)).save_pretrained(folder)
        BertTokenizer(vocab=PIECES).save_pretrained(folder)
    else:
        RobertaForMaskedLM(RobertaConfig(vocab_size=len(BYTES), **SIZES)).save_pretrained(folder)
        RobertaTokenizer(vocab=BYTES, merges=[]).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_tokenizer_whose_class_only_config_json_tells_stays_the_same(kind: str, tmp_path: Path) -> None:
    """As in the published folders of BERT, RoBERTa and GPT-2, whose tokenizer_config.json has a length alone."""
    source = make_folder(tmp_path / kind, kind, {"model_max_length": 64})
    export(source, tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert type(after) is type(before) and after.special_tokens_map == before.special_tokens_map
    assert len(after) == len(before) and after.model_input_names == before.model_input_names
    pair = ["a b", "cab"], ["c", "d e"]
    assert dict(after(*pair, padding=True)) == dict(before(*pair, padding=True))
    assert not (tmp_path / "out/tokenization.py").exists()


def test_code_of_a_folder_does_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_own.BertTokenizer", None]}
    source = make_folder(tmp_path / "bert", "bert", {"tokenizer_class": "BertTokenizer", "auto_map": auto_map})
    code = "import pathlib, transformers\npathlib.Path({!r}).touch()\nclass {name}(transformers.{name}): pass\n"
    ran = tmp_path / "ran"
    for file, name in (("tokenization_own.py", "BertTokenizer"), ("configuration_own.py", "BertConfig")):
        (source / file).write_text(code.format(str(ran), name=name))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoConfig": "configuration_own.BertConfig"}})
    )
    export(source, tmp_path / "out")
    assert not ran.exists()
    assert all("auto_map" not in json.loads(file.read_text()) for file in (tmp_path / "out").glob("*config.json"))


@pytest.mark.parametrize("format", ["onnx", "sentence_transformers"])
def test_a_tokenizer_that_needs_code_is_refused_for_other_programs(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya.toolkit.formats.other_programs.require_libraries", lambda *_: None)
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    source = make_folder(tmp_path / "bert", "bert", {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map})
    (source / "tokenization_own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(UserError, match="expected a tokenizer that Transformers loads"):
        export(source, tmp_path / "out", format=format)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_texts_are_cut_where_the_positions_of_the_model_end(tmp_path: Path) -> None:
    """Also where the tokenizer is from a model with fewer, whose rows have become longer."""
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 16}
    source = make_folder(tmp_path / "bert", "bert", settings)
    transformers_folder.write(BertForMaskedLM.from_pretrained(source), source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer("a " * 100, truncation=True)["input_ids"]) == SIZES["max_position_embeddings"]


def only_says(token: int) -> PreTrainedModel:
    """A causal model that continues every text with `token`, and whose documents end with 2."""
    sizes = {"vocab_size": 400, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        for weight in (model.transformer.ln_f.weight, model.transformer.wte.weight):
            weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[token] = 1.0
    return model


ENDS_ITSELF = "{% for m in messages %}{{ m['content'] + (eos_token if m['role'] == 'assistant' else '') }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends", "said"),
    [
        (CHATML, [2, 4], []),
        (ENDS_ITSELF, 2, []),
        (None, 2, []),
        ("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", 2, []),
        ("{{ raise_exception('no chats today') }}", 2, ["no chats today"]),
    ],
    ids=["ChatML", "eos", "no template", "ordinary text", "unusable"],
)
def test_a_chat_model_stops_where_its_template_ends_an_answer(
    template: str | None, ends: Any, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = make_chat_tokenizer(tmp_path / "source"), tmp_path / "out"
    if template is not None:
        (source / "chat_template.jinja").write_text(template)
    only_says(4).save_pretrained(source)
    export(source, out)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == ends
    assert all(each in caplog.text for each in said) and bool(caplog.text) == bool(said)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_ids_to_tokens(4) == "<|im_end|>"
    new = model.generate(torch.tensor([[10]]), max_new_tokens=5, do_sample=False)[0, 1:].tolist()
    assert new == [4] * (1 if ends == [2, 4] else 5)


def test_a_chat_stops_there_with_a_model_that_does_not_say_so(tmp_path: Path) -> None:
    """As that of a checkpoint, whose tokenizer lies beside it."""
    folder = make_chat_tokenizer(tmp_path)
    only_says(4).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    seen: list[int] = []
    generator = TextGenerator(folder)
    generator.tokenizer.decode = lambda ids, **_: seen.append(len(ids)) or ""
    generator.reply([{"role": "user", "content": "空"}], Sampling(max_new_tokens=5, temperature=0))
    assert seen[1] == seen[0] + 1
