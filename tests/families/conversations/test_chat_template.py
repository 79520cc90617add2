"""Templates render the same text here and in Transformers; the error of an unusable template says why."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
from chat_tokenizer import CHATML, MESSAGES, make_chat_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from terakoya.errors import UserError
from terakoya_conversations import chat_template
from terakoya_conversations.chat_template import ChatTemplate, TemplateError, find_template

JAPANESE = """\
次の指示を読み、求められていることに応答してください。

### 指示:
日本の首都はどこですか？

### 応答:
東京です。</s>

### 指示:
人口は？

### 応答:
約千四百万人です。
多いですね。</s>"""
ENGLISH = """\
Answer in English.

### Instruction:
Sum up.

### Input:
The sky is blue.

### Response:
Blue.</s>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_built_in_templates_write_instructions_and_responses(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for wanted in ("alpaca", None):
        tokenizer.chat_template = find_template(wanted, tokenizer, folder).text
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == JAPANESE
    asked = tokenizer.apply_chat_template(MESSAGES[:3], tokenize=False, add_generation_prompt=True)
    assert asked == JAPANESE[: JAPANESE.index("約千")]
    turns = [
        {"role": "system", "content": "Answer in English."},
        {"role": "user", "content": "Sum up.", "input": "The sky is blue."},
        {"role": "assistant", "content": "Blue."},
    ]
    tokenizer.chat_template = find_template("alpaca_en", tokenizer, folder).text
    assert tokenizer.apply_chat_template(turns, tokenize=False) == ENGLISH
    text, spans = find_template("alpaca_en", tokenizer, folder).create_renderer(tokenizer).render(turns)
    assert text == ENGLISH and spans is not None and [text[a:b] for a, b in spans] == ["Blue.</s>"]


def test_a_text_begins_once_with_the_tokenizers_first_token(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    make_chat_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("あ")["input_ids"][0] == 1
    tokenizer.chat_template = find_template("alpaca", tokenizer, tmp_path).text
    ids = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert ids[0] == 1 and ids.count(1) == 1


def test_a_template_without_inputs_gets_them_in_the_question(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [{"role": "user", "content": "要約", "input": "空は青い。"}, {"role": "assistant", "content": "青"}]
    fitted = ChatTemplate("x", CHATML).create_renderer(tokenizer).join_inputs(turns)
    assert fitted == [{"role": "user", "content": "要約\n\n空は青い。"}, turns[1]]
    assert turns[0]["input"] == "空は青い。"


def test_a_tokenizers_own_template_and_a_file(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        UserError, match=r"--template chat: expected a tokenizer with a chat template of its own.*alpaca"
    ):
        find_template("chat", tokenizer, folder)
    tokenizer.chat_template = CHATML
    for wanted in ("chat", None):
        assert find_template(wanted, tokenizer, folder) == ChatTemplate("chat", CHATML)
    (tmp_path / "own.jinja").write_text(CHATML, encoding="utf-8")
    assert find_template(str(tmp_path / "own.jinja"), tokenizer, folder) == ChatTemplate("own.jinja", CHATML)
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for m in messages %}{{ m['content'] }}", "cannot be used: line 1: .*end of template"),
        ("\n{% for m in messages %}{{ m['content'] | nix }}{% endfor %}", "cannot be used: line 2: .*nix"),
        ("{{ raise_exception('never') }}", "cannot be used: never"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "cannot be used: Range too big"),
        ("{{ 1 // 0 }}", "cannot be used: .*zero"),
        ("{{ messages[0]['content'] }}", "expected a template that writes every message"),
        (
            "{% for m in messages %}{% generation %}!{% endgeneration %}{{ m['content'] }}{% endfor %}",
            "expected the answer between its generation and endgeneration",
        ),
    ],
)
def test_a_template_that_cannot_be_used_says_why(
    template: str, error: str, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "x.jinja").write_text(template)
    with pytest.raises(UserError, match=rf"--template x\.jinja: {error}"):
        find_template(str(tmp_path / "x.jinja"), tokenizer, folder)


def test_a_template_that_does_not_end_is_named(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    handler = signal.getsignal(signal.SIGALRM)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "x.jinja").write_text(loop)
    with pytest.raises(UserError, match=r"--template x\.jinja: .*that of 2 messages took more than 0\.3 s"):
        find_template(str(tmp_path / "x.jinja"), tokenizer, folder)
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_template_that_teaches_less_gives_a_warning(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.jinja").write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    with caplog.at_level(logging.WARNING, "terakoya"):
        find_template(str(tmp_path / "x.jinja"), tokenizer, folder)
    assert "will not learn to stop" in caplog.text and "no add_generation_prompt" in caplog.text


def test_unknown_names_and_unsuitable_tokenizers(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"--template: expected chat .* got alpacca, which is no file"):
        find_template("alpacca", tokenizer, folder)
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="expected a template in UTF-8"):
        find_template(str(tmp_path / "x.jinja"), tokenizer, folder)
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="expected a tokenizer with an end-of-sequence token"):
        find_template(None, endless, folder)


def test_a_template_refuses_conversations_that_it_cannot_render(tokenizer: PreTrainedTokenizerBase) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(TemplateError, match="no system"):
        ChatTemplate("x", strict).create_renderer(tokenizer).render([{"role": "system", "content": "s"}, *MESSAGES])
