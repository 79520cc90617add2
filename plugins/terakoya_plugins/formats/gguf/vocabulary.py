"""A tokenizer in GGUF. llama.cpp splits texts by itself, so only what it computes in the same way can be written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of `ByteLevel` itself."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN, LLAMA3 = (WORDS.replace("DIGITS", digits) for digits in (r"\p{N}", r"\p{N}{1,3}"))
PATTERNS: Mapping[tuple[str | None, bool], str] = {
    (GPT2, False): "gpt-2",
    (QWEN, False): "qwen2",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
}
"""Pattern by which words are split, and whether a word that is a piece needs no merges -> llama.cpp's name of both."""
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
"""A tag before or after what a model learns to write."""


def write_vocabulary(writer: GGUFWriter, folder: Path, size: int, *, allow_unnormalized: bool) -> str:
    """Writes the tokenizer in `folder` with `size` ids, those of the model.

    Returns how to normalise texts before, where llama.cpp does not do it, else "".

    Raises:
        UserError: llama.cpp would give other ids: MeCab's words, other rules for splitting, normalisation that it does
            not have (unless `allow_unnormalized`).
    """
    from terakoya.components.tokenizer import load_tokenizer
    from terakoya.toolkit.formats.chat_end import find_chat_end
    from terakoya.toolkit.tokenizers import sentencepiece_folder

    found = sentencepiece_folder.model_file(folder)
    tokenizer = sentencepiece_folder.load_tokenizer(folder) if found else load_tokenizer(folder)
    if found is not None:
        normalize = _write_sentencepiece(writer, found[0], tokenizer, size, allow_unnormalized)
    elif (folder / "tokenizer.json").is_file():
        normalize = _write_byte_level(writer, tokenizer, size, allow_unnormalized=allow_unnormalized)
    else:
        raise UserError(
            f"format gguf: llama.cpp has no {type(tokenizer).__name__}, which needs a morphological analyser; train "
            "the model with --type byte_bpe or --type sentencepiece, or use --format onnx"
        )
    _write_roles(writer, tokenizer)
    _write_chat_template(writer, tokenizer)
    if (end := find_chat_end(tokenizer)) is not None:
        writer.add_eot_token_id(end)  # llama.cpp stops there as at the end of a document
    return normalize


