"""Which files of a folder belong to its model: they do not go along where its tokenizer is copied to another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SCORES = "terakoya_scores.json"
"""The file of a model's folder with what was measured of it: of a task its scores, which `upload` puts on the card."""
WEIGHTS = (
    "*.safetensors", "*pytorch_model*.bin", "adapter_model.bin", "tf_model*", "flax_model*", "*.ckpt", "*.pt", "*.pth",
    "*.h5", "*.msgpack", "*.onnx", "*.onnx.data", "*.gguf", "*.index.json",
)  # fmt: skip
"""Patterns of files with weights. Other files that end in .bin may be parts of a MeCab dictionary."""
ABOUT_ONE_MODEL = (
    "README.md", "training.svg", SCORES, "terakoya_files.json", "average.json",
    "training_args.bin", "trainer_state.json", "*_results.json",
)  # fmt: skip
"""Patterns of files that say what one model is, is made of and can do: its card, scores and digests. The last three are
those of Transformers' Trainer."""
SETTINGS = (
    "generation_config.json", "adapter_config.json", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
)  # fmt: skip
"""Settings of a model besides config.json, which is missing here: AutoTokenizer finds some tokenizers by it."""


def belongs_to_model(file: Path) -> bool:
    """Returns whether `file` belongs to a model and not to its tokenizer. A config.json may be of use to both."""
    return matches(file, (*WEIGHTS, *ABOUT_ONE_MODEL, *SETTINGS))


def matches(file: Path, patterns: Sequence[str]) -> bool:
    """Returns whether the name of `file` fits one of `patterns`."""
    return any(file.match(pattern) for pattern in patterns)


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of the tokenizer in `folder` that go next to another model, which keeps its own config.json."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name != "config.json" and not belongs_to_model(file)
    ]
