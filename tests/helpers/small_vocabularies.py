"""Small tokenizers that know no words, trained in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers


def train_sentencepiece(folder: Path, text: str, *, dummy_prefix: bool) -> None:
    """Trains a SentencePiece model on `text` into `folder`: BPE with bytes and a space before each text, or
    unigram with NFKC."""
    prefix = folder / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")[:400]),
        model_prefix=str(prefix),
        model_type="bpe" if dummy_prefix else "unigram",
        vocab_size=2000,
        byte_fallback=dummy_prefix,
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name="identity" if dummy_prefix else "nmt_nfkc",
        remove_extra_whitespaces=not dummy_prefix,
        control_symbols=["<mask>"],
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "spiece.vocab").unlink()


def train_tokenizers(folder: Path, text: str, name: str) -> None:
    """Trains a fast tokenizer on `text` into `folder`: `bytes` (byte-level BPE), `bytes-nfkc` or `unigram`."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    options: dict[str, Any] = {"vocab_size": 3000, "special_tokens": special, "show_progress": False}
    if name == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.train_from_iterator([text], trainers.UnigramTrainer(unk_token="<unk>", **options))
    else:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=name == "bytes")
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
        backend.decoder = decoders.ByteLevel()
        if name == "bytes-nfkc":
            backend.normalizer = normalizers.NFKC()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator([text], trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
