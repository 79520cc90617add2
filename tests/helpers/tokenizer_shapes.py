"""Small tokenizers in the three shapes in which Japanese models are published, for tests of their vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from terakoya.tokenization.train import train_tokenizer

OLD = [
    "庭の池に、赤い魚と白い魚がいる。",
    "魚は池の底で休む。",
    "朝の光が障子を通して畳の上に落ちる。",
    "the fish rests",
] * 3
NEW = ["寺子屋の先生は寺子屋で魚を見る。", "寺子屋と障子の庭。", "The terakoya rests, a terakoya."] * 3
PLAIN = ["白い魚が池の底に落ちる。", "赤い光が上に落ちる。", "fish"]
QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def japanese_wordpiece(folder: Path) -> Path:
    """Tohoku's shape: BertJapaneseTokenizer over MeCab."""
    corpus = folder.with_suffix(".txt")
    corpus.write_text("\n".join([*OLD, "寺子屋の先生を見る。"]), encoding="utf-8")
    train_tokenizer([corpus], folder, settings={"type": "mecab_wordpiece", "vocab_size": 150}, processes=1)
    return folder


def unigram(folder: Path) -> Path:
    """llm-jp's shape: a unigram model with bytes for unknown characters, whole lines, and added tokens after it."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = sorted(set("".join(OLD + NEW)) | {"▁"})
    trainer = trainers.UnigramTrainer(
        vocab_size=110, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", initial_alphabet=alphabet
    )
    made.train_from_iterator(OLD, trainer)
    made.add_special_tokens(["<pad>", "<mask>"])
    names = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    given = {f"{role}_token": piece for role, piece in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=made, **given).save_pretrained(folder)
    return folder


def byte_level(folder: Path) -> Path:
    """Qwen's shape: byte-level BPE behind its own pattern, special and other added tokens after the vocabulary."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(OLD, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<tool_call>", normalized=False)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def sentencepiece(folder: Path) -> Path:
    """terakoya's own unigram model, in a tokenizer.json."""
    corpus = folder.with_suffix(".txt")
    corpus.write_text("\n\n".join(OLD + NEW[:3] + ["terakoya", "寺子屋"]), encoding="utf-8")
    settings = {"type": "sentencepiece", "vocab_size": 58, "character_coverage": 1.0, "num_threads": 1}
    train_tokenizer([corpus], folder, settings=settings, processes=1)
    return folder


SHAPES: dict[str, Callable[[Path], Path]] = {
    "Tohoku": japanese_wordpiece, "llm-jp": unigram, "Qwen": byte_level, "SentencePiece": sentencepiece,
}  # fmt: skip
