"""Instruction tuning against plain Transformers, one conversation at a time; a tuned model is exported and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chat_tokenizer import MESSAGES, WITH_INPUT, make_chat_tokenizer, write_lines
from command_line import call, exit_code
from packed_rows import tensors

from terakoya.components import Architecture, Batch
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.json_settings import read_json
from terakoya.preparation.prepare import prepare
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.setup import train_in_this_process
from terakoya_contract.toy import make_store as make_toy_store
from terakoya_conversations.instruction import Instruction
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.gpt2 import GPT2
from terakoya_plugins.architectures.llama import Llama

LENGTH = 128
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
MODELS: dict[str, Architecture] = {
    "gpt2": GPT2(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "llama": Llama(**SIZES, intermediate_size=48, num_key_value_heads=2),
}
SHORT = [
    {"messages": [{"role": "user", "content": "空は？"}, {"role": "assistant", "content": "青い。"}]},
    {"messages": [MESSAGES[0], MESSAGES[1]]},
]
RECORDS = [*SHORT, {"messages": MESSAGES}, WITH_INPUT, *SHORT]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Conversations of one and of two turns, some of which fit together into one row."""
    folder = tmp_path_factory.mktemp("instruction")
    tokenizer = make_chat_tokenizer(folder / "tokenizer")
    file = write_lines(folder / "a.jsonl", *RECORDS)
    prepare([file], tokenizer=tokenizer, out=folder / "store", conversations=True, processes=1)
    store = TokenStore.open(folder / "store")
    assert store.index.lengths.max() <= LENGTH and store.index.lengths.min() < LENGTH / 2
    return store


def batch_of(store: TokenStore, objective: Instruction, *, length: int = LENGTH) -> Batch:
    """All rows, in order."""
    source = RowSource(store, objective.row_layout(), sequence_length=length, seed=1, shuffle=False)
    return objective.collate(source.load(0, np.arange(len(source))), store.facts.vocabulary)


def module_of(objective: Instruction, architecture: Architecture, store: TokenStore) -> Any:
    torch.manual_seed(0)
    module = objective.build(architecture, store.facts.vocabulary)
    attention.use(module, "sdpa")
    return module


def labelled(loss_on: str) -> list[tuple[list[dict[str, str]], set[int]]]:
    """Each conversation, with the numbers of the turns that are learnt."""
    found = []
    for record in RECORDS:
        turns = record.get("messages")
        if turns is None:
            turns = [
                {"role": "user", "content": record["instruction"], "input": record["input"]},
                {"role": "assistant", "content": record["output"]},
            ]
        answers = {number for number, turn in enumerate(turns) if turn["role"] == "assistant"}
        found.append((turns, {max(answers)} if loss_on == "last_answer" else answers))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss_on", ["answers", "last_answer"])
