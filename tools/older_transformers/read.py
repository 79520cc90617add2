"""Reads what `write.py` wrote with the Transformers of this environment, without terakoya; compares ids and logits,
and with terakoya_tokenizer the places of tokens and of entities.

python tools/older_transformers/read.py FOLDER [JSON]

Prints a line for each export and ends with 1 if one differs. Models that this Transformers does not have are skipped
and counted. JSON gets the results as {"EXPORT": RESULT}, where RESULT is "ok" or what differs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import fugashi
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
fugashi.GenericTagger = functools.cache(fugashi.GenericTagger)  # it is never freed, and each maps the dictionary anew

TOLERANCE = 1e-5
NOT_THERE = "not in this Transformers"
SINCE = {
    "olmo2": (4, 47), "modernbert": (4, 48), "gemma3_text": (4, 50), "qwen3": (4, 51), "modernbert_decoder": (4, 56),
    "eurobert": (5, 0),
}  # fmt: skip
"""The first version of Transformers with the models that 4.45 does not have."""
SCALED_SINCE = {
    **dict.fromkeys(("llama+yarn", "mistral+linear", "mistral+yarn", "mistral+llama3"), (4, 57)),
    **dict.fromkeys(("olmo2+yarn", "olmo2+llama3"), (5, 0)),
}
"""The version that has been seen to read scaled rotary positions where an older one does not: 4.45 takes another length
for YaRN and leaves out Mistral's scaling, both without a word; 4.57 refuses OLMo 2's."""


def main(folder: Path, report: Path | None) -> int:
    """Returns 1 if an export is not read as it was written, else 0."""
    import transformers

    transformers.logging.set_verbosity_error()
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    results = {}
    for expected in sorted(folder.glob("*/expected.json")):
        name = expected.parent.name
        architecture = name.partition(".")[0]
        since = SINCE.get(architecture.partition("+")[0], (0, 0)), SCALED_SINCE.get(architecture, (0, 0))
        known = version >= max(since)
        try:
            results[name] = compare(expected.parent) if known else NOT_THERE
        except Exception as error:  # noqa: BLE001 - whatever an old version raises is the result
            results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{name:45s} {results[name]}", flush=True)
    results |= registered(folder, [name for name, result in results.items() if result == "ok"])
    wrong = [name for name, result in results.items() if result not in ("ok", NOT_THERE)]
    skipped = sum(result == NOT_THERE for result in results.values())
    right = len(results) - len(wrong) - skipped
    print(f"transformers {transformers.__version__}: {right} read as they were written, "
          f"{skipped} of models or scaled positions that it does not have, {len(wrong)} not")  # fmt: skip
    if report is not None:
        report.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return 1 if wrong or not results else 0


def registered(folder: Path, names: list[str]) -> dict[str, str]:
    """Returns what is wrong with those of the exports `names` that AutoTokenizer should read as a fast Japanese
    tokenizer, once terakoya_tokenizer is registered."""
    import transformers

    import terakoya_tokenizer

    terakoya_tokenizer.register()
    wrong = {}
    for name in names:
        expected = json.loads((folder / name / "expected.json").read_text(encoding="utf-8"))
        if "offsets" in expected:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name, trust_remote_code=False)
            if not tokenizer.is_fast or tokenizer(expected["texts"])["input_ids"] != expected["ids"]:
                wrong[name] = f"{type(tokenizer).__name__} after register()"
    return wrong


def compare(folder: Path) -> str:
    """Returns "ok", or what is read otherwise than it was written."""
    import transformers

    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    has_code = "auto_map" in config and not hasattr(transformers, config["tokenizer_class"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=has_code)
    for text, ids, plain in zip(expected["texts"], expected["ids"], expected["plain"], strict=True):
        if (got := list(tokenizer(text)["input_ids"])) != ids:
            return f"other ids for {text!r}: {got[:12]} instead of {ids[:12]}"
        if (got := list(tokenizer(text, add_special_tokens=False)["input_ids"])) != plain:
            return f"other ids without special tokens for {text!r}"
    for name, ids in tokenizer(expected["texts"][0], expected["texts"][1]).items():
        if list(ids) != (wanted := expected["pair"].get(name)):
            return f"other {name} for a pair of texts: {ids} instead of {wanted}"
    if "library_offsets" in expected:
        offsets = tokenizer(expected["texts"], return_offsets_mapping=True)["offset_mapping"]
        if [list(map(list, row)) for row in offsets] != expected["library_offsets"]:
            return "other offsets"
    several = tokenizer(expected["texts"], padding=True, truncation=True, return_tensors="pt")
    length = int(tokenizer.model_max_length)
    if several["input_ids"].shape[1] > length:
        return f"truncation leaves {several['input_ids'].shape[1]} tokens of {length}"
    model = getattr(transformers, expected["auto"]).from_pretrained(folder, trust_remote_code=False).eval()
    if type(model).__name__ != expected["class"]:
        return f"{expected['auto']} loads a {type(model).__name__} instead of a {expected['class']}"
    inputs: dict[str, Any] = {"input_ids": torch.tensor([expected["input"]])}
    long = tokenizer("吾輩は猫である。" * 1250, truncation=True, return_tensors="pt")
    given: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
        given["decoder_input_ids"] = several["input_ids"][:, :1]
    with torch.no_grad():
        output = model(**inputs)
        model(**several, **given)
        model(**long, **{name: ids[:1] for name, ids in given.items()})
    got = next((output[name] for name in ("prediction_logits", "logits") if name in output), output[0])[0]
    wanted = torch.tensor(expected["logits"])
    if got.shape == (*wanted.shape, 2):  # a token classifier's two classes
        got = got[..., 1] - got[..., 0]
    difference = float((got - wanted).abs().max() / max(1.0, float(wanted.abs().max())))
    if difference > TOLERANCE:
        return f"logits differ by {difference:.1e}"
    return compare_offsets(folder, expected) if "offsets" in expected else "ok"


def compare_offsets(folder: Path, expected: dict[str, Any]) -> str:
    """Returns "ok", or what the fast Japanese tokenizer says otherwise here, alone or in the pipeline for entities."""
    import transformers

    from terakoya_tokenizer import BertJapaneseTokenizerFast

    tokenizer = BertJapaneseTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    encoded = tokenizer(expected["texts"], return_offsets_mapping=True)
    if encoded["input_ids"] != expected["ids"]:
        return "other ids from the fast tokenizer"
    if [list(map(list, row)) for row in encoded["offset_mapping"]] != expected["offsets"]:
        return "other offsets from the fast tokenizer"
    if [encoded.word_ids(row) for row in range(len(expected["texts"]))] != expected["words"]:
        return "other words from the fast tokenizer"
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type != "bert":
        return "ok"
    torch.manual_seed(0)
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        folder, id2label={0: "LOC", 1: "PER"}, trust_remote_code=False
    )
    find = transformers.pipeline("ner", model=model, tokenizer=tokenizer, aggregation_strategy="simple", device="cpu")
    text, offsets = expected["texts"][1], expected["offsets"][1][1:-1]
    found = [(each["start"], each["end"]) for each in find(text)]
    ends = {end for _, end in offsets}
    whole = bool(found) and found[0][0] == offsets[0][0] and found[-1][1] == offsets[-1][1]
    if not whole or any(end not in ends for _, end in found):
        return f"entities at {found} of {text!r}"
    return compare_answers(folder, tokenizer, expected) if transformers.__version__ < "5" else "ok"


def compare_answers(folder: Path, tokenizer: Any, expected: dict[str, Any]) -> str:
    """Returns "ok", or an answer of the pipeline for questions that is not the text between its offsets, or that begins
    or ends within a token. Transformers 5 has no such pipeline."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder, trust_remote_code=False)
    find = transformers.pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu")
    context = "".join(expected["texts"][:2])
    offsets = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    starts, ends = ({offset[place] for offset in offsets} for place in (0, 1))
    for answer in find(question=expected["texts"][5], context=context, top_k=5, max_seq_len=80, doc_stride=16):
        start, end = answer["start"], answer["end"]
        if answer["answer"] != context[start:end] or start not in starts or end not in ends:
            return f"the answer {answer['answer']!r} at {start} to {end} of {context!r}"
    return "ok"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
