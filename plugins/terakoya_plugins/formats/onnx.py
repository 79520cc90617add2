"""Exports ONNX (https://onnx.ai) with torch.onnx, for ONNX Runtime and what is built on it.

Files and names are those of Optimum: `model.onnx`, or `encoder_model.onnx` and `decoder_model.onnx`, whose inputs and
outputs have Transformers' names. torch's older exporter by tracing is not used: it drops the attention mask of models
that make it from the mask's values.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya import hookimpl
from terakoya.components import Exporter
from terakoya.toolkit.attributes import replace_level

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
DECODER_INPUTS = {
    "input_ids": "decoder_input_ids",
    "encoder_attention_mask": "attention_mask",
    "encoder_hidden_states": "encoder_outputs",
}
"""Input of decoder_model.onnx -> what Transformers calls it."""
LARGE_FILE = 1_500_000_000
"""Bytes of weights from which they get a file of their own: a file in ONNX's format has less than 2 GiB."""
README = """# {name} in ONNX

```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})
session = onnxruntime.InferenceSession("FOLDER/{file}")
names = [each.name for each in session.get_inputs()]
text = tokenizer(["図書館で本を読む。"], padding=True, truncation=True, return_tensors="np")
outputs = session.run(None, {{name: text[name] for name in names}})
```

{tokenizer}

{files}

All numbers are float32; batch and length are free, up to {length:,} tokens.{cache}
"""
WITHOUT_CACHE = " Keys and values of earlier tokens are not kept: each new token computes the whole text again."


@dataclass(frozen=True)
class Graph:
    """One file: a module of torch and the inputs that it is recorded with.

    Attributes:
        file: its name.
        module: takes the inputs by name and returns the outputs in their order.
        inputs: name -> an example (B, T, ...).
        outputs: the names of the outputs, each (B, ...).
    """

    file: str
    module: nn.Module
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str]


class OnnxExporter(Exporter):
    """A model for ONNX Runtime, with its config and tokenizer beside it."""

    for_transformers = False

    def check(self) -> None:
        from terakoya.toolkit.formats.other_programs import require_libraries

        require_libraries("onnx", "onnx", LIBRARIES)

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        import torch

        from terakoya.components.tokenizer import load_tokenizer
        from terakoya.toolkit.architectures import attention
        from terakoya.toolkit.formats import transformers_folder

        load_tokenizer(tokenizer_folder)  # refused where it needs code of its own, which would run below
        for name, model in models.items():
            folder = out / name
            attention.release(model)
            if model.config.is_encoder_decoder:  # torch.onnx fails at the shapes of T5's fused attention
                model.set_attn_implementation("eager")
            model.float().eval()
            model.config.save_pretrained(folder)
            transformers_folder.write_tokenizer(model, tokenizer_folder, folder)
            size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            graphs = make_graphs(model, folder)
            for graph in graphs:
                shapes = {key: {axis: torch.export.Dim.DYNAMIC for axis in (0, 1)} for key in graph.inputs}
                with _silent():
                    torch.onnx.export(
                        graph.module, (), str(folder / graph.file), kwargs={"inputs": dict(graph.inputs)},
                        input_names=list(graph.inputs), output_names=list(graph.outputs),
                        dynamic_shapes={"inputs": shapes}, dynamo=True, external_data=size >= LARGE_FILE, verbose=False,
                    )  # fmt: skip
            _write_readme(model, graphs, folder)

    def compare(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> Sequence[str]:
        """Implements `Exporter.compare`: outputs of ONNX Runtime are those of the models at every token."""
        import onnxruntime
        import torch

        from terakoya.toolkit.formats.other_programs import compare_outputs

        sentences: list[str] = []
        for name, model in models.items():
            for graph in make_graphs(model, out / name):
                session = onnxruntime.InferenceSession(str(out / name / graph.file), providers=["CPUExecutionProvider"])
                # A key that a graph does not need is no input of it
                needed = {each.name for each in session.get_inputs()}
                compared: dict[str, str] = {}
                for inputs in ({key: value[-1:] for key, value in graph.inputs.items()}, graph.inputs):
                    with torch.no_grad():
                        expected = graph.module(inputs)
                    given = {key: value.numpy() for key, value in inputs.items() if key in needed}
                    for key, theirs, ours in zip(graph.outputs, session.run(None, given), expected, strict=True):
                        real: Any = slice(None)
                        if "attention_mask" in inputs and ours.shape[:2] == inputs["attention_mask"].shape:
                            real = inputs["attention_mask"].bool().numpy()
                        compared[key] = compare_outputs(
                            f"ONNX Runtime ({graph.file})", key, theirs[real], ours.numpy()[real]
                        )
                sentences.extend(compared.values())
        return sentences


def make_graphs(model: PreTrainedModel, folder: Path) -> list[Graph]:
    """Returns what `model` is made of in ONNX; the tokenizer of `folder` makes the inputs."""
    import torch
    from torch import nn

    from terakoya.components.tokenizer import load_tokenizer
    from terakoya.toolkit.formats import other_programs

    class Outputs(nn.Module):
        """Gives `part` the inputs by Transformers' names and returns the tensors among its outputs."""

        def __init__(self, part: nn.Module, **further: Any) -> None:
            super().__init__()
            self.part, self.further = part, further

        def compute_outputs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
            found = self.part(**inputs, **self.further)
            return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}

        def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            return tuple(self.compute_outputs(inputs).values())

    class Decoder(Outputs):
        def compute_outputs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
            given = {theirs: inputs[name] for name, theirs in DECODER_INPUTS.items()}
            given["encoder_outputs"] = (given["encoder_outputs"],)
            return {"logits": super().compute_outputs(given)["logits"]}

    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    texts = other_programs.encode_texts(tokenizer)
    further = {"use_cache": False} if model.can_generate() else {}

    def make_graph(file: str, module: Outputs, inputs: Mapping[str, Tensor]) -> Graph:
        with torch.no_grad():
            return Graph(file, module, inputs, list(module.compute_outputs(inputs)))

    if not model.config.is_encoder_decoder:
        return [make_graph("model.onnx", Outputs(model, **further), texts)]
    encoder = Outputs(model.get_encoder())
    with torch.no_grad():
        (hidden,) = encoder(texts)
    inputs = {
        "input_ids": texts["input_ids"][:, : max(2, texts["input_ids"].shape[1] // 2)],
        "encoder_attention_mask": texts["attention_mask"],
        "encoder_hidden_states": hidden,
    }
    return [
        make_graph("encoder_model.onnx", encoder, texts),
        make_graph("decoder_model.onnx", Decoder(model, **further), inputs),
    ]


def _write_readme(model: PreTrainedModel, graphs: Sequence[Graph], folder: Path) -> None:
    from terakoya.toolkit.formats.tokenizer_needs import describe_tokenizer

    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    files = [f"- `{each.file}`: {', '.join(each.inputs)} -> {', '.join(each.outputs)}" for each in graphs]
    text = README.format(
        name=type(model).__name__,
        file=graphs[0].file,
        trust=", trust_remote_code=True" if "auto_map" in settings else "",
        tokenizer=describe_tokenizer(settings),
        files="\n".join(files),
        length=int(settings["model_max_length"]),
        cache=WITHOUT_CACHE if model.can_generate() else "",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps the exporter's remarks on what it does, which concern its developers, from the screen."""
    quiet = replace_level("torch.onnx", logging.ERROR)
    with quiet, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    return {"onnx": OnnxExporter}
