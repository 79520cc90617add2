"""Writes tiny exports of every architecture with every kind of tokenizer, and what terakoya computes with each.

python tools/older_transformers/write.py FOLDER

`read.py` reads them with another version of Transformers. FOLDER/ARCHITECTURE.HEAD.TOKENIZER is one export, or with
scaled rotary positions FOLDER/ARCHITECTURE+SCALING.HEAD.TOKENIZER; `expected.json` beside its files holds texts, their
ids and a text's logits.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fugashi
import torch
from torch import Tensor
from transformers import AutoTokenizer

from terakoya.components import Architecture, Head
from terakoya.corpus.corpus import Corpus
from terakoya.plugins import registry
from terakoya.plugins.create import create_component
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.formats import model_folder
from terakoya_tokenizer import BertJapaneseTokenizerFast

CORPUS = Path(__file__).resolve().parents[2] / "core" / "terakoya" / "corpus" / "demo_corpus.txt"
TEXTS = (
    "吾輩は猫である。名前はまだ無い。",
    "２０２６年１１月、ｶﾞｽと電気の料金が１２,３４５円になった。",
    "か\u3099き\u3099 ㍿ ①  二つの  空白 ",
    "The quick brown fox, it's 3.14 % of \"all\" ``dogs''.",
    "😀 絵文字と\t制御文字 𠮷野家",
    "昨日は雨が降ったので、図書館で本を読みながら友人を待っていた。彼女は電車の遅れで一時間も来なかった。",
    "",
)
PIECES = {"vocab_size": 1600, "character_coverage": 0.98}
TOKENIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mecab_wordpiece": ("mecab_wordpiece", {"vocab_size": 1000, "limit_alphabet": 400}),
    "mecab_character": ("mecab_character", {}),
    "byte_bpe": ("byte_bpe", {"vocab_size": 600}),
    "byte_bpe_padded": ("byte_bpe", {"vocab_size": 600, "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}),
    "sentencepiece": ("sentencepiece", PIECES),
    "sentencepiece_bytes": ("sentencepiece", {**PIECES, "model_type": "bpe", "byte_fallback": True}),
    "sentencepiece_bert": ("sentencepiece", {**PIECES, "special_tokens": "bert"}),
}
"""Name -> kind, settings."""
SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "d_model": 32, "embedding_size": 32, "intermediate_size": 64, "d_ff": 64, "d_kv": 8,
    "num_hidden_layers": 3, "num_layers": 2, "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 8, "sliding_window_pattern": 2, "local_attention": 16,
    "rotary_dim": 4, "max_position_embeddings": 96, "position_buckets": 16,
}  # fmt: skip
BASES: Mapping[str, float] = {
    "rope_theta": 50.0, "global_rope_theta": 70.0, "local_rope_theta": 60.0, "rope_local_base_freq": 40.0,
}  # fmt: skip
"""Far from Transformers' defaults, so that a base that is not read changes the logits."""
ONE_BASE: Mapping[str, Mapping[str, float]] = {
    "modernbert_decoder": {"global_rope_theta": 70.0, "local_rope_theta": 70.0},
}
"""The families whose layers all have one base in Transformers 4."""
SCALINGS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 24, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip
"""Rotary positions of families that have `rope_scaling`, each written with one tokenizer, `SCALED_TOKENIZER`."""
SCALED_TOKENIZER = "byte_bpe_padded"

fugashi.GenericTagger = functools.cache(fugashi.GenericTagger)  # it is never freed, and each maps the dictionary anew


def main(out: Path) -> None:
    """Writes everything into the new folder `out`."""
    model_folder.silence_logging()
    tokenizers = {
        name: _train(kind, settings, out / "tokenizers" / name) for name, (kind, settings) in TOKENIZERS.items()
    }
    for name in ("byte_bpe", "mecab_wordpiece"):
        tokenizers[f"{name}_saved"] = _save_again(tokenizers[name][0], out / "tokenizers" / f"{name}_saved")
    for architecture in registry().names("architectures"):
        component = registry().component("architectures", architecture)
        given = {**SIZES, **BASES, **ONE_BASE.get(architecture, {})}
        sizes = {name: value for name, value in given.items() if name in component.model_fields}
        for name, (source, kind) in tokenizers.items():
            _write_exports(f"{architecture}.{{head}}.{name}", component(**sizes), source, kind, out)
        if "rope_scaling" in component.model_fields:
            source, kind = tokenizers[SCALED_TOKENIZER]
            for name, scaling in SCALINGS.items():
                scaled = component(**sizes, rope_scaling=scaling)
                _write_exports(f"{architecture}+{name}.{{head}}.{SCALED_TOKENIZER}", scaled, source, kind, out)


