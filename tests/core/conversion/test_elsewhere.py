"""A folder that was written loads in Transformers alone, in another process and place; what does not is named."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fugashi
import pytest
import unidic_lite
from chat_tokenizer import CHATML, make_chat_tokenizer
from command_line import call, refusal
from tiny_exports import make_model, train_tokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from terakoya.conversion import export as export_module
from terakoya.conversion.elsewhere import elsewhere
from terakoya.errors import UserError
from terakoya.toolkit.formats.tokenizer_needs import hub_arguments

WORD = "山川海"
SPLITS = "assert AutoTokenizer.from_pretrained({}).word_tokenizer.tokenize('山川海が') == ['山川海', 'が']"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has MeCab's user dictionary in its folder."""
    folder = tmp_path_factory.mktemp("elsewhere") / "bert"
    folder.mkdir()
    (folder / "u.csv").write_text(f"{WORD},,,-20000,名詞,固有名詞,一般" + ",*" * 14, encoding="utf-8")
    fugashi.build_dictionary(f"x -d '{unidic_lite.DICDIR}' -u {folder}/user.dic -f utf8 -t utf8 {folder}/u.csv")
    train_tokenizer(folder / "words", "mecab_wordpiece", vocab_size=100, mecab_option=f"-u {folder}/user.dic")
    make_model("bert", "masked", folder / "words", "mecab_wordpiece").save_pretrained(folder / "model")
    shutil.copytree(folder / "words", folder / "model", dirs_exist_ok=True)
    return folder / "model"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chats, and stops where its template ends an answer."""
    folder = make_chat_tokenizer(tmp_path_factory.mktemp("elsewhere") / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.generation_config.eos_token_id = [2, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model.save_pretrained(folder)
    return folder


def change(file: str, **values: Any) -> Callable[[Path], None]:
    def changes(folder: Path) -> None:
        written = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**written, **values}))

    return changes


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])


def write_template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


MECAB = {"mecab_dic": "unidic_lite", "mecab_option": "-u /home/me/user.dic"}
SPOILT: Mapping[str, tuple[str, Callable[[Path], object], str]] = {
    "no vocabulary": ("bert", lambda folder: (folder / "vocab.txt").unlink(), "AutoTokenizer.from_pretrained: "),
    "a builder's path": (
        "bert",
        change("tokenizer_config.json", mecab_kwargs=MECAB),
        "AutoTokenizer.from_pretrained: ",
    ),
    "no dictionary": ("bert", lambda folder: (folder / "user.dic").unlink(), "AutoTokenizer.from_pretrained: Runtime"),
    "cut weights": ("bert", cut_weights, "BertForMaskedLM.from_pretrained: "),
    "other layers": (
        "bert",
        change("config.json", num_hidden_layers=9),
        "from_pretrained: ValueError: missing weights",
    ),
    "small model": ("chat", change("config.json", vocab_size=9), "GPT2LMHeadModel.from_pretrained: "),
    "never stops": ("chat", change("generation_config.json", eos_token_id=2), "an answer ends with <|im_end|> (id 4)"),
    "broken template": ("chat", write_template("{{ messages[0]['name'].x.y }}" + CHATML), "apply_chat_template: Undef"),
    "no question": ("chat", write_template("{{ messages[1]['content'] }}<|im_end|>"), "the question is not in what it"),
}


def check(folders: Sequence[Path], classes: Mapping[str, str] = {"bert": "BertForMaskedLM"}) -> None:
    with elsewhere() as process:
        process.check({each: classes.get(each.name.split()[0], "GPT2LMHeadModel") for each in folders})


def test_what_loads_elsewhere_passes_and_what_does_not_is_named(
    bert: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/nowhere")
    good = [shutil.copytree(source, tmp_path / name) for name, source in (("bert", bert), ("chat", chat))]
    folders = []
    for name, (kind, spoil, _) in SPOILT.items():
        folders.append(shutil.copytree(bert if kind == "bert" else chat, tmp_path / f"{kind} {name}"))
        spoil(folders[-1])
    with pytest.raises(UserError, match="written, but Transformers alone cannot use it elsewhere") as raised:
        check([*good, *folders])
    lines = str(raised.value).splitlines()
    assert len(lines) == len(SPOILT), raised.value
    for line, folder, (_, _, words) in zip(lines, folders, SPOILT.values(), strict=True):
        assert f"{folder}: " in line and words in line


def test_a_process_that_says_nothing_is_told(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya.conversion.elsewhere.PROGRAM", "raise SystemExit('no Transformers here')")
    with pytest.raises(UserError, match="python: exit code 1: no Transformers here"):
        check([bert])
    monkeypatch.setattr("terakoya.conversion.elsewhere.SECONDS", 0.2)
    monkeypatch.setattr("terakoya.conversion.elsewhere.PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(UserError, match=r"python: no answer in 0\.2 s"):
        check([bert])


@pytest.mark.usefixtures("forks")
def test_an_export_that_loads_nowhere_else_stays_and_ends_with_an_error(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exports = export_module.export

    def lose_vocabulary(source: Path, out: Path, **options: Any) -> export_module.ExportResult:
        done = exports(source, out, **options)
        (out / "vocab.txt").unlink()
        return done

    monkeypatch.setattr(export_module, "export", lose_vocabulary)
    said = refusal(capsys, "export", bert, "--out", tmp_path / "out")
    assert (tmp_path / "out/config.json").is_file()
    assert f"elsewhere: {tmp_path}/out: AutoTokenizer.from_pretrained: " in said


@pytest.mark.usefixtures("forks")
def test_the_lines_that_export_prints_find_the_user_dictionary_from_anywhere(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, _ = call(capsys, "export", bert, "--out", "out put")
    assert code == 0
    assert "looks for MeCab's user dictionary in the working directory; with mecab_kwargs it finds it" in printed
    (code,) = (line for line in printed.splitlines() if "AutoTokenizer.from_pretrained" in line)
    arguments = code.strip().removeprefix("tokenizer = AutoTokenizer.from_pretrained(").removesuffix(")")
    program = "from transformers import AutoTokenizer\n" + SPLITS.format(
        arguments.replace('"out put"', repr(str(tmp_path / "out put")))
    )
    (tmp_path / "else").mkdir()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "else", check=True)


@pytest.mark.parametrize("folder", ["", "discriminator"])
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("-u user.dic", "-u HUB/{}user.dic"),
        ("-u a.dic,b.dic -b 9", "-u HUB/{0}a.dic,HUB/{0}b.dic -b 9"),
        ("--userdic='my words.dic' -E '{x}'", "'--userdic=HUB/{}my words.dic' -E '{{x}}'"),
    ],
)
def test_the_arguments_for_a_repository_name_the_files_that_are_fetched(
    option: str, expected: str, folder: str
) -> None:
    settings = {"mecab_kwargs": {"mecab_dic": "ipadic", "mecab_option": option}}
    code = hub_arguments(settings, "'a/b'", folder)
    found = eval(f"dict({code})", {"hf_hub_download": lambda name, file: f"HUB/{file}" if name == "a/b" else None})
    place = f"{folder}/" if folder else ""
    assert shlex.split(found["mecab_kwargs"]["mecab_option"]) == shlex.split(expected.format(place))
    assert found["mecab_kwargs"]["mecab_dic"] == "ipadic" and found.get("subfolder", "") == folder
    assert hub_arguments({"mecab_kwargs": {"mecab_option": "-b 9"}}) == "" == hub_arguments({})
