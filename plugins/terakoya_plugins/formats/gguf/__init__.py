"""Exports GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), the one file that llama.cpp runs.

The package `gguf` of llama.cpp's authors has the writer, the names of the tensors and of the settings; the script that
converts Transformers folders is in no package. So the conversion is here, for the families that terakoya trains and
llama.cpp knows:

- `families`: which models these are, and what of a model llama.cpp does not have.
- `weights`: their settings and tensors.
- `vocabulary`: the tokenizer, for SentencePiece and byte-level BPE.
- `exporter`: the exporter `gguf`.
- `llama_cpp`: runs the file in llama.cpp, where llama-cpp-python is installed, and compares.
"""

from __future__ import annotations

from terakoya import hookimpl
from terakoya.components import Exporter
from terakoya_plugins.formats.gguf.exporter import GgufExporter


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    return {"gguf": GgufExporter}