def test_loss_and_gradients_equal_those_of_transformers(store: TokenStore, name: str, loss_on: str) -> None:
    """Transformers receives one conversation at a time, rendered by its own tokenizer, with -100 up to each answer,
    which includes its end token; the packed and the padded layout give the same results."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(store.tokenizer_folder)
    packed = Instruction(loss_on=loss_on)  # type: ignore[arg-type]
    module = module_of(packed, MODELS[name], store)
    reference = type(module.model)(MODELS[name].config(store.facts.vocabulary))
    reference.load_state_dict(module.model.state_dict())
    total, count = torch.zeros(()), 0
    for turns, learnt in labelled(loss_on):
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt")["input_ids"]
        labels = torch.full_like(ids, -100)
        for number in learnt:
            prompt = tokenizer.apply_chat_template(turns[:number], add_generation_prompt=True)["input_ids"]
            until = tokenizer.apply_chat_template(turns[: number + 1])["input_ids"]
            labels[0, len(prompt) : len(until)] = ids[0, len(prompt) : len(until)]
        predicted = int((labels[0, 1:] >= 0).sum())
        total = total + reference(input_ids=ids, labels=labels, use_cache=False).loss * predicted
        count += predicted
    expected = total / count
    expected.backward()
    theirs = {key: weight.grad for key, weight in reference.named_parameters()}
    for objective in (packed, Instruction(layout="padded", loss_on=loss_on)):  # type: ignore[arg-type]
        batch = batch_of(store, objective)
        rows = len(batch.arrays["input_ids"])
        assert rows == len(RECORDS) if objective.layout == "padded" else rows < len(RECORDS)
        assert batch.counts["targets"] == count
        module.zero_grad()
        ours = module(tensors(batch))["lm_loss"] / batch.counts["targets"]
        ours.backward()
        assert abs(float(ours.detach()) - float(expected.detach())) < 1e-6
        for key, weight in module.model.named_parameters():
            assert weight.grad is not None and (weight.grad - theirs[key]).abs().max() < 1e-6, key


def test_loss_on_all_predicts_every_token_but_the_first(store: TokenStore) -> None:
    batch = batch_of(store, Instruction(loss_on="all"))
    assert batch.counts["targets"] == store.facts.tokens - store.facts.documents == batch.counts["tokens"]
    answers = batch_of(store, Instruction())
    assert answers.counts["targets"] == np.count_nonzero(store.read_learned(0, store.facts.tokens))
    np.testing.assert_array_equal(answers.arrays["input_ids"], batch.arrays["input_ids"])
    assert attention.WHOLE_ROWS in batch_of(store, Instruction(layout="padded")).arrays
    assert attention.WHOLE_ROWS not in batch.arrays


def test_terms_and_refusals(store: TokenStore, tmp_path: Path) -> None:
    terms = Instruction(z_loss=1e-4).terms()
    assert {name: (term.count, term.weight) for name, term in terms.items()} == {
        "lm_loss": ("targets", 1.0), "token_accuracy": ("targets", None), "z_loss": ("targets", 1e-4),
    }  # fmt: skip
    assert Instruction().derive_metrics({"lm_loss": np.array(20.0)}, {"targets": 10}) == {
        "perplexity": pytest.approx(np.exp(2.0))
    }
    with pytest.raises(UserError, match=r"objective instruction: .* no head 'causal'"):
        Instruction().build(Bert(), store.facts.vocabulary)
    with pytest.raises(UserError, match=r"terakoya prepare .*--conversations"):
        batch_of(make_toy_store(tmp_path), Instruction())


def test_the_preset_is_a_run(store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = read_json(Path(__file__).resolve().parents[3] / "parameters" / "tiny_instruction.json")
    parameters = Parameters.from_dict(preset, source="tiny_instruction.json")
    assert isinstance(parameters.objective, Instruction) and parameters.start_from is not None


@pytest.mark.nightly
def test_a_tuned_model_answers_in_plain_transformers(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Transformers folder is tuned until it knows the answers, exported, and prompted by its chat template."""
    torch.manual_seed(0)
    start = GPT2(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).build(store.facts.vocabulary, "causal")
    start.save_pretrained(tmp_path / "start")
    values = {
        "data": {"train": [str(store.folder)], "validation": [str(store.folder)], "sequence_length": LENGTH},
        "architecture": {
            "type": "gpt2", **SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        "start_from": str(tmp_path / "start"),
        "objective": {"type": "instruction"},
        "optimizer": {"type": "adamw", "learning_rate": 0.01},
        "schedule": {"type": "constant"},
        "batch_size": {"-1": 4},
        "max_steps": 80,
        "logging_steps": 40,
        "evaluation": {"steps": 80, "batches": 4},
        "checkpoint": {"save_steps": 80},
        "seed": 1,
    }  # fmt: skip
    train_in_this_process(Parameters.from_dict(values, source="a test"), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = [record for record in records if record["kind"] == "validation"]
    assert validation[-1]["loss"] < 0.1 and validation[-1]["token_accuracy"] == 1.0
    assert validation[-1]["perplexity"] == pytest.approx(np.exp(validation[-1]["loss"]))
    capsys.readouterr()
    assert exit_code("export", tmp_path / "run", "--out", tmp_path / "model") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for turns, learnt in labelled("answers"):
        for number in learnt:
            prompt = tokenizer.apply_chat_template(turns[:number], add_generation_prompt=True, return_tensors="pt")
            answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            assert tokenizer.decode(answer) == turns[number]["content"] + "</s>", "and ends with the end token"
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(lines))
    lines = iter([MESSAGES[0]["content"], MESSAGES[2]["content"], ""])
    capsys.readouterr()
    _, shown, _ = call(capsys, "try", tmp_path / "run", "--chat", "--temperature", 0, "--max-new-tokens", 40)
    assert MESSAGES[1]["content"] in shown and MESSAGES[3]["content"] in shown and "</s>" not in shown
