"""Writes a causal model and its tokenizer as one GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.components import Exporter
from terakoya.errors import UserError
from terakoya.log import translated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "model.gguf"
README = """# {name} for llama.cpp

```python
from llama_cpp import Llama

model = Llama("FOLDER/model.gguf", n_ctx={length})
print(model("図書館で", max_tokens=50)["choices"][0]["text"])
```

or `llama-cli -m FOLDER/model.gguf -p "図書館で" -n 50`. The tokenizer is in the file; nothing else is needed.

All numbers are float32. Smaller files: `llama-quantize model.gguf model-q8_0.gguf q8_0` of llama.cpp.{normalize}
"""
NORMALIZE = """

llama.cpp does not normalise texts for this tokenizer: do it before, {how}."""


class GgufExporter(Exporter):
    """A GPT-2, Llama, Mistral, Qwen3, OLMo 2 or Gemma 3 for llama.cpp, in float32, of which `llama-quantize` makes
    smaller files."""

    for_transformers = False

    allow_unnormalized: bool = False
    """Whether to write a tokenizer whose normalisation of text llama.cpp does not have."""

    def check(self) -> None:
        from terakoya.toolkit.formats.other_programs import require_libraries

        require_libraries("gguf", "gguf", ["gguf"])

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes the only model of `models`.

        Raises:
            UserError: several models, or a model or a tokenizer that llama.cpp does not have.
        """
        import gguf

        from terakoya_plugins.formats.gguf import families, vocabulary, weights

        if len(models) != 1:
            raise UserError(f"format gguf: expected one model, got {', '.join(sorted(models))}; choose one with --only")
        model = next(iter(models.values()))
        families.check_model(model)
        writer = gguf.GGUFWriter(out / FILE, families.NAMES[model.config.model_type])
        weights.write_settings(writer, model)
        how = vocabulary.write_vocabulary(
            writer, tokenizer_folder, model.config.vocab_size, allow_unnormalized=self.allow_unnormalized
        )
        for name, weight in weights.tensors(model):
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        text = README.format(
            name=type(model).__name__,
            length=model.config.max_position_embeddings,
            normalize=NORMALIZE.format(how=how) if how else "",
        )
        (out / "README.md").write_text(text, encoding="utf-8")

    def compare(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> Sequence[str]:
        """Implements `Exporter.compare`: ids and logits of llama.cpp, if llama-cpp-python is installed."""
        if importlib.util.find_spec("llama_cpp") is None:
            return [translated("not compared with llama.cpp: pip install llama-cpp-python, which compiles for a while")]
        from terakoya.components.tokenizer import load_tokenizer
        from terakoya_plugins.formats.gguf import llama_cpp

        (model,) = models.values()
        tokenizer = load_tokenizer(tokenizer_folder)
        return llama_cpp.compare(out / FILE, model, tokenizer, normalize=self.allow_unnormalized)
