"""Generated text is that of plain Transformers: in batches, one by one and in chats, within the model's length."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from command_line import call
from transformers import (
    AutoModelForCausalLM,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from terakoya.errors import UserError
from terakoya.toolkit import fast_products
from terakoya_inference import generation
from terakoya_inference.generation import Sampling, TextGenerator

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"山川雪月花鳥風空海雨が降るに"]
GREEDY = Sampling(max_new_tokens=6, temperature=0)
TEMPLATE = "{% for m in messages %}{{ '月' if m['role'] == 'user' else '花' }}{{ m['content'] }}{% endfor %}鳥"


def models() -> dict[str, PreTrainedModel]:
    """A small GPT-2 and a small Llama."""
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
    """A model with a tokenizer of `WORDS`."""
    folder = tmp_path_factory.mktemp("causal")
    models()[request.param].save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    return folder


def greedy(folder: Path, ids: list[int], max_new_tokens: int) -> list[int]:
    """Greedy decoding with a full forward pass of the plain model for each token."""
    model, ids, start = AutoModelForCausalLM.from_pretrained(folder).eval(), list(ids), len(ids)
    while len(ids) < start + max_new_tokens:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == 3:
            break
    return ids[start:]


def test_a_batch_gives_the_texts_of_single_calls_and_of_greedy_decoding(folder: Path) -> None:
    generator = TextGenerator(folder)
    texts = ["山に雪が降る", "月", "空と海"]
    batch = generator.generate(texts, GREEDY)
    for text, continuation in zip(texts, batch, strict=True):
        ids = [WORDS.index(each) if each in WORDS else 1 for each in text]
        assert generator.prompt_ids(text) == ids, "no [CLS], no [SEP]"
        new = [WORDS[each] for each in greedy(folder, ids, 6) if each >= 5]
        assert continuation.replace(" ", "") == "".join(new)
        assert [continuation] == generator.generate([text], GREEDY)


@pytest.mark.parametrize("fast", [True, False])
def test_a_bf16_model_is_float32_where_bf16_is_slow(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    model.save_pretrained(tmp_path)
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(tmp_path)
    monkeypatch.setattr(fast_products, "multiplies_fast", lambda precision, device: fast)
    generator = TextGenerator(tmp_path)
    assert generator.model.dtype == (torch.bfloat16 if fast else torch.float32)
    if not fast:
        texts = generator.generate(["山川"], GREEDY)
        (tmp_path / "wide").mkdir()
        model.float().save_pretrained(tmp_path / "wide")
        ids = greedy(tmp_path / "wide", generator.prompt_ids("山川"), 6)
        assert [text.strip() for text in texts] == [generator.tokenizer.decode(ids, skip_special_tokens=True)]


def test_the_seed_decides_what_is_sampled(folder: Path) -> None:
    generator = TextGenerator(folder)
    samples = [
        generator.generate(["山に雪"] * 3, Sampling(max_new_tokens=12, temperature=2.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert samples[0] == samples[1] != samples[2]
    top_1 = generator.generate(["山に雪"] * 3, Sampling(max_new_tokens=12, temperature=2.0, top_k=1))
    assert top_1 == generator.generate(["山に雪"] * 3, Sampling(max_new_tokens=12, temperature=0)), (
        "with one token to choose from"
    )


def test_generation_stops_at_the_models_length(folder: Path) -> None:
    generator = TextGenerator(folder)
    ids = generator.prompt_ids("山" * 15)
    assert len(
        generator.tokenizer(generator.generate(["山" * 15], Sampling(100, temperature=0))[0])["input_ids"]
    ) - 2 <= 20 - len(ids)
    with pytest.raises(UserError, match="leaves no room"):
        generator.generate(["山" * 20], GREEDY)


def test_the_chat_template_formats_turns_and_the_oldest_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = TextGenerator(folder)
    prompts_seen: list[list[int]] = []
    monkeypatch.setattr(generator, "_generate", lambda prompts, sampling: prompts_seen.append(prompts[0]) or ["雨"])
    turns = [
        {"role": "user", "content": "山"},
        {"role": "assistant", "content": "川"},
        {"role": "user", "content": "雪"},
    ]
    generator.reply(turns, GREEDY)
    generator.tokenizer.chat_template, generator.has_template = TEMPLATE, True
    generator.reply(turns, GREEDY)
    long = [{"role": role, "content": "海" * 5} for role in ("user", "assistant", "user", "assistant", "user")]
    generator.reply(long, GREEDY)
    shown = ["".join(WORDS[each] for each in ids if each >= 5) for ids in prompts_seen]
    assert shown == ["山川雪", "月山花川月雪鳥", "月海海海海海鳥"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Runs `terakoya try`, checks its exit code, and returns its output, or its error output if `code` is not 0."""
    ended, out, err = call(capsys, "try", *arguments)
    assert ended == code, err
    return err if code else out


def test_a_chat_template_that_does_not_end_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "TEMPLATE_SECONDS", 0.2)
    generator = TextGenerator(folder)
    loops = "".join("{% for n in range(9999) %}" for _ in range(3)) + "".join("{% endfor %}" for _ in range(3))
    generator.tokenizer.chat_template, generator.has_template = loops, True
    with pytest.raises(UserError, match=r"the chat template of its tokenizer cannot be used: took more than 0\.2 s"):
        generator.reply([{"role": "user", "content": "山"}], GREEDY)


def test_the_command_continues_texts_and_chats(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TextGenerator(folder).generate(["山 に", "[海]"], GREEDY)
    options = ["--max-new-tokens", "6", "--temperature", "0"]
    assert run(capsys, str(folder), "山 に", "[海]", *options).splitlines() == [
        f"山 に{expected[0]}", f"[海]{expected[1]}"
    ]  # fmt: skip
    first = TextGenerator(folder).generate(["雪"], GREEDY)[0]
    second = TextGenerator(folder).generate([f"雪{first}月"], GREEDY)[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("雪\n月\n\n花\n"))
    lines = run(capsys, str(folder), "--chat", *options).splitlines()
    assert "no chat template" in " ".join(lines[:2])
    assert [line.removeprefix("> ") for line in lines[-3:-1]] == [first, second], "no reply after the empty line"
    assert "expected a text to continue" in run(capsys, str(folder), code=2)
    cut = "山に".encode()[:-1].decode("utf-8", "surrogateescape")  # how Python decodes arguments that are not UTF-8
    assert "a character is cut in two" in run(capsys, str(folder), cut, code=2)
