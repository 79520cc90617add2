"""Compares exports for ONNX Runtime, sentence-transformers, llama.cpp and Optimum with plain Transformers.

python tools/real_input/programs/exported.py OUT [PROGRAM ...]

PROGRAM is one of `PROGRAMS`; without any, all are tried. `OUT/texts.json` has the texts. Each program is used by its
own interface, as its users do; the reference is the model and tokenizer that Transformers loads from OUT/models/bert
and OUT/models/gpt. Prints a line for each comparison and ends with 1 if one fails; a program that is not installed is
skipped and named.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import transformers
from models import terakoya

TOLERANCE = 1e-4
"""How far logits may be from the model's, relative to the largest where that is above 1."""
VECTORS = 1e-5
"""How far vectors of length 1 may be."""
NEW_TOKENS = 40
BEGINNINGS = ("京都は", "吾輩は猫である。", "関数の戻り値は", "雨が降る")
FLOAT32 = 0
"""GGML's number of float32, for the kept keys and values."""


def load(folder: Path, kind: Any) -> tuple[Any, Any]:
    """Returns tokenizer and model of `folder` as plain Transformers loads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return tokenizer, kind.from_pretrained(folder, trust_remote_code=False).float().eval()


def difference(got: Any, expected: Any) -> float:
    """The largest difference, relative to the largest of `expected` where that is above 1."""
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))


def compare_onnx(out: Path, texts: Sequence[str]) -> tuple[bool, str]:
    """Logits of ONNX Runtime at every token, for a padded batch of texts, of both models."""
    import onnxruntime

    found = {}
    for name, kind in (("bert", transformers.AutoModelForMaskedLM), ("gpt", transformers.AutoModelForCausalLM)):
        folder = export(out / name, "onnx")
        tokenizer, model = load(out / "models" / name, kind)
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        given = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        inputs = {each.name: given[each.name].numpy() for each in session.get_inputs()}
        (logits,) = session.run(["logits"], inputs)
        with torch.no_grad():
            expected = model(**given).logits.numpy()
        real = given["attention_mask"].bool().numpy()
        found[name] = difference(logits[real], expected[real])
    said = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    return max(found.values()) <= TOLERANCE, f"logits of {len(texts)} texts: {said}"


def compare_optimum(out: Path, texts: Sequence[str]) -> tuple[bool, str]:
    """Logits of Optimum's classes, which read the same ONNX files by their names, and what both models answer."""
    from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForMaskedLM

    given, found = list(texts), {}
    tokenizer, model = load(out / "models" / "bert", transformers.AutoModelForMaskedLM)
    theirs = ORTModelForMaskedLM.from_pretrained(out / "bert" / "onnx", trust_remote_code=False)
    found["bert"] = compare_batch(tokenizer, model, theirs, given)
    tokenizer, model = load(out / "models" / "gpt", transformers.AutoModelForCausalLM)
    theirs = ORTModelForCausalLM.from_pretrained(
        out / "gpt" / "onnx", use_cache=False, use_io_binding=False, trust_remote_code=False
    )
    found["gpt"] = compare_batch(tokenizer, model, theirs, given)
    answers = 0
    for text in BEGINNINGS:
        start = tokenizer(text, return_tensors="pt")
        ids = [each.generate(**start, max_new_tokens=NEW_TOKENS, do_sample=False).tolist() for each in (model, theirs)]
        answers += ids[0] == ids[1]
    said = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    right = max(found.values()) <= TOLERANCE and answers == len(BEGINNINGS)
    return right, (
        f"logits of {len(texts)} texts: {said}; {answers} of {len(BEGINNINGS)} answers of {NEW_TOKENS} tokens"
    )


def compare_batch(tokenizer: Any, model: Any, other: Any, texts: list[str]) -> float:
    """The largest difference of the logits of `other` from those of `model`, at the tokens of a padded batch."""
    given = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    real = given["attention_mask"].bool()
    with torch.no_grad():
        return difference(other(**given).logits[real], model(**given).logits[real])