def _write_roles(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    for role in ROLES:
        if (number := getattr(tokenizer, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(number)
    inside, around = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    first, last = around[: around.index(inside[0])], around[around.index(inside[0]) + len(inside) :]
    if first:
        writer.add_bos_token_id(first[0])
    if last:
        writer.add_eos_token_id(last[0])
    writer.add_add_bos_token(bool(first))
    writer.add_add_eos_token(bool(last))


def _write_chat_template(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the chat template, or all where there are several by name. Without one, llama.cpp takes ChatML."""
    if template := tokenizer.chat_template:
        named = {"default": template} if isinstance(template, str) else template
        writer.add_chat_template([{"name": name, "template": _as_plain_jinja(text)} for name, text in named.items()])


def _as_plain_jinja(template: str) -> str:
    """Returns a chat template that renders the same text without the tags around an answer, which only Transformers
    has. A condition that always holds is in their place, and so removes the same spaces around it."""
    return GENERATION.sub(lambda tag: f"{{%{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}%}}", template)


def _write_byte_level(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int, *, allow_unnormalized: bool
) -> str:
    """Writes a byte-level BPE whose pattern llama.cpp has, as Transformers loads it: a class such as Qwen2Tokenizer
    brings a pattern of its own, whatever tokenizer.json says."""
    from gguf import TokenType

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    name = find_pattern(content)
    if content["model"]["type"] != "BPE" or name is None:
        raise UserError(
            "format gguf: of tokenizer.json, byte-level BPE with the pattern of GPT-2, of Qwen or of Llama 3 can be "
            "written, without a space before the text; this is another one"
        )
    normalizer = (content["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC") or (normalizer and not allow_unnormalized):
        raise UserError(
            f"format gguf: llama.cpp does not normalise text for byte-level BPE, and this tokenizer has {normalizer}; "
            "for NFC, --allow-unnormalized true writes the file, and you normalise texts before"
        )
    pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
    added = {each["id"]: each["special"] for each in content["added_tokens"]}

    def find_type(number: int) -> TokenType:
        if number in added:
            return TokenType.CONTROL if added[number] else TokenType.USER_DEFINED
        return TokenType.NORMAL if number in pieces else TokenType.UNUSED

    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([pieces.get(number, f"[unused {number}]") for number in range(size)])
    writer.add_token_types([find_type(number) for number in range(size)])
    writer.add_token_merges(merges)
    return 'with `unicodedata.normalize("NFC", text)`' if normalizer else ""


def find_pattern(content: Mapping[str, Any]) -> str | None:
    """Returns llama.cpp's name for the pattern by which a tokenizer.json splits words; None where it has none."""
    before = content["pre_tokenizer"] or {}
    *splits, last = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    found = [each for each in splits if each["type"] == "Split"]
    # those where each match is a word, and what is between two matches another one
    patterns = [each["pattern"].get("Regex") for each in found if each["behavior"] == "Isolated" and not each["invert"]]
    if last.get("use_regex", True):
        patterns.append(GPT2)
    if len(patterns) != 1 or len(splits) > 1:
        return None
    return PATTERNS.get((patterns[0], bool(content["model"].get("ignore_merges"))))


def _write_sentencepiece(
    writer: GGUFWriter, file: Path, tokenizer: PreTrainedTokenizerBase, size: int, allow_unnormalized: bool
) -> str:
    """Writes the SentencePiece model `file`: unigram models as T5's, BPE with bytes as Llama's."""
    from gguf import TokenType
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(file.read_bytes())
    trained, rules = model.trainer_spec, model.normalizer_spec
    kind = {1: "unigram", 2: "bpe"}.get(trained.model_type)
    if kind is None or trained.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise UserError(
            "format gguf: llama.cpp has SentencePiece's unigram and BPE models with the mark of a space at the start "
            "of a piece; this is another one"
        )
    if trained.byte_fallback != (kind == "bpe"):
        wanted = "with byte_fallback" if kind == "bpe" else "without byte_fallback"
        raise UserError(f"format gguf: llama.cpp has SentencePiece's {kind} models only {wanted}")
    if kind == "unigram" and rules.remove_extra_whitespaces and not rules.add_dummy_prefix:
        raise UserError(
            "format gguf: llama.cpp puts a space before each text where repeated spaces are removed; this model does "
            "not (add_dummy_prefix false)"
        )
    changes = bool(rules.precompiled_charsmap) or rules.remove_extra_whitespaces
    if kind == "bpe" and changes and not allow_unnormalized:
        raise UserError(
            f"format gguf: llama.cpp does not normalise text for SentencePiece's BPE models, and this one has "
            f"{rules.name} and removes repeated spaces, so that full-width and half-width characters get other ids; "
            "with --allow-unnormalized true the file is written, and you normalise texts before"
        )
    pieces = [each.piece for each in model.pieces]
    added = {number: piece for piece, number in tokenizer.get_vocab().items() if number >= len(pieces)}
    unused = range(len(pieces), size)
    special = [TokenType.CONTROL if number in added else TokenType.UNUSED for number in unused]
    # The numbers of SentencePiece's types are those of GGUF
    writer.add_tokenizer_model({"unigram": "t5", "bpe": "llama"}[kind])
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces + [added.get(number, f"[unused {number}]") for number in unused])
    writer.add_token_scores([each.score for each in model.pieces] + [0.0] * len(unused))
    writer.add_token_types([TokenType(each.type) for each in model.pieces] + special)
    writer.add_add_space_prefix(rules.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(rules.remove_extra_whitespaces)
    if kind == "unigram" and rules.precompiled_charsmap:
        writer.add_precompiled_charsmap(rules.precompiled_charsmap)
    return (
        'with `unicodedata.normalize("NFKC", text)`, and without repeated spaces' if kind == "bpe" and changes else ""
    )