def _write_exports(name: str, architecture: Architecture, source: Path, kind: Any, out: Path) -> None:
    """Writes an export of each head of `architecture` that can be trained with the tokenizer `kind` of `source`."""
    exporter = create_component("exporters", "huggingface", {}, where="format huggingface")
    vocabulary = kind.encoder(source).vocabulary
    for head in sorted(architecture.heads):
        if vocabulary.pad is None and head not in ("causal", "seq2seq"):
            continue  # terakoya refuses to train an encoder with such a tokenizer
        folder = out / name.format(head=head)
        model = _build(architecture, vocabulary, head)
        expected = describe(source, kind, architecture, model, head, TEXTS)
        exporter.export({"": model}, source, folder)
        (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False), encoding="utf-8")


def describe(
    source: Path, kind: Any, architecture: Architecture, model: Any, head: Head, texts: Sequence[str]
) -> Mapping[str, Any]:
    """Returns what `read.py` compares: what `model` and the tokenizer `kind` of the folder `source` make of `texts`,
    of which the sixth is the model's input."""
    loaded = kind.load(source)
    encoder = kind.encoder(source)
    ids = [list(map(int, loaded(text)["input_ids"])) for text in texts]
    pair = loaded(texts[0], texts[1], return_token_type_ids=True)  # 5 leaves them out for some classes
    return {
        "pair": {name: list(map(int, values)) for name, values in pair.items()},
        "texts": texts,
        "ids": ids,
        "plain": [encoder.encode([text]).ids.tolist() for text in texts],
        "auto": _auto_class(type(model)),
        "class": type(model).__name__,
        "input": ids[5],
        "logits": _logits(architecture, model, head, ids[5]).tolist(),
        **(_spans(source, texts) if loaded.__class__.__name__ == "BertJapaneseTokenizer" else {}),
        **({"library_offsets": _offsets(loaded, texts)} if loaded.is_fast else {}),
    }


def _auto_class(kind: type) -> str:
    """Returns the name of the class by which people load a model of the class `kind`."""
    ends = {
        "ForMaskedLM": "AutoModelForMaskedLM", "ForCausalLM": "AutoModelForCausalLM",
        "LMHeadModel": "AutoModelForCausalLM", "ForPreTraining": "AutoModelForPreTraining",
        "ForTokenClassification": "AutoModelForTokenClassification",
        "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    }  # fmt: skip
    return next((auto for end, auto in ends.items() if kind.__name__.endswith(end)), "AutoModel")


def _train(kind: str, settings: Mapping[str, Any], folder: Path) -> tuple[Path, Any]:
    tokenizer = create_component("tokenizers", kind, settings, where=f"tokenizer {kind}")
    tokenizer.train(Corpus([CORPUS]), folder)
    return folder, tokenizer


def _spans(folder: Path, texts: Sequence[str]) -> Mapping[str, Any]:
    """What the fast tokenizer of `terakoya_tokenizer` says of each text: where its tokens are, and the words they are
    in."""
    tokenizer = BertJapaneseTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    encoded = tokenizer(list(texts), return_offsets_mapping=True)
    return {"offsets": encoded["offset_mapping"], "words": [encoded.word_ids(row) for row in range(len(texts))]}


def _offsets(tokenizer: Any, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    offsets: list[list[tuple[int, int]]] = tokenizer(list(texts), return_offsets_mapping=True)["offset_mapping"]
    return offsets


def _save_again(folder: Path, out: Path) -> tuple[Path, Any]:
    """The tokenizer of `folder` with one more special token, as the Transformers of terakoya saves it."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(out)
    return out, create_component("tokenizers", "huggingface", {}, where="tokenizer huggingface")


def _build(architecture: Architecture, vocabulary: Any, head: Head) -> Any:
    """A model with weights large enough for positions to change the logits."""
    torch.manual_seed(7)
    model = architecture.build(vocabulary, head)
    attention.use(model, "sdpa")
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.05)
    return model.eval()


def _logits(architecture: Architecture, model: Any, head: Head, ids: list[int]) -> Tensor:
    """What objectives train: the logits, or the hidden states of a model that has none, (T, ...)."""
    row = torch.tensor([ids])
    batch = {"input_ids": row, "document_ids": torch.zeros_like(row), "position_ids": torch.arange(len(ids))[None]}
    if head == "seq2seq":
        batch |= {"decoder_input_ids": row.flip(1), "decoder_document_ids": torch.zeros_like(row)}
    with torch.no_grad():
        hidden = architecture.hidden(model, batch)
        if head == "discriminator":
            return architecture.replaced_logits(model, hidden)[0]
        return hidden[0] if head == "body" else architecture.logits(model, hidden)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
