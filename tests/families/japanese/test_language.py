"""`TERAKOYA_LANG=ja`: messages and help in Japanese."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import call
from documented_commands import verbs
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from selection import at_night
from small_store import rewrite_store_json
from tool_modules import load_tool
from toy import make_store

from terakoya import log
from terakoya.plugins import registry
from terakoya.training.screen import StepTable, progress_bar, step_cells, validation_lines
from terakoya_contract.toy import make_tokenizer
from terakoya_japanese.catalogue import PLACEHOLDER, Entry, read_catalogue, write_catalogue
from terakoya_japanese.lines import wrap
from terakoya_japanese.translate import Translator, translator
from terakoya_pipeline.settings import read_pipeline
from terakoya_planning import choosing
from terakoya_planning.choosing import Machine
from terakoya_planning.devices import find_device

ROOT = Path(__file__).resolve().parents[3]
KANA = re.compile("[ぁ-んァ-ヶ一-龠]")
VALUES = {"loss": 2.5, "generator_loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 12345.0}


@pytest.fixture(autouse=True)
def english_afterwards() -> Iterator[None]:
    yield
    log.translate_with(None)


@pytest.fixture
def japanese(monkeypatch: pytest.MonkeyPatch) -> Translator:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    log.translate_with(translator(), wrap)
    return translator()


def test_the_catalogue_fits_the_code() -> None:
    """No entry whose English is gone, equal placeholders, no pattern that fits everything, no text without Japanese."""
    catalogue = load_tool("catalogue")
    entries, code = read_catalogue(catalogue.CATALOGUE), list(catalogue.texts())
    assert catalogue.faults(entries, code) == [], "python tools/catalogue.py --update removes what is gone"
    counts = Counter(text.kind for text in code)
    assert counts["help"] > 200 and counts["meaning"] > 500 and counts["shown"] > 1000
    for kind, texts in catalogue.missing(entries, code).items():
        assert texts == [], f"{kind}: python tools/catalogue.py --update adds entries for new texts, to be translated"
    stale, wrong = Entry("no such text here", "ない"), Entry("{out}: is not empty", "空")
    told = "\n".join(catalogue.faults([stale, wrong], code))
    assert "not in the code any more: 'no such text here'" in told and "other placeholders" in told


def test_the_tool_reads_texts_as_the_translator_does() -> None:
    catalogue = load_tool("catalogue")
    code = '''
def command(out: Annotated[Path, Option(help="The folder.")]) -> None:
    """Do it.

    And more
    of it.
    """
    raise UserError(f"{out}: expected {len(names):,} names" + nearest(name, known))
    log.warning("%s of %.1f %% is lost", self.store, share)
    print("for programs")
    console().print(Text("import terakoya"))

def find_problems(parameters):
    yield f"{key}: is too large"
    return [f"{key}: is new" if wide else "it is narrow"]

def describe(answer):
    answer.problems.append(f"has no {file}")
    Finding("GPU", "error", "there is no driver")
    return f"{key} is wide"
'''
    found = {(text.kind, text.text) for text in catalogue.texts_of(code, "core/terakoya/commands/x.py")}
    assert {("other", "for programs"), ("other", "import terakoya")} <= found, "never translated"
    assert {("other", "{key} is wide"), ("other", "GPU")} <= found, "not known to be messages"
    assert {
        ("help", "The folder."), ("help", "Do it."), ("help", "And more of it."),
        ("shown", "{out}: expected {names} names{nearest}"), ("shown", "{store} of {share} % is lost"),
        ("shown", "{key}: is too large"), ("shown", "{key}: is new"), ("shown", "it is narrow"),
        ("shown", "has no {file}"), ("shown", "there is no driver"),
    } <= found  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "told"), [("help", "1 of help"), ("meaning", "1 of keys"), ("shown", "1 other message")]
)
def test_a_text_without_japanese_fails_the_check(
    kind: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = load_tool("catalogue")
    code = [catalogue.Text("{out}: is not empty", "a.py", "shown"), catalogue.Text("{out}: is new", "b.py", kind)]
    known = Entry("{out}: is not empty", "{out}: 空ではありません")
    monkeypatch.setattr(catalogue, "texts", lambda: iter(code))
    monkeypatch.setattr(catalogue, "read_catalogue", lambda file: [known])
    monkeypatch.setattr("sys.argv", ["catalogue.py", "--check"])
    with pytest.raises(SystemExit) as done:
        catalogue.main()
    out = capsys.readouterr().out
    assert done.value.code == 1 and f"{kind} without a translation, b.py: '{{out}}: is new'" in out and told in out
    code.pop()
    with pytest.raises(SystemExit) as done:
        catalogue.main()
    assert done.value.code == 0


def test_an_update_adds_and_removes_entries() -> None:
    catalogue = load_tool("catalogue")
    code = [
        catalogue.Text("second", "b.py", "shown"), catalogue.Text("first {x}", "a.py", "shown"),
        catalogue.Text("a new option", "b.py", "help"), catalogue.Text("a new key", "keys.md", "meaning"),
        catalogue.Text("learning_rate", "c.py", "other"), catalogue.Text("a new message", "a.py", "shown"),
    ]  # fmt: skip
    kept = [Entry("second", "二"), Entry("first {n}", "一 {n}"), Entry("learning rate", "学習率")]
    updated = catalogue.update([Entry("gone", "無"), *kept], code)
    assert updated[:3] == kept
    assert {each.source for each in updated[3:]} == {"a new option", "a new key", "a new message"}
    assert catalogue.update(updated, code) == updated
    assert "no translation: 'a new key'" in catalogue.faults(updated, code)
    assert Translator(updated)("a new key") == "a new key"


def test_messages_of_several_lines_are_found_one_by_one(japanese: Translator) -> None:
    """Also where the first line would fit all of them; what the user wrote, names and keys stay."""
    text = 'a.json: precision: expected an integer, got "x"\nb.json: k: expected a list, got "12 M parameters"'
    assert (
        japanese(text)
        == 'a.json: precision: 整数が必要ですが、"x" です\nb.json: k: リストが必要ですが、"12 M parameters" です'
    )
    told = "a.json: architecture: num_attention_heads: expected a divisor of hidden_size 256, got 3"
    assert japanese(told).startswith("a.json: architecture: num_attention_heads: hidden_size 256 の"), (
        "the longest entry"
    )
    assert japanese("  num_train_epochs: epochs") == "  num_train_epochs: epochs"
    assert japanese("masked bits per character") == "マスクのビット/文字", "a column for masked_bits_per_character"


def test_catalogues_are_po_files(tmp_path: Path) -> None:
    entries = [Entry('a "b"\n{c}\\', "「{c}」\n\t"), Entry("d", "で")]
    write_catalogue(tmp_path / "x.po", entries)
    assert read_catalogue(tmp_path / "x.po") == entries
    text = (
        '#~ msgid "old"\n\nmsgid ""\nmsgstr ""\n"Language: ja\\n"\n\n# note\nmsgid ""\n"two "\n"lines"\nmsgstr "二行"\n'
    )
    (tmp_path / "y.po").write_text(text, encoding="utf-8")
    assert read_catalogue(tmp_path / "y.po") == [Entry("two lines", "二行")]


FOUND = """
wrote report.html: 2 runs, 91 kB
report.html を書きました: 2 個のラン、91 kB

