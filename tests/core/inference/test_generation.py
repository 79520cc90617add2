"""A causal model writes on: as plain Transformers says, in batches as alone, turn by turn, within its length."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from terakoya.commands.main import main
from terakoya.errors import UserError
from terakoya.inference.generation import Sampling, Writer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"山川雪月花鳥風空海雨が降るに"]
GREEDY = Sampling(max_new_tokens=6, temperature=0)
TEMPLATE = "{% for m in messages %}{{ '月' if m['role'] == 'user' else '花' }}{{ m['content'] }}{% endfor %}鳥"


def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3}
    gpt2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=20, initializer_range=0.5, **sizes)
    llama = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=20,
        initializer_range=0.5, **sizes,
    )  # fmt: skip
    return {"gpt2": GPT2LMHeadModel(gpt2), "llama": LlamaForCausalLM(llama)}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("causal")
    models()[request.param].save_pretrained(place)
    (place / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(place / "vocab.txt"), do_lower_case=False).save_pretrained(place)
    return place


def likeliest(folder: Path, ids: list[int], most: int) -> list[int]:
    """Token after token by whole forwards of the plain model, until the end or `most`."""
    model, ids, start = AutoModelForCausalLM.from_pretrained(folder).eval(), list(ids), len(ids)
    while len(ids) < start + most:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == 3:
            break
    return ids[start:]


def test_a_batch_is_each_text_alone_and_the_plain_models_likeliest(folder: Path) -> None:
    writer = Writer(folder)
    texts = ["山に雪が降る", "月", "空と海"]
    together = writer.write(texts, GREEDY)
    for text, written in zip(texts, together, strict=True):
        ids = [WORDS.index(each) if each in WORDS else 1 for each in text]
        assert writer.prompt(text) == ids, "no [CLS], no [SEP]"
        new = [WORDS[each] for each in likeliest(folder, ids, 6) if each >= 5]
        assert written.replace(" ", "") == "".join(new)
        assert [written] == writer.write([text], GREEDY)


def test_what_is_drawn_follows_the_seed(folder: Path) -> None:
    writer = Writer(folder)
    drawn = [
        writer.write(["山に雪"] * 3, Sampling(max_new_tokens=12, temperature=2.0, seed=seed)) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    daring = writer.write(["山に雪"] * 3, Sampling(max_new_tokens=12, temperature=2.0, top_k=1))
    assert daring == writer.write(["山に雪"] * 3, Sampling(max_new_tokens=12, temperature=0)), "one to choose from"


def test_it_stops_where_the_model_ends(folder: Path) -> None:
    writer = Writer(folder)
    ids = writer.prompt("山" * 15)
    assert len(
        writer.tokenizer(writer.write(["山" * 15], Sampling(100, temperature=0))[0])["input_ids"]
    ) - 2 <= 20 - len(ids)
    with pytest.raises(UserError, match="leaves no room"):
        writer.write(["山" * 20], GREEDY)


def test_turns_go_through_the_chat_template_and_the_oldest_are_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(folder)
    asked: list[list[int]] = []
    monkeypatch.setattr(writer, "_write", lambda prompts, sampling: asked.append(prompts[0]) or ["雨"])
    turns = [
        {"role": "user", "content": "山"},
        {"role": "assistant", "content": "川"},
        {"role": "user", "content": "雪"},
    ]
    writer.answer(turns, GREEDY)
    writer.tokenizer.chat_template, writer.has_template = TEMPLATE, True
    writer.answer(turns, GREEDY)
    long = [{"role": role, "content": "海" * 5} for role in ("user", "assistant", "user", "assistant", "user")]
    writer.answer(long, GREEDY)
    shown = ["".join(WORDS[each] for each in ids if each >= 5) for ids in asked]
    assert shown == ["山川雪", "月山花川月雪鳥", "月海海海海海鳥"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(["try", *arguments])
    out, err = capsys.readouterr()
    assert int(left.value.code or 0) == code, err
    return err if code else out


def test_the_command_writes_on_and_chats(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Writer(folder).write(["山 に", "[海]"], GREEDY)
    options = ["--max-new-tokens", "6", "--temperature", "0"]
    assert run(capsys, str(folder), "山 に", "[海]", *options).splitlines() == [
        f"山 に{expected[0]}", f"[海]{expected[1]}"
    ]  # fmt: skip
    first = Writer(folder).write(["雪"], GREEDY)[0]
    second = Writer(folder).write([f"雪{first}月"], GREEDY)[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("雪\n月\n\n花\n"))
    lines = run(capsys, str(folder), "--chat", *options).splitlines()
    assert "no chat template" in " ".join(lines[:2])
    assert [line.removeprefix("> ") for line in lines[-3:-1]] == [first, second], "and nothing after the empty line"
    assert "expected a text to go on from" in run(capsys, str(folder), code=2)
    cut = "山に".encode()[:-1].decode("utf-8", "surrogateescape")  # as a command line hands over what is no UTF-8
    assert "a character is cut in two" in run(capsys, str(folder), cut, code=2)
