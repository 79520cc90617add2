"""Mistakes that real users make, one a row: the command, and the words that say where it is and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import call, exit_code, refusal
from toy import make_store, parameters

from terakoya.commands.main import DEBUG_VARIABLE
from terakoya.config.parameters import Parameters
from terakoya.errors import Diverged, Stopped, TemporaryFailure, UserError
from terakoya.training import setup
from terakoya_contract.toy import make_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, its tokenizer, parameter files, corpora and a folder that looks like a run."""
    folder = tmp_path_factory.mktemp("mistakes")
    store = make_store(folder / "data", documents=20, seed=1)
    base = parameters(store, max_steps=4)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "parameters.json").write_text(json.dumps(base))

    def write(name: str, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")

    write("p.json", base)
    write("lr.json", {**base, "learning_rate": 1e-3})
    write("hf.json", {**base, "num_train_epochs": 1, "warmup": 3, "output_dir": "x"})
    write("commas.json", json.dumps(base)[:-1] + ",,\n}")
    write("axolotl.yaml", "base_model: x\nsequence_len: 64\n")
    write("pipeline.json", {"corpus": "c.jsonl", "tokenizer_folder": "t", "store": "s", "parameters": "p.json",
                            "run": "r", "export": "e"})  # fmt: skip
    write("config.json", {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 9})
    write("array.json", [{"text": "a"}, {"text": "b"}])
    write("pretty.jsonl", '{\n "text": "a"\n}\n')
    write("other.jsonl", '{"content": "a"}\n')
    write("empty.jsonl", "")
    write("page.html", "<html></html>")
    write("more.json", '{"max_steps": 1}\n}')
    write("twice.json", '{"max_steps": 1, "max_steps": 2}')
    write("blank.txt", "\n\n\n")
    write("bad.jsonl", '{"text": "a"}\n{"text":\n{"text": "b"}\n')
    write("headless.csv", "a,b\nc,d\n")
    (folder / "page.pdf").write_bytes(b"%PDF-1.4 x")
    make_tokenizer(folder / "hf")
    (folder / "tok").mkdir()
    write("tok/tokenizer_config.json", {})
    (folder / "words").mkdir()
    write("words/terakoya.json", {"type": "byte_bpe", "settings": {"vocab_size": 300}})
    (folder / "korean.txt").write_bytes("한국어 문장입니다.\n".encode("euc-kr"))
    return folder


PRESET = Path(__file__).resolve().parents[3] / "parameters" / "bert_base.json"
TRAIN = "train p.json --out r"
DRY = f"{TRAIN} --dry-run"
PREPARE = "--tokenizer data/tokenizer --out s"
READ = "--tokenizer hf --processes 1 --out kept"
MISTAKES = [
    # files that are missing or of another kind
    ("train q.json --out r", "q.json: no such file (did you mean p.json"),
    ("train data/store --out r", "data/store: expected a parameter file, got a token store; name it in data.train of"),
    ("train tok --out r", "got a tokenizer; make a token store with it: terakoya prepare CORPUS --tokenizer tok"),
    ("train blank.txt --out r", "got a corpus; make a token store of it: terakoya prepare blank.txt --tokenizer TOK"),
    ("train run --out r", "run: expected a file, got a run; did you mean run/parameters.json?"),
    ("train pipeline.json --out r", "got a pipeline file; start it with `terakoya run pipeline.json`"),
    ("run p.json", "got a parameter file; start it with `terakoya train p.json --out RUN`"),
    ("train config.json --out r", "got the configuration of a Transformers model; a run describes the model in"),
    ("train axolotl.yaml --out r", "got a configuration of axolotl; begin with a preset of parameters/"),
    ("train commas.json --out r", ":1:", "not valid JSON: a comma with nothing before it; remove it"),
    ("train more.json --out r", "more.json:2:1: not valid JSON: } after the end of the JSON value; remove it"),
    ("train twice.json --out r", 'twice.json:1:18: the key "max_steps" is given twice', "keep one"),
    (f"train {PRESET} --out r", "work/store: expected a finished token store, got no such", "terakoya prepare"),
    # keys
    (f"{TRAIN} --set lr=1", 'lr: unknown key; that is "optimizer.learning_rate" here'),
    (f"{TRAIN} --set vocab_size=9", "choose it with `terakoya tokenizer train --vocab-size N`"),
    (f"{TRAIN} --set per_device_train_batch_size=8", 'that is "batch_size" or "micro_batch_size" here'),
    (f"{TRAIN} --set model_name_or_path=x", 'that is "start_from" here'),
    (f"{TRAIN} --set optimizer.type=adam", 'optimizer.type: optimizer adam: not installed; did you mean "adamw"?'),
    (f"{TRAIN} --set data.validation=[\"x\"] --set data.split=[9,1]", "p.json with --set: data: split: takes"),
    (f"{TRAIN} --set data.validation=[\"lost\"]", "lost: no such folder; prepare other text for it, or let", "split=["),
    (f'{TRAIN} --set events=[{{"type":"ema"}}]', 'expected an object, got a list; write {"ema": {}}'),
    (f"{TRAIN} --set epochs=1", "expected exactly one of", "got max_steps, epochs; set the others to null"),
    (f"{TRAIN} --set max_steps=null", "max_steps, max_tokens, epochs, got none; give one, such as \"max_steps\""),
    (f"{TRAIN} --set optimizer.learning_rate=1e-3x", 'learning_rate: expected a number, got "1e-3x"'),
    (f"{TRAIN} --set optimizer.learning_rate=inf", 'learning_rate: expected a number, got "inf"'),
    (f"{TRAIN} --set micro_batch_size=0", "micro_batch_size: expected greater than 0, got 0"),
    (f"{TRAIN} --set checkpoint.save_steps=0", "checkpoint.save_steps: expected greater than 0, got 0"),
    (f"{TRAIN} --set parallel.zero_stage=4", "parallel.zero_stage: expected less than or equal to 3, got 4"),
    (f"{TRAIN} --set attention=flash_attention_2", 'attention: expected "auto", "sdpa", "flash" or "eager", got'),
    (f"{TRAIN} --set parallel.engine=fsdp2", 'expected the name of an engine, got "fsdp2"; did you mean "fsdp"?'),
    (f'{TRAIN} --set trackers=[{{"type":"aim"}}]', "trackers.0.type: tracker aim: not installed; known: "),
    (f"{TRAIN} --set data.sequence_length=9999", "data.sequence_length: expected at most 32, the maximum of the arch"),
    (f"{TRAIN} --set parallel.tp_size=2", "2 processes work on the same rows, but the run has 1 process"),
    # sizes, and what does not go together
    (f"{TRAIN} --set architecture.num_attention_heads=3", "expected a divisor of hidden_size 16, got 3; the nearest"),
    (f"{DRY} --set architecture.hidden_act=geluu", 'hidden_act: expected a value that Bert takes, such as "gelu", got'),
    (f'{DRY} --set objective={{"type":"causal_lm"}}', "choose an architecture.type that has it: gemma3_text, gpt2"),
    (f'{DRY} --set batch_size={{"0":2,"1":2}}', "the table is for 2 nodes, but the run has 1 process", '{"-1": 4}'),
    (f"{DRY} --set objective.layout=lines", "expected a store of lines", "prepare the corpus with --unit line"),
    (f"{DRY} --set start_from=data/tokenizer", "start_from: data/tokenizer: expected a Transformers folder, found no"),
    (f"{DRY} --set start_from=school/bert", "school/bert is not a folder", "hf download school/bert"),
    (f"{DRY} --set precision=fp8", 'precision: "fp8" needs a GPU', 'got cpu; use "bf16"'),
    ("train lr.json --out r", 'lr.json: learning_rate: unknown key; that is "optimizer.learning_rate" here'),
    ("train hf.json --out r", 'num_train_epochs: unknown key; that is "epochs" here', '"schedule.warmup_steps"'),
    (f"{TRAIN} --set optimizer.lr=1", '--set: optimizer.lr: unknown key; that is "optimizer.learning_rate" here'),
    (f"{TRAIN} --set architecture.type=gpt2 --set architecture.n_embd=8", 'that is "architecture.hidden_size" here'),
    (f"{TRAIN} --set max_steps=hundred", '--set: max_steps: expected an integer, got "hundred"'),
    (f"{TRAIN} --set trackers=[\"wandb\"]", 'write {"type": "wandb"}'),
    (f"{TRAIN} --set data.train=data/stroe", 'expected a list, got "data/stroe"; write ["data/store"]'),
    (f"{TRAIN} --set data.validation=data/stor", 'expected a list, got "data/stor"; write ["data/store"]'),
    (f"{TRAIN} --set trackers=tensorboard", 'expected a list, got "tensorboard"; write ["tensorboard"]'),
    (f"{TRAIN} --set data.train=data/store", 'data.train: expected a list, got "data/store"; write ["data/store"]'),
    (f"{TRAIN} --set data.train=[data/stroe]", 'got "[data/stroe]"; write \'data.train=["data/store"]\'\n'),
    (f"{TRAIN} --set data.train=[data/store,'other/store']", """write 'data.train=["data/store", "other/store"]'\n"""),
    # options
    ("train p.json", "terakoya train: expected --out: The run's folder"),
    ("trian p.json", "No such command 'trian'. Did you mean 'train'?"),
    ("export run --out m --format tflite", 'exporter tflite: not installed; known: "gguf", "huggingface"'),
    ("import gguf run --out r", 'importer gguf: not installed; known: "deepspeed"'),
    ("report data/store", "expected the folder of a run, got a token store"),
    ("report run run", "expected --out, the HTML file to write"),
    ("estimate p.json --device toaster", 'device "toaster": not known; known: "a10", "a100"'),
    ("estimate p.json --device rtx4090", 'device "rtx4090": not known; did you mean "rtx-4090"?'),
    (f"{TRAIN} --set validation_steps=5", 'validation_steps: unknown key; that is "evaluation.steps" here'),
    (f"estimate {PRESET}", "there is no store at work/store to read the model's vocabulary from", "--vocab-size 32768"),
    ("launch slurm p.json --out r --nodes 4 --time 1:00:00", "leave --nodes out, or give {\"*\": ROWS}"),
    (f"{TRAIN} --allow-change learning_rate", '--allow-change learning_rate: unknown key; that is "optimizer.'),
    ("plugins show brt", 'no component is called "brt"; did you mean "bert"'),
    # corpora
    (f"prepare array.json {PREPARE}", "it is one JSON array: write a line for each document: jq -c '.[]'"),
    (f"prepare page.html {PREPARE}", "extract its text first"),
    (f"prepare page.pdf {PREPARE}", "extract its text first, for example with pdftotext"),
    (f"prepare missing.jsonl {PREPARE}", "missing.jsonl: no such file"),
    ("prepare other.jsonl --tokenizer data/tokeniser --out s", "no such folder (did you mean data/tokenizer?)"),
    (f"prepare empty.jsonl {READ}1", "expected at least one document, the corpus has none; give files that hold text"),
    (f"prepare blank.txt {READ}2", "expected at least one document, the corpus has none; give files that hold text"),
    (f"prepare other.jsonl {READ}3", "other.jsonl, line 1", "choose the key that holds the text with --field"),
    (f"prepare bad.jsonl {READ}4", "1 of 3 documents (1 bad JSON)", "bad.jsonl, line 2", "or allow more"),
    (f"prepare korean.txt {READ}5", "name the encoding of files whose own is not", "iconv -f"),
    (f"prepare bad.jsonl {READ} --encoding japanese", 'euc-jp, iso-2022-jp or utf-16, got "japanese"'),
    (f"prepare headless.csv {READ}6", 'expected a column "text", got none; known: "a", "b"', "--field"),
    ("tokenizer train other.jsonl --out t", "--type: expected the kind of tokenizer, for example --type mecab_word"),
    ("tokenizer train other.jsonl --type wordpiece --out t", 'did you mean "mecab_wordpiece"?'),
    ("tokenizer train bad.jsonl --type mecab_wordpiece --vocab-size 8k --out t", "--vocab-size: expected an integer"),
    ("tokenizer train bad.jsonl --type mecab_wordpiece --vocabsize 8 --out t", 'did you mean "vocab_size"?'),
    (
        "tokenizer train other.jsonl --field content --type byte_bpe --vocab-size 3 --processes 1 --out t",
        "vocab_size: expected at least 257 for the special tokens and the 256 bytes, got 3; raise vocab_size",
    ),
    (f"prepare wikimedia/wikipedia {PREPARE}", "hf://datasets/wikimedia/wikipedia@REVISION/"),
    (f"prepare data/store {PREPARE}", "data/store: expected a corpus, got a token store"),
    ("prepare tok --tokenizer tok --out s", "a tokenizer; it is named after the text: terakoya prepare CORPUS --tok"),
    ("tokenizer train empty.jsonl --type mecab_wordpiece --out t", "got an empty corpus; give files that hold text"),
    ("tokenizer train other.jsonl --type byte_bpe --vocab-size 300 --out words", "with these settings; use it"),
    (
        "tokenizer train other.jsonl --type mecab_wordpiece --vocab-size 400 --out words",
        'with other settings (type "byte_bpe" -> "mecab_wordpiece", vocab_size 300 -> 400); use it',
    ),
    ("tokenizer train korean.txt --type mecab_wordpiece --out t", "got 1 of 1 documents (1 bad encoding)", "iconv"),
    ("tokenizer train pretty.jsonl --type byte_bpe --out t", "got 3 of 3 documents (3 bad JSON)", "jq -c . FILE"),
    ("tokenizer train other.jsonl --type byte_bpe --out t", "(1 missing field)", "--field"),
    # folders
    ("export nothing --out m", "nothing: expected a run or a checkpoint, got no such folder"),
    ("export data/store --out m", "found no checkpoint in a token store; `terakoya store info data/store`"),
    ("try run", "run: expected a run with a whole checkpoint, or a checkpoint; found no", "train it first"),
    ("upload run --name x", "run: expected a run with a whole checkpoint, or a checkpoint; found no"),
    ("try tok x", "found no config.json in a tokenizer; a model is trained first"),
    ("status data/store", "expected the folder of a run, got a token store"),
    ("store info run", "run: expected a finished token store, got a run; run/parameters.json names its stores"),
    ("store info data/stroe", "got no such folder (did you mean data/store?)"),
    ("prepare empty.jsonl --tokenizer data/store --out s", "a token store; its tokenizer is in data/store/tokenizer"),
    ("train p.json --out data/store", "expected a new folder or a run's, got a token store; choose another --out"),
    ("train p.json --out p.json", "p.json"),
    ("report run --out data", "expected an HTML file, got a folder; give --out data/report.html"),
    # addresses
    ("train p.json --out s3://b/run", "s3://b/run/writer.json: no access", "check the address and your credentials"),
    ("train p.json --out s3://b/run --dry-run", "s3://b/run: no access", "check the address and your credentials"),
    ("train p.json --out s3://b/run --work-folder s3://b/w", "expected a work folder of this machine, got an address"),
    ("train p.json --out other --work-folder w", "expected an address such as s3://bucket/run in --out, got other"),
    ("prepare other.jsonl --tokenizer data/tokenizer --out gs://b/s", "gs://b/s: expected the new store's folder"),
    ("tokenizer train other.jsonl --type byte_bpe --out s3://b/t", "s3://b/t: expected a new folder, got an address"),
    ("export run --out s3://b/m", "s3://b/m: expected a new folder, got an address"),
    ("store info s3://b/store", "s3://b/store/store.json: no access", "check the address and your credentials"),
    ("demo --out s3://b/d", "s3://b/d: expected the demo's folder, got an address"),
]  # fmt: skip

RESUME = "train p.json --out r --set max_steps=6"
RUN_MISTAKES = [
    # changed parameters, data and sizes
    (f"{RESUME} --set optimizer.learning_rate=0.5", "was 0.005, is 0.5", "r: the run was", "--allow-change optim"),
    (f"{RESUME} --set batch_size={{\"-1\":8}}", "64 rows were used in 4 steps of 16, but batch_size is now 8: keep"),
    (f"{RESUME} --set data.train=[\"other/store\"]", "the token stores are not the ones", "with --allow-change data\n"),
    (f"{RESUME} --set data.train=[\"other/store\"] --allow-change data.train", "continue with --allow-change data\n"),
    (f"{RESUME} --set data.train=[\"data/store\",\"other/store\"]", "are not the ones", "with --allow-change data\n"),
    (f"{RESUME} --set data.validation=[\"lost\"]", "lost: no such folder; prepare other text for it"),
    (f"{RESUME} --set architecture.hidden_size=32 --allow-change architecture", "a run cannot change the sizes of its"),
    (f"{RESUME} --set architecture.num_hidden_layers=3 --allow-change architecture", "has no tensor model.bert."),
    (f"{RESUME} --set objective.mlm_probability=0.5", "--allow-change objective.mlm_probability"),
    # checkpoints that are damaged or gone
    ("verify cut", "cut/checkpoints/step-00000004: state/optimizer-00000.safetensors: ", "and continues from the"),
    ("train p.json --out all", "none of them is whole", "step-00000004 is damaged", "--start-over"),
    ("export all --out m", "all: expected a run with a whole checkpoint", "step-00000002: damaged"),
    ("train p.json --out gone", "metrics.jsonl records a checkpoint of step 4", "choose another --out", "--start-over"),
    ("export gone --out m", "gone: expected a run with a whole checkpoint", "no checkpoint in it; train it first"),
    ("try r/checkpoints/step-00000009 x", "got no such folder (did you mean r/checkpoints/step-00000004"),
    # other files of a run in the place of what is expected
    ("train tiny_gpt2 --out r", 'r: holds a run of another model: architecture.type was "bert", is "gpt2"'),
    ("train r --out z", "r: expected a file, got a run; did you mean r/parameters.json?"),
    ("train r/metrics.jsonl --out z", "holds a JSON value in each line", "did you mean r/parameters.json?"),
    ("train c.jsonl --out z", "c.jsonl: expected a parameter file, got a corpus; make a token store of it: terakoya"),
    ("train r/checkpoints/step-00000004/manifest.json --out z", "got a checkpoint's manifest; to continue the run"),
    ("export r --out data/store", "data/store: already exists and is not empty", "choose another, or remove this one"),
    ("export r --out p.json", "p.json: already exists and is a file"),
    ("report r --out p.json/r.html", "p.json: expected a folder, but p.json is a file; choose another --out"),
    ("store merge data/store other/store --out r", "r: already exists and is not empty"),
    ("try r x", '"x": expected a [MASK] to fill in, found none'),
    ("upload r --name a/b/c", "--name a/b/c: expected ORGANISATION/NAME"),
    ("save r", "no process trains here, so there is nothing new to save; its last checkpoint is step-00000004"),
    ("save nothing", "nothing: expected the folder of a run, got no such folder"),
    # files that hold something else
    ("train latin.json --out z", "latin.json: cannot be read: 'utf-8' codec can't decode byte 0xe9", "save it as UTF"),
    ("train bytes.yaml --out z", "bytes.yaml: cannot be read: 'utf-8' codec can't decode byte 0x80", "save it as"),
    ("plugins check latin.json", "expected a Python file, whose name ends in .py"),
    ("verify latin.json", "expected a run, a checkpoint, a token store or a model folder, got a file"),
    ("status latin.json", "expected the folder of a run, got a file"),
    ("prepare bad.jsonl.gz --tokenizer hf --out kept", "expected a whole gzip file, got a damaged or truncated"),
    ("prepare bad.parquet --tokenizer hf --out kept", "expected a whole parquet file, got a broken one"),
    ("prepare folder.jsonl --tokenizer hf --out kept", "expected files ending in .jsonl, .txt", "found none"),
    ("tokenizer train c.jsonl --type sentencepiece --vocab-size 9000 --processes 1 --out t", "Please set it to"),
    ("estimate p.json --device rtx4090", 'did you mean "rtx-4090"'),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, `r`; the same with a damaged checkpoint, `cut`, with damaged ones alone,
    `all`, and without any, `gone`; and files that are not what their names say."""
    folder = tmp_path_factory.mktemp("trained")
    base = parameters(make_store(folder / "data", documents=20, seed=1), max_steps=4, checkpoint={"save_steps": 2})
    make_store(folder / "other", documents=25, seed=2)
    make_tokenizer(folder / "hf")
    (folder / "p.json").write_text(json.dumps(base))
    setup.train_in_this_process(Parameters.from_dict(base, source="p.json"), folder / "r")
    for name in ("cut", "all", "gone"):
        shutil.copytree(folder / "r", folder / name)
    cut = folder / "cut/checkpoints/step-00000004/state/optimizer-00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    for each in (folder / "all/checkpoints").glob("step-*"):
        (each / "manifest.json").write_text("{")
    shutil.rmtree(folder / "gone/checkpoints")
    (folder / "c.jsonl").write_text("".join(f'{{"text": "日本の首都は東京です {number}"}}\n' for number in range(30)))
    (folder / "latin.json").write_bytes('{"max_steps": "café"}'.encode("latin-1"))
    (folder / "bytes.yaml").write_bytes(bytes(range(256)))
    (folder / "bad.jsonl.gz").write_bytes(b"no gzip")
    (folder / "bad.parquet").write_bytes(b"")
    (folder / "folder.jsonl").mkdir()
    return folder


@pytest.mark.parametrize(
    ("error", "noted"), [(UserError, "2"), (Diverged, "3"), (TemporaryFailure, None), (Stopped, None)]
)
def test_a_mistake_is_noted_for_the_script_that_would_start_again(
    error: type[UserError], noted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error("as it must")

    monkeypatch.setattr("terakoya.commands.main.command_line", lambda *_: fails)
    monkeypatch.setenv(DEBUG_VARIABLE, "")
    note = tmp_path / "note"
    monkeypatch.setenv("TERAKOYA_LASTING_CODE_FILE", str(note))
    assert exit_code("train") == error.exit_code
    assert (note.read_text() if note.exists() else None) == noted


@pytest.mark.parametrize("row", RUN_MISTAKES, ids=[row[0] for row in RUN_MISTAKES])
def test_a_mistake_with_a_run_is_answered_and_leaves_it_as_it_is(
    row: tuple[str, ...], trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    monkeypatch.setenv(DEBUG_VARIABLE, "")
    command, *said = row
    code, out, err = call(capsys, *command.split(" "))
    assert code == 2 and "Traceback" not in out + err
    for words in said:
        assert words in out + err
    assert not [name for name in ("z", "t", "s", "m") if (trained / name).exists()]
    assert sorted(each.name for each in (trained / "r/checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do(
    row: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv(DEBUG_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(place / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    command, *said = row
    answer = refusal(capsys, *command.split(" "))
    for words in said:
        assert words in answer
    assert not [name for name in ("s3:", "gs:", "r", "t", "s", "m") if (place / name).exists()]