a.json: precision: expected "fp32", "bf16" or "fp8", got "float16"
a.json: precision: "fp32"、"bf16" か "fp8" が必要ですが、"float16" です

a.json: x.y: expected greater than 0, got 0
a.json: x.y: 0 より大きい値が必要ですが、0 です

a.json: max_steps: expected an integer, got "hundred"
a.json: max_steps: 整数が必要ですが、"hundred" です

terakoya train: --max-steps: no such option; give --set max_steps=100 instead
terakoya train: --max-steps: そのようなオプションはありません。代わりに --set max_steps=100 としてください

c.html: expected a file name ending in .jsonl, .txt; extract its text first, for example with pdftotext
c.html: ファイル名の終わりは .jsonl, .txt のどれかが必要です。先に文章を取り出してください (例: pdftotext)

run: metrics.jsonl has 12 records
run: metrics.jsonl に 12 件の記録

9 s ago
9 秒前

3 h 20 min ago
3 時間 20 分前

time: 11.7 hours on 8 x h100, by the formulas for the fastest supported layout below; not a measurement
時間: 8 x h100 で 11.7 時間(下の表の、対応している最も速い分担の式による。測定ではありません)

bert.json: optimizer.learning_rate: expected a number, got "x"
bert.json: optimizer.learning_rate: 数が必要ですが、"x" です