def compare_sentence_transformers(out: Path, texts: Sequence[str]) -> tuple[bool, str]:
    """Vectors of sentence-transformers, against the mean of the last hidden states of each text alone."""
    from sentence_transformers import SentenceTransformer

    folder = export(out / "bert", "sentence_transformers")
    vectors = SentenceTransformer(str(folder), device="cpu").encode(list(texts), show_progress_bar=False)
    tokenizer, model = load(out / "models" / "bert", transformers.AutoModel)
    with torch.no_grad():
        given = (tokenizer(text, truncation=True, return_tensors="pt") for text in texts)
        expected = torch.stack([model(**each).last_hidden_state[0].mean(0) for each in given])
    expected = expected / expected.norm(dim=1, keepdim=True)
    found = difference(vectors, expected)
    return found <= VECTORS, f"vectors {vectors.shape}, mean pooling by hand: {found:.1e}"


def compare_llama_cpp(out: Path, texts: Sequence[str]) -> tuple[bool, str]:
    """Ids and logits of llama.cpp for each text, and the tokens that both take when they always take the likeliest."""
    from llama_cpp import Llama

    folder = export(out / "gpt", "gguf")
    tokenizer, model = load(out / "models" / "gpt", transformers.AutoModelForCausalLM)
    length = model.config.max_position_embeddings
    program = Llama(
        str(folder / "model.gguf"), n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False,
        type_k=FLOAT32, type_v=FLOAT32, n_gpu_layers=0,
    )  # fmt: skip
    others, worst, same, positions = [], 0.0, 0, 0
    for text in texts:
        ids = list(map(int, tokenizer(text)["input_ids"]))
        if program.tokenize(text.encode(), add_bos=True, special=True) != ids:
            others.append(text)
        program.reset()
        program.eval(ids[:length])
        with torch.no_grad():
            expected = model(torch.tensor([ids[:length]])).logits[0].numpy()
        got = np.array(program.scores[: len(expected)])
        worst = max(worst, difference(got, expected))
        same, positions = same + int((got.argmax(-1) == expected.argmax(-1)).sum()), positions + len(expected)
    answers = 0
    for text in BEGINNINGS:
        given = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            wanted = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        wanted = wanted[given["input_ids"].shape[1] :].tolist()
        tokens = program.generate(given["input_ids"][0].tolist(), temp=0.0, repeat_penalty=1.0)
        answers += [token for token, _ in zip(tokens, wanted, strict=False)] == wanted
    said = program(BEGINNINGS[0], max_tokens=NEW_TOKENS, temperature=0.0)["choices"][0]["text"]
    program.close()
    right = not others and worst <= TOLERANCE and same == positions and answers == len(BEGINNINGS)
    return right, "; ".join(
        [
            f"ids of {len(texts) - len(others)} of {len(texts)} texts{f', not of {others[:3]}' if others else ''}",
            f"logits {worst:.1e}, the likeliest token at {same:,} of {positions:,} positions",
            f"{answers} of {len(BEGINNINGS)} answers of {NEW_TOKENS} tokens, {BEGINNINGS[0]}{said!r}",
        ]
    )


def export(model: Path, format: str) -> Path:
    """Returns the folder with the run of `model` in `format`, which it writes first."""
    folder = model / format
    if not folder.exists():
        terakoya("export", model / "run", "--format", format, "--out", folder)
    return folder


PROGRAMS: Mapping[str, tuple[Sequence[str], Callable[[Path, Sequence[str]], tuple[bool, str]]]] = {
    "ONNX Runtime": (("onnx", "onnxscript", "onnxruntime"), compare_onnx),
    "sentence-transformers": (("sentence_transformers",), compare_sentence_transformers),
    "llama.cpp": (("gguf", "llama_cpp"), compare_llama_cpp),
    "Optimum": (("optimum",), compare_optimum),
}
"""Name -> the modules that it needs, the comparison: whether it is right, and what was seen."""


def main(out: Path, names: Sequence[str]) -> int:
    """Returns 1 if an output of the programs `names` is another one, else 0."""
    transformers.logging.set_verbosity_error()
    texts = json.loads((out / "texts.json").read_text(encoding="utf-8"))
    results = []
    for name in names or PROGRAMS:
        modules, compare = PROGRAMS[name]
        if missing := [each for each in modules if importlib.util.find_spec(each) is None]:
            print(f"{name}: skipped, {', '.join(missing)} not installed", flush=True)
            continue
        right, seen = compare(out, texts)
        results.append(right)
        print(f"{name}: {'ok' if right else 'WRONG'}: {seen}", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
