"""The tokenizer.json of a SentencePiece model beside SentencePiece itself: the same ids on every line.

    python tools/bench/sentencepiece_json.py CORPUS.jsonl.gz... --type unigram --lines 400000

The model is --model or trained here, and its scores are rounded as those of `terakoya tokenizer train`. Lines are
divided behind each 。. Ends with 1 if a line has other ids.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
from pathlib import Path

import sentencepiece
import tokenizers
from fast_tokenizer import read_lines

from terakoya.toolkit.tokenizers.sentencepiece_folder import roles_of
from terakoya_plugins.tokenizers.sentencepiece.tokenizer_json import build_backend, round_scores


def train(options: argparse.Namespace) -> bytes:
    """Returns a model of the first 100,000 lines of the corpus, every fifth of them."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=itertools.islice(read_lines(options.corpus), 0, 100_000, 5),
        model_writer=model,
        model_type=options.type,
        vocab_size=options.vocab_size,
        byte_fallback=options.byte_fallback,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> int:
    """Prints the number of lines with other ids; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--type", default="unigram")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--byte-fallback", action="store_true")
    parser.add_argument("--lines", type=int, default=100_000)
    options = parser.parse_args()

    model = round_scores(options.model.read_bytes() if options.model else train(options))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    backend = build_backend(model, roles_of(processor), cls_sep=False)
    lines = tokens = 0
    differing: list[str] = []
    source = itertools.islice(read_lines(options.corpus), options.lines)
    while batch := list(itertools.islice(source, 5000)):
        expected = processor.encode(batch)
        found = [each.ids for each in backend.encode_batch(batch, add_special_tokens=False)]
        differing += [line for line, one, two in zip(batch, expected, found, strict=True) if one != two]
        lines, tokens = lines + len(batch), tokens + sum(map(len, expected))
    print(f"command: python {' '.join(sys.argv)}")
    print(
        f"{lines:,} lines, {tokens:,} tokens; {len(differing):,} lines with other ids; sentencepiece "
        f"{sentencepiece.__version__}, tokenizers {tokenizers.__version__}"
    )
    if differing:
        print(f"for example: {differing[:3]}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