a.json: b.c: unknown key; did you mean "d" or "e"?
a.json: b.c: 知らないキーです。"d" か "e" ではありませんか?

x: expected a tokenizer's folder, got a run; the tokenizer is in each of x/checkpoints
x: トークナイザのフォルダが必要ですが、ランです。トークナイザは x/checkpoints のそれぞれにあります

wiki: expected a finished token store, got no such folder; make one with `terakoya prepare`
wiki: 完成したトークンストアが必要ですが、そのようなフォルダはありません。`terakoya prepare` で作れます

exported run/step-2 (step 2) to out
run/step-2 (ステップ 2) を out に書き出しました

exported run/step-2 to out
run/step-2 を out に書き出しました

30 steps, about 61,324 tokens
30 ステップ、およそ 61,324 トークン

2.5000, -0.1000 in 1 step
2.5000、1 ステップで -0.1000

out: 1 document, 20 sequences, 300 tokens; 0 documents rejected
out: 1 文書、20 系列、300 トークン。リジェクト 0 文書

3 processes on gpu-1
gpu-1 に 3 プロセス

warning: the last 3 records of metrics.jsonl are missing
警告: metrics.jsonl の最後の 3 件の記録がありません

next: terakoya try out 'the last words'
次は: terakoya try out 'the last words'

/x: No such file or directory
/x: そのようなファイルやフォルダはありません

b: was prepared with another tokenizer than a (2 ids mean something else: id 5 is "の" in a, "は" in b; id 6 is "x y" in a, no piece in b); prepare it with the same
b: a とは別のトークナイザで準備されています (2 個の ID の意味が違います: ID 5 は a では "の"、b では "は"。ID 6 は a では "x y"、b ではピースなし)。同じもので準備してください

a.json: data.train: expected a list, got "work/store"; write ["work/store"]
a.json: data.train: リストが必要ですが、"work/store" です。["work/store"] と書いてください

prepare: 65 KB / 144 KB (45%) done after 22 s, about 40 s left
prepare: 22 秒で 65 KB / 144 KB (45%)、残り約 40 秒

batch_size: the table is for 2 nodes, but the run has 1 process on a; a table that keeps the global batch of 4: {"-1": 4}
batch_size: 表は 2 ノードのものですが、ランには a に 1 プロセスがあります。グローバルバッチ 4 を保つ表: {"-1": 4}

m: has weights without a place in the model: a, b; allow it with "start_from": {"folder": ..., "drop_heads": true}
m: モデルに入る場所のない重みがあります: a, b。"start_from": {"folder": ..., "drop_heads": true} で許せます

launch slurm: time: expected a time in the format of sbatch, such as 24:00:00 or 3-00:00:00, got "x"
launch slurm: time: sbatch の形式の時間 (24:00:00、3-00:00:00 など) が必要ですが、"x" です

m: has no a, b; they are randomly initialised
m: a, b がありません。ランダムに初期化します

r/step-2: 2 rows in 3 steps
r/step-2: 2 行、3 ステップです

gpu-2: its clock is 40 s behind that of gpu-1: start a time service on both, such as chrony
gpu-2: 時計が gpu-1 より 40 秒遅れています。両方で chrony などの時刻合わせを動かしてください

nothing: expected a run, got no such folder; there is no folder a/b
nothing: ランが必要ですが、そのようなフォルダはありません。フォルダ a/b がありません

step 2: the loss 1.6e+07 is a spike: 8.35 is usual, 33.4 was the limit; terakoya report r names its documents
ステップ 2: 損失 1.6e+07 はスパイクです (通常は 8.35、上限は 33.4)。文書は terakoya report r でわかります

1, the last in step 158: the gradient norm 5.51 is a spike: 0.7253 is usual, 1.56 was the limit; the step took rows 2 to 7 of the training order (2 to 7 of s), which hold documents 0 ("東京"), 2 and 9 more of s
1、最後はステップ 158: 勾配ノルム 5.51 はスパイクです (通常は 0.7253、上限は 1.56)。使ったのは学習順の 2〜7 行 (s の 2〜7 行目)にある s の文書 0 ("東京"), 2 ほか 9 件

