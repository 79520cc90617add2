"""Exports an encoder as a folder of sentence-transformers (https://sbert.net): one vector for each text.

The files are those of every version since 2.2: modules.json names the steps, each with its settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from terakoya import hookimpl
from terakoya.components import Exporter
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FORMAT = "sentence_transformers"
README = """# Vectors of texts

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER"{trust})
vectors = model.encode(["図書館で本を読む。", "雨が降っている。"])  # (2, {width})
print(model.similarity(vectors, vectors))
```

A vector is {pooling} of the last hidden states of a text's tokens{normalized}. Texts are cut after {length:,} tokens.
{tokenizer}

A model that has only been trained to fill in or to recognise words does not place similar texts near each other.
Fine-tune such a model on pairs of texts with sentence-transformers before you rely on similarities.
"""
POOLING = {"mean": "the mean", "cls": "the first", "max": "the maximum"}


class SentenceTransformersExporter(Exporter):
    """An encoder whose hidden states are pooled into one vector for each text."""

    for_transformers = False

    pooling: Literal["mean", "cls", "max"] = "mean"
    """How the hidden states of a text become one vector: their mean, the first one, or each dimension's maximum."""
    normalize: bool = True
    """Whether vectors have length 1."""

    def check(self) -> None:
        from terakoya.toolkit.formats.other_programs import require_libraries

        require_libraries(FORMAT, "sentence-transformers", ["sentence_transformers"])

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes each of `models` without its head.

        Raises:
            UserError: a model is no encoder.
        """
        from terakoya.components.tokenizer import load_tokenizer
        from terakoya.toolkit.formats import transformers_folder

        load_tokenizer(tokenizer_folder)  # refused where it needs code of its own, which `compare` would run
        for name, model in models.items():
            if model.config.is_encoder_decoder or model.can_generate():
                raise UserError(
                    f"format {FORMAT}: expected an encoder, got {type(model).__name__}, which continues texts"
                )
            folder = out / name
            transformers_folder.write(model.base_model, tokenizer_folder, folder)
            self._write_modules(model, folder)

    def compare(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> Sequence[str]:
        """Implements `Exporter.compare`: the vectors of sentence-transformers are those of the models."""
        import torch
        import transformers
        from sentence_transformers import SentenceTransformer

        from terakoya.components.tokenizer import load_tokenizer
        from terakoya.toolkit.formats import other_programs

        transformers.logging.set_verbosity_error()  # sentence-transformers loads a pooler, which it does not use
        sentences = []
        for name, model in models.items():
            tokenizer = load_tokenizer(out / name, trust_remote_code=True)
            inputs = other_programs.encode_texts(tokenizer)
            with torch.no_grad():
                hidden = model.base_model.float().eval()(**inputs).last_hidden_state
            theirs = SentenceTransformer(str(out / name), device="cpu", trust_remote_code=True, local_files_only=True)
            got = theirs.float().encode(list(other_programs.TEXTS), show_progress_bar=False)
            expected = self._pool(hidden, inputs["attention_mask"])
            sentences.append(other_programs.compare_outputs("sentence-transformers", "vectors", got, expected))
        return sentences

    def _pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Returns vectors (B, H) of `hidden` (B, T, H); `mask` (B, T) is 1 at tokens and 0 at padding."""
        import torch

        real = mask[..., None].bool()
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "max":
            pooled = hidden.masked_fill(~real, -torch.inf).amax(1)
        else:
            pooled = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(pooled) if self.normalize else pooled

    def _write_modules(self, model: PreTrainedModel, folder: Path) -> None:
        from terakoya.toolkit.formats.tokenizer_needs import describe_tokenizer

        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        length, width = int(settings["model_max_length"]), int(model.config.hidden_size)
        names = ["Transformer", "Pooling", *(["Normalize"] if self.normalize else [])]
        paths = ["", *(f"{index}_{name}" for index, name in enumerate(names) if index)]
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (name, path) in enumerate(zip(names, paths, strict=True))
        ]
        for path in paths[1:]:
            (folder / path).mkdir()
        modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", None: "mean_sqrt_len_tokens"}
        pooling: dict[str, Any] = {"word_embedding_dimension": width}
        pooling |= {f"pooling_mode_{name}": mode == self.pooling for mode, name in modes.items()}
        _write_json(folder / "modules.json", modules)
        _write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
        _write_json(folder / paths[1] / "config.json", pooling)
        text = README.format(
            trust=", trust_remote_code=True" if "auto_map" in settings else "",
            width=width,
            pooling=POOLING[self.pooling],
            normalized=", and has length 1" if self.normalize else "",
            length=length,
            tokenizer=describe_tokenizer(settings),
        )
        (folder / "README.md").write_text(text, encoding="utf-8")


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    return {FORMAT: SentenceTransformersExporter}
