"""What `tests/golden/numbers.json` holds: token ids, bytes of stores, masks and losses as they once were.

    python tests/helpers/golden.py

writes the file anew, which a commit does that changes a number on purpose and says why.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import toy
import worlds

import terakoya
from terakoya.components.tokenizer import load_tokenizer
from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.rows.stores import Stores
from terakoya_contract.toy import values

FILE = Path(__file__).resolve().parents[1] / "golden" / "numbers.json"
LIBRARIES = ("fugashi", "sentencepiece", "tokenizers", "torch", "transformers", "unidic-lite")
"""With another version of one of these a number may be another."""
CORPUS = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"
TEXTS = ("東京は日本の首都である。", "猫がﾈｺと鳴く🐈  2 回", "The naïve café, ①㈱ and がﾞ")
TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "mecab_wordpiece": {"vocab_size": 1500},
    "mecab_character": {},
    "sentencepiece": {"vocab_size": 1600},
    "byte_bpe": {"vocab_size": 700},
}
STORED = ("tokens.bin", "tokens.idx", "tokens.words", "documents.sizes")
MASKED, CAUSAL = {"type": "masked_lm"}, {"type": "causal_lm"}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": MASKED,
    "electra": {"type": "replaced_token", "generator_size": "1/2"},
    "modernbert": MASKED,
    "t5": {"type": "span_corruption", "mean_noise_span_length": 5.0},
    "gpt2": CAUSAL,
    "llama": CAUSAL,
}
"""Architecture -> objective."""
STEPS = 4


def made_here() -> dict[str, Any]:
    """All of it, as this tree and these libraries make it."""
    with tempfile.TemporaryDirectory() as folder:
        texts = texts_as_ids(Path(folder))
        return {"libraries": libraries(), "tokenizers": texts, "runs": runs(Path(folder))}


def libraries() -> dict[str, str]:
    return {name: importlib.metadata.version(name).partition("+")[0] for name in LIBRARIES}


def texts_as_ids(folder: Path) -> dict[str, Any]:
    """By type of tokenizer the ids of `TEXTS`, and the SHA-256 of the files of the corpus's store."""
    corpus = folder / "corpus.txt"
    corpus.write_text(CORPUS.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    found = {}
    for kind, settings in TOKENIZERS.items():
        tokenizer, store = folder / kind, folder / f"{kind}.store"
        terakoya.train_tokenizer([corpus], tokenizer, settings={"type": kind, **settings}, processes=1)
        terakoya.prepare([corpus], tokenizer=tokenizer, out=store, processes=1)
        loaded = load_tokenizer(tokenizer)
        found[kind] = {
            "ids": [loaded.encode(text, add_special_tokens=False) for text in TEXTS],
            "store": {name: digest((store / name).read_bytes()) for name in STORED if (store / name).exists()},
        }
    return found


def runs(folder: Path) -> dict[str, Any]:
    """By architecture the SHA-256 of the first step's batch, and of each step the loss and the gradient norm, of one
    process and of two."""
    store = toy.make_store(folder / "train", documents=60, seed=1)
    jobs = {name: {"out": str(folder / name), "settings": settings(store, name)} for name in FAMILIES}
    pairs = [{**job, "out": f"{job['out']}.two"} for job in jobs.values()]
    for nodes, given in (((1,), list(jobs.values())), ((2,), pairs)):
        toy.finish(worlds.start(partial(worlds.train, given), nodes, folder / "said"))
    return {
        name: {
            "batch": first_batch(job["settings"]),
            "one": list(toy.losses(folder / name).values()),
            "two": list(toy.losses(folder / f"{name}.two").values()),
        }
        for name, job in jobs.items()
    }


def settings(store: Path, name: str) -> dict[str, Any]:
    """The parameter JSON of a run without dropout, whose numbers depend on the processor."""
    component = registry().component("architectures", name)
    ends = ("dropout", "dropout_prob", "dropout_rate", "pdrop")
    dropouts = {key: 0.0 for key in component.model_fields if key.endswith(ends)}
    return toy.parameters(
        store, architecture={"type": name, **values(component), **dropouts}, objective=FAMILIES[name],
        batch_size={"-1": 8}, micro_batch_size=3, max_steps=STEPS, checkpoint={"save_steps": STEPS},
    )  # fmt: skip


def first_batch(raw: Mapping[str, Any]) -> str:
    """The digest of all arrays of the first step: which rows it takes, and what is masked in them."""
    parameters = Parameters.from_dict(dict(raw), source="golden")
    stores, objective = Stores.open(parameters.data), parameters.objective
    loader = stores.loader(objective.row_layout(), seed=parameters.seed, global_rows=8)
    arrays = objective.collate(loader.load(0, 8), stores.vocabulary).arrays
    parts = [part for name in sorted(arrays) for part in (name.encode(), np.ascontiguousarray(arrays[name]).tobytes())]
    return digest(b"".join(parts))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps(made_here(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
