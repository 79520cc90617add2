"""Mistakes that real users make, one a row: the command, and the words that say where it is and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy import make_store, parameters

from terakoya.commands.main import DEBUG_VARIABLE, main


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
    write("comment.json", json.dumps(base, indent=1).replace('"max_steps"', '# length\n "max_steps"'))
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
    (folder / "tok").mkdir()
    write("tok/tokenizer_config.json", {})
    (folder / "euc.txt").write_bytes("日本語の文章です。\n".encode("euc-jp"))
    return folder


TRAIN = "train p.json --out r"
PREPARE = "--tokenizer data/tokenizer --out s"
MISTAKES = [
    # files that are missing or of another kind
    ("train q.json --out r", "q.json: no such file (did you mean p.json"),
    ("train run --out r", "run: expected a file, got a run; did you mean run/parameters.json?"),
    ("train pipeline.json --out r", "got a pipeline file; start it with `terakoya run pipeline.json`"),
    ("run p.json", "got a parameter file; start it with `terakoya train p.json --out RUN`"),
    ("train config.json --out r", "got the configuration of a Transformers model; a run describes the model in"),
    ("train axolotl.yaml --out r", "got a configuration of axolotl; begin with a preset of parameters/"),
    ("train comment.json --out r", "not valid JSON: a comment; write // before a comment in JSON, or give the file"),
    ("train commas.json --out r", ":1:", "not valid JSON: a comma with nothing before it; remove it"),
    # keys
    ("train lr.json --out r", 'lr.json: learning_rate: unknown key; that is "optimizer.learning_rate" here'),
    ("train hf.json --out r", 'num_train_epochs: unknown key; that is "epochs" here', '"schedule.warmup_steps"'),
    (f"{TRAIN} --set optimizer.lr=1", 'p.json: optimizer.lr: unknown key; that is "optimizer.learning_rate" here'),
    (f"{TRAIN} --set architecture.type=gpt2 --set architecture.n_embd=8", 'that is "architecture.hidden_size" here'),
    (f"{TRAIN} --set max_steps=hundred", 'p.json: max_steps: expected an integer, got "hundred"'),
    (f"{TRAIN} --set trackers=[\"wandb\"]", 'write {"type": "wandb"}'),
    (f"{TRAIN} --set data.train=data/store", 'p.json: data.train: expected a list, got "data/store"'),
    # options
    (f"{TRAIN} --max-steps 100", "--max-steps: no such option; give --set max_steps=100"),
    ("train --config p.json --out r", "the parameter file is the first argument"),
    ("train p.json --output_dir r", "--output_dir: no such option; give --out r"),
    ("launch slurm p.json --out r --nodes 4", "the nodes follow from batch_size"),
    (f"{TRAIN} --allow-change learning_rate", '--allow-change learning_rate: unknown key; that is "optimizer.'),
    ("plugins show brt", 'no component is called "brt"; did you mean "bert"'),
    # corpora
    (f"prepare array.json {PREPARE}", "It is one JSON array; write a line for each document: jq -c '.[]'"),
    (f"prepare page.html {PREPARE}", "Extract its text first"),
    (f"prepare wikimedia/wikipedia {PREPARE}", "hf://datasets/wikimedia/wikipedia@REVISION/"),
    (f"prepare data/store {PREPARE}", "data/store: expected a corpus, got a token store"),
    ("tokenizer train empty.jsonl --type mecab_wordpiece --out t", "got an empty corpus; give files that hold text"),
    ("tokenizer train euc.txt --type mecab_wordpiece --out t", "all are rejected (1 bad UTF-8)", "iconv"),
    ("tokenizer train pretty.jsonl --type byte_bpe --out t", "all are rejected (3 bad JSON)", "jq -c . FILE"),
    ("tokenizer train other.jsonl --type byte_bpe --out t", "(1 missing field)", "--field"),
    # folders
    ("export nothing --out m", "nothing: expected a run or a checkpoint, got no such folder"),
    ("export data/store --out m", "found no checkpoint in a token store; `terakoya store info data/store`"),
    ("try tok x", "found no config.json in a tokenizer; a model is trained first"),
    ("status data/store", "expected the folder of a run, got a token store"),
    ("store info run", "run: expected a finished token store, got a run; run/parameters.json names its stores"),
    ("store info data/stroe", "got no such folder (did you mean data/store?)"),
    ("prepare empty.jsonl --tokenizer data/store --out s", "a token store; its tokenizer is in data/store/tokenizer"),
    ("train p.json --out data/store", "expected a new folder or a run's, got a token store; choose another --out"),
    ("train p.json --out p.json", "p.json"),
    ("report run --out data", "expected an HTML file, got a folder; give --out data/report.html"),
    # addresses
    ("train p.json --out s3://b/run", "s3://b/run: expected the run's folder, got an address"),
    ("train p.json --out s3://b/run --dry-run", "s3://b/run: expected the run's folder, got an address"),
    ("prepare other.jsonl --tokenizer data/tokenizer --out gs://b/s", "gs://b/s: expected the new store's folder"),
    ("tokenizer train other.jsonl --type byte_bpe --out s3://b/t", "s3://b/t: expected a new folder, got an address"),
    ("export run --out s3://b/m", "s3://b/m: expected a new folder, got an address"),
    ("store info s3://b/store", "expected a finished token store, got an address"),
    ("demo --out s3://b/d", "s3://b/d: expected the demo's folder, got an address"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do(
    row: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv(DEBUG_VARIABLE, "")
    command, *said = row
    with pytest.raises(SystemExit) as caught:
        main(command.split(" "))
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and "Traceback" not in out + err
    for words in said:
        assert words in err
    assert not [name for name in ("s3:", "gs:", "r", "t", "s", "m") if (place / name).exists()]
