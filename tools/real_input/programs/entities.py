"""Tunes a model to find names with plain Transformers, beside itself with random weights, and checks every offset.

    python tools/real_input/programs/entities.py MODEL --train DEV.conllu.gz --test TEST.conllu.gz

The data are CoNLL-U files with UniDic's parts of speech in the fifth column, such as UD Japanese GSD. There is no set
of named entities among them, so a span here is a run of proper nouns of one kind (名詞-固有名詞-人名, -地名, -組織名 or
another): easier than real entities, and no score of it compares with a published one. Everything is Transformers' own:
`Trainer`, `DataCollatorForTokenClassification` and `pipeline("ner", aggregation_strategy="simple")`, over the tokenizer
with offsets of `terakoya_tokenizer`. Ends with 1 if a predicted span is not the text between its offsets.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from terakoya_tokenizer import BertJapaneseTokenizerFast

PROPER = "名詞-固有名詞-"
KINDS: Mapping[str, str] = {"人名": "PER", "地名": "LOC", "組織名": "ORG"}
OTHER = "MISC"
LABELS = ("O", *(f"{place}-{kind}" for kind in (*KINDS.values(), OTHER) for place in "BI"))

Span = tuple[int, int, str]
"""First character, the one after the last, the kind."""


@dataclass(frozen=True)
class Sentence:
    """A text and the spans of its names."""

    text: str
    spans: Sequence[Span]


def read(file: Path) -> Iterator[Sentence]:
    """Yields the sentences of a CoNLL-U file. Raises ValueError for words that are not in the text."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for block in lines.read().split("\n\n"):
            rows = [line.split("\t") for line in block.splitlines() if line and line[0] != "#"]
            found = re.search(r"^# text = (.*)$", block, re.MULTILINE)
            if found and rows:
                yield Sentence(found[1], find_spans(found[1], [(row[1], row[4]) for row in rows if row[0].isdigit()]))


def examples(file: Path) -> Iterator[str]:
    """Yields the sentences of a CoNLL-U file as `terakoya finetune --task ner` reads them, a line of JSON each."""
    for each in read(file):
        spans = [{"start": start, "end": end, "label": kind} for start, end, kind in each.spans]
        yield json.dumps({"text": each.text, "spans": spans}, ensure_ascii=False)


def find_spans(text: str, words: Sequence[tuple[str, str]]) -> list[Span]:
    """Returns the spans of proper nouns among `words`, (form, part of speech); neighbours of a kind are one span."""
    spans: list[Span] = []
    end = 0
    for form, speech in words:
        start = text.index(form, end)
        joined = bool(spans) and spans[-1][1] == start
        end = start + len(form)
        if not speech.startswith(PROPER):
            continue
        kind = KINDS.get(speech.removeprefix(PROPER).split("-")[0], OTHER)
        if joined and spans[-1][2] == kind:
            start = spans.pop()[0]
        spans.append((start, end, kind))
    return spans


def encode(sentence: Sentence, tokenizer: Any) -> dict[str, Any]:
    """Returns the inputs of a text with `labels`: of each token the label of the span that it overlaps."""
    encoded = tokenizer(sentence.text, truncation=True, return_offsets_mapping=True, return_special_tokens_mask=True)
    labels, before = [], None
    for (start, end), special in zip(encoded.pop("offset_mapping"), encoded.pop("special_tokens_mask"), strict=True):
        span = next((each for each in sentence.spans if start < each[1] and each[0] < end), None)
        name = "O" if span is None else f"{'I' if span == before else 'B'}-{span[2]}"
        labels.append(-100 if special else LABELS.index(name))
        before = None if special else span
    return {**encoded, "labels": labels}


def score(predicted: Sequence[Sequence[Span]], wanted: Sequence[Sequence[Span]]) -> tuple[float, float, float]:
    """Returns precision, recall and F1 over the spans of all sentences; a span counts with its bounds and kind."""
    right = sum(len(set(got) & set(spans)) for got, spans in zip(predicted, wanted, strict=True))
    found, there = sum(map(len, predicted)), sum(map(len, wanted))
    precision, recall = right / max(found, 1), right / max(there, 1)
    return precision, recall, 2 * right / max(found + there, 1)


def tune(model: Any, sentences: Sequence[Sentence], tokenizer: Any, options: argparse.Namespace) -> None:
    """Trains `model` on `sentences`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, learning_rate=options.learning_rate, num_train_epochs=options.epochs,
            per_device_train_batch_size=16, warmup_steps=20, weight_decay=0.01, seed=options.seed, save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        examples: Any = [encode(each, tokenizer) for each in sentences]
        collator = transformers.DataCollatorForTokenClassification(tokenizer)
        transformers.Trainer(model, arguments, data_collator=collator, train_dataset=examples).train()


def predict(model: Any, sentences: Sequence[Sentence], tokenizer: Any) -> tuple[list[list[Span]], list[str]]:
    """Returns the spans that the pipeline finds in each sentence, and those whose text is not the one between their
    offsets."""
    find = transformers.pipeline("ner", model=model, tokenizer=tokenizer, aggregation_strategy="simple", device="cpu")
    spans, wrong = [], []
    for sentence in sentences:
        found = find(sentence.text)
        spans.append([(each["start"], each["end"], each["entity_group"]) for each in found])
        for each in found:
            between = sentence.text[each["start"] : each["end"]]
            if not is_text_of(each["word"], between):
                wrong.append(f"{each['word']!r} at {between!r}")
    return spans, wrong


def is_text_of(word: str, text: str) -> bool:
    """Whether `word`, as a tokenizer puts its pieces together, is `text`: spaces, NFKC and the mark of a piece inside a
    word aside; an unknown piece is any text."""
    known = word.removeprefix("##").split("[UNK]")
    pieces = [re.escape(unicodedata.normalize("NFKC", each).replace(" ", "")) for each in known]
    pattern = ".+".join(pieces)
    return re.fullmatch(pattern, "".join(unicodedata.normalize("NFKC", text).split()), re.DOTALL) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a span is not the text between its offsets, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Transformers folder with MeCab's words, such as an exported BERT")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    tokenizer = BertJapaneseTokenizerFast.from_pretrained(options.model, trust_remote_code=False)
    train, test = list(read(options.train)), list(read(options.test))
    print(f"{len(train)} sentences with {sum(len(each.spans) for each in train)} names to learn from, {len(test)} with "
          f"{sum(len(each.spans) for each in test)} to find")  # fmt: skip
    wrong: list[str] = []
    for name in ("pre-trained", "random weights"):
        torch.manual_seed(options.seed)
        config = transformers.AutoConfig.from_pretrained(
            options.model,
            trust_remote_code=False,
            id2label=dict(enumerate(LABELS)),
            label2id={label: n for n, label in enumerate(LABELS)},
        )
        kind = transformers.AutoModelForTokenClassification
        if name == "pre-trained":
            model = kind.from_pretrained(options.model, config=config, trust_remote_code=False)
        else:
            model = kind.from_config(config)
        tune(model, train, tokenizer, options)
        spans, others = predict(model.eval(), test, tokenizer)
        wrong += others
        precision, recall, f1 = score(spans, [each.spans for each in test])
        count = sum(map(len, spans))
        print(f"{name:<14}  F1 {f1:.3f}  precision {precision:.3f}  recall {recall:.3f}; {count - len(others)} of "
              f"{count} spans are the text between their offsets", flush=True)  # fmt: skip
    print(*wrong[:20], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