クリーニング: dropped 1,200 of 5,260 documents and held out 27, as work/store.clean says
クリーニング: work/store.clean のとおり、1,200 / 5,260 文書を除き、27 文書を取り分けました

rejected 1,017 of 2,247 documents (1,014 bad encoding, 3 missing field); listed in s/rejects.jsonl
2,247 文書のうち 1,017 (文字コードの誤り 1,014、キーがない 3) をリジェクトしました。一覧は s/rejects.jsonl にあります

"東京は日本の首都です。": expected a [MASK] to fill in, found none
"東京は日本の首都です。": 埋める [MASK] が必要ですが、ありません

next: terakoya train r/parameters.json --out r, which sets damaged checkpoints aside and continues from the newest whole one
次は: terakoya train r/parameters.json --out r (壊れたチェックポイントをよけて、残った最新のものから続けます)

measured on this machine, in steps of models of 1 and 2 of 3 layers, 1 of 16 rows of a micro-batch
このマシンでステップを進めて測定: 3 層のうち 1 層と 2 層のモデル、マイクロバッチは 16 行のうち 1 行

work/tokenizer was made in 1.5 s
work/tokenizer を 1.5 秒で作りました

loss or gradients are not finite, and no weight has changed; it took rows 2 to 7 of the training order (2 to 7 of s), which hold documents 0 ("東京"), 2 and 9 more of s
損失か勾配が有限ではないため、重みを変えていません。使ったのは学習順の 2〜7 行 (s の 2〜7 行目)にある s の文書 0 ("東京"), 2 ほか 9 件
""".strip().split("\n\n")  # noqa: E501
"""A text as the program makes it, and what a user is shown."""

UNKNOWN = """
wrote the story of a dog
a step in the right direction
The quick brown fox.
loss of words
work/step
{"kind": "step", "text": "saved work/run"}
[{"step": 1}]
{"text": "a.json: b: expected a number, got 1"}
[{"text": "a.json: b: expected a number, got 1"}]
東京は日本の首都です。
80 columns left over
""".strip().split("\n")


@pytest.mark.parametrize("pair", FOUND)
def test_finished_texts_are_found(pair: str, japanese: Translator) -> None:
    english, shown = pair.split("\n")
    assert japanese(english) == shown


def test_the_charts_of_every_bundled_objective_have_japanese_titles(japanese: Translator) -> None:
    objectives = [registry().component("objectives", name) for name in registry().names("objectives")]
    metrics = {metric for objective in objectives for metric in objective().terms()} - {"discriminator_scores"}
    metrics |= {f"discriminator_{score}" for score in ("accuracy", "precision", "recall", "auc")} | {"replaced_rate"}
    assert len(metrics) > 15 and not [each for each in metrics if japanese(each.replace("_", " ")).isascii()]


def test_lines_are_found_one_by_one(japanese: Translator) -> None:
    assert japanese("some title\n  the run's folder") == "some title\n  ランのフォルダ"


@pytest.mark.parametrize("text", ["", " ", *UNKNOWN])
def test_other_texts_stay(text: str, japanese: Translator) -> None:
    assert japanese(text) == text


@pytest.mark.nightly
def test_every_entry_finds_itself(japanese: Translator) -> None:
    """Each pattern, filled in with single words, gives its own translation or that of a longer one that fits, too."""
    wrong = []
    for entry in read_catalogue(ROOT / "plugins/terakoya_japanese/ja.po"):
        values = {name: f"v{number}" for number, name in enumerate(PLACEHOLDER.findall(entry.source))}
        if re.search(r"\}\{|\{[a-z_0-9]*\}(?=\()", entry.source):
            continue  # what directly follows a value begins with a sign
        shown = japanese(PLACEHOLDER.sub(lambda place, values=values: values[place[1]], entry.source))
        if not KANA.search(shown) and KANA.search(entry.translation):
            wrong.append(entry.source)
        lost = [value for value in values.values() if value not in shown]
        if lost:
            wrong.append(f"{entry.source}: {lost}")
    assert wrong == []


@pytest.mark.parametrize(
    ("verb", "width"),
    at_night(
        [*((verb, 80) for verb in ("", *verbs())), *itertools.product(("", "init"), (60, 120))],
        always=[("", 60), ("train", 80), ("init", 120)],
    ),
)
def test_help_is_japanese_in_its_columns(
    verb: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    code, out, _ = call(capsys, *verb.split(), "--help")
    assert code == 0 and out.startswith(f"使い方: terakoya {verb}".strip())
    body = out.partition("\n  例:\n")[0]
    assert "<list[" not in body, out
    assert not re.search(" (the|of|and|is|are|with|this) ", body), out
    assert max(cell_len(line) for line in body.splitlines() if KANA.search(line)) <= width, out


def test_help_is_english_again_without_a_language(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    english = call(capsys, "train", "--help")
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    assert call(capsys, "train", "--help") != english
    monkeypatch.delenv("TERAKOYA_LANG")
    assert call(capsys, "train", "--help") == english


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "a.json", "--out", "b", "--processes", "x"], "terakoya train: --processes: 整数が必要です"),
        (["train", "a.json", "--out", "b", "--processes", "0"], "terakoya train: --processes: 1 以上の数が必要です"),
        (["init", "--goal", "best"], "terakoya init: --goal: 'try', 'model' のどれかが必要ですが、best です"),
        (["parameters", "set"], "terakoya parameters: set というコマンドはありません"),
        (
            ["store", "info", "--frob"],
            "--frob: そのようなオプションはありません。オプションは `terakoya store info --help` で",
        ),
        (["trian"], "trian というコマンドはありません。train ではありませんか?"),
        (["status"], "terakoya status: RUN... が必要です: 一つ以上のランのフォルダ、または s3://bucket/run などの"),
        (["train", "bert_base", "--otu", "x"], "--otu: そのようなオプションはありません。--out ではありませんか?"),
        (["save", "a", "b"], "terakoya save: 余分な引数があります: b"),
    ],
)
def test_wrong_options_are_answered_in_japanese(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    code, _, err = call(capsys, *arguments)
    assert code == 2 and err.startswith("エラー: ") and told in err


def test_another_language_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    assert call(capsys, "parameters", "list")[1].startswith("名前 ")
    monkeypatch.setenv("TERAKOYA_LANG", "fr")
    code, _, err = call(capsys, "parameters", "list")
    assert code == 2 and "TERAKOYA_LANG: there is no language fr; known: " in err and '"ja"' in err
    monkeypatch.setenv("TERAKOYA_LANG", "")
    monkeypatch.setenv("LANG", "ja_JP.UTF-8")
    assert call(capsys, "parameters", "list")[1].startswith("name ")


def test_a_missing_family_is_named_in_japanese(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    code, _, err = call(capsys, "--without", "hub", "upload", "model")
    assert code == 2 and "ファミリー hub のものですが" in err
    assert err.endswith("\n  --without で除かれ、持っているかもしれないもの: terakoya_hub\n")


def test_what_programs_read_stays_english(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    english = call(capsys, "parameters", "list", "--json")[1]
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    assert call(capsys, "parameters", "list", "--json")[1] == english and json.loads(english)
    shown = call(capsys, "parameters", "list")[1]
    assert shown.startswith("名前") and "全体を試すための 4 層の BERT" in shown


def test_consoles_translate_the_program_and_nothing_else(
    capsys: pytest.CaptureFixture[str], japanese: Translator
) -> None:
    console = log.new_console(width=80)
    console.print(Text("not finite"), "not finite")
    grid = Table("step", "loss", box=None)
    grid.add_row("loss", "step")
    console.print(grid)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not finite 有限ではない", "a model's words stay"
    assert lines[1].split() == ["ステップ", "損失"] and lines[2].split() == ["loss", "step"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_of_a_run_is_aligned(width: int, japanese: Translator) -> None:
    table, lines = StepTable(), []
    for number in (1, 2):
        header, row = table.lines(step_cells(VALUES, step=f"{number * 100:,}"), width)
        lines += [header, row] if header else [row]
    assert "ステップ" in lines[0] and "学習率" in lines[0] and len({cell_len(line) for line in lines}) == 1
    checks = validation_lines(5, {"work/ウィキ": {"loss": 2.0}, "work/books": {"loss": 1.0}}, width)
    assert checks[0].startswith("ステップ 5  検証  ウィキ  損失 2.0000") and cell_len(checks[0]) == cell_len(checks[1])
    parts = [log.translated(part) for part in ("5/9", "0:00:10 left", "next save at 15,000")]
    assert parts[1:] == ["残り 0:00:10", "次の保存 15,000"] and cell_len(progress_bar(0.5, parts, width)) <= width


@given(st.text("あ、。（）ab %1-", max_size=60), st.integers(10, 40))
@settings(max_examples=50)
def test_lines_keep_every_sign_and_their_width(text: str, width: int) -> None:
    lines = list(wrap(text, width))
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    longest = max([cell_len(word) for word in re.findall(r"[!-~、。（）あ]+", text)], default=0)
    assert all(cell_len(line) <= width or cell_len(line) <= longest for line in lines)
    assert " " in text or all(line[0] not in "、。）%" for line in lines[1:])


def test_init_writes_its_reasons_in_japanese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choosing, "find_machine", lambda gpu, gpus, measure: Machine(find_device("cpu"), 1, "fp32"))
    text = "東京は日本の首都です。今日はよい天気だったので、川の近くを歩きました。"
    Path("corpus.txt").write_text("".join(f"{text}{number}\n" for number in range(300)), encoding="utf-8")
    code, out, err = call(capsys, "init", "corpus.txt", "--like", "bert", "--goal", "try", "--hours", "1")
    assert code == 0 and err.endswith("次は: terakoya run pipeline.json\n")
    assert "pipeline.json: 書きました。数字ごとの理由も書いてあります" in out and "文字、日本語 (日本語の文字 " in out
    written = Path("pipeline.json").read_text(encoding="utf-8")
    comments = [line.strip() for line in written.splitlines() if line.strip().startswith("//")]
    assert len(comments) > 10 and not re.search(" (the|of|and|is|are|with|at) ", "\n".join(comments)), comments
    precision = "// このマシンの CPU では fp32。別のマシンでは、そのマシンで最も速いものになります。"
    assert "// MeCab の単語を、ピースに分けたもの。" in comments and precision in comments
    assert max(cell_len(line) for line in written.splitlines()) <= 120, "a comment is as wide as its columns"
    assert read_pipeline(Path("pipeline.json")).corpus == ("corpus.txt",)


def test_meanings_of_keys_are_japanese(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    code, out, _ = call(capsys, "parameters", "show", "timeout_seconds")
    title, meaning, *rest = out.splitlines()
    assert code == 0 and title == "parallel.timeout_seconds  (パラメータのファイル)"
    assert meaning == "  ほかのプロセスを待つ時間。過ぎるとランは失敗します。"
    assert rest == ["  型: integer above 0", "  単位: 秒", "  既定値: 600"]
    code, out, _ = call(capsys, "plugins", "show", "early_stopping")
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert code == 0 and all(KANA.search(row) for row in rows.values())
    assert "(検証の回数)" in rows["patience"] and rows["patience"].endswith("改善なしに続く検証の回数。")


def test_names_of_folders_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be called like a word of the program."""
    make_tokenizer(tmp_path / "store")
    (tmp_path / "c.txt").write_text("kami toto\n")
    records = [
        {"kind": "start", "time": 1},
        {"kind": "step", "step": 3, "loss": 2.5, "time": 2},
        {"kind": "validation", "step": 3, "store": "store", "loss": 2.5, "time": 2},
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    code, out, err = call(capsys, "tokenizer", "report", "store", "--corpus", "c.txt")
    assert code == 0 and out.splitlines()[0].strip() == "store", err
    out = call(capsys, "status", "run")[1]
    assert "ステップ 3  store: 損失 2.5000" in out


def test_labels_of_a_store_are_japanese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", documents=2, seed=0)
    rewrite_store_json(store, options={"field": "text", "clean: dropped by length": "3"})
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    code, out, _ = call(capsys, "store", "info", str(store))
    labels = [line[1:].split("  ")[0].rstrip() for line in out.splitlines()]
    assert code == 0 and "オプション field" in labels and "オプション clean: length が除いた文書" in labels
    assert all(KANA.search(label) for label in labels)


def test_reasons_of_rejects_are_japanese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "今日は良い天気です。明日も良い天気です。"}\n{"text": ""}\n', encoding="utf-8")
    sizes = ("--vocab-size", "60", "--processes", "1")
    code, out, _ = call(
        capsys, "tokenizer", "train", str(corpus), "--type", "mecab_wordpiece", "--out", f"{tmp_path}/t", *sizes
    )
    assert code == 0 and "リジェクト 1 (空の文書)" in out
