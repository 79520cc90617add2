"""Runs a GGUF file in llama.cpp, through llama-cpp-python, and compares it with the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.log import translated
from terakoya.toolkit.formats import other_programs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FLOAT32 = 0
"""GGML's number of float32, for the kept keys and values, which are float16 otherwise."""
GELU_TOLERANCE = 1e-3
"""The limit for GPT-2 and Gemma 3, whose GELU llama.cpp's code for CPUs reads from a table of float16: logits move by
some 3e-4."""
TABLE_TOLERANCE = 1e-5
"""The limit for the better half of the tokens where the model computes GELU from the same table."""
GELU_LAYERS = {"gpt2": "act", "gemma3_text": "act_fn"}
"""The families with GELU, and the attribute that holds it."""
LENGTH = 64
"""Tokens of a text that are compared."""


def compare(file: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, normalize: bool) -> list[str]:
    """Returns what was compared, a sentence each.

    Args:
        normalize: whether both get normalised texts, as llama.cpp does not normalise them as the tokenizer does; what
            is left of differences between ids is then counted and no error.

    Raises:
        UserError: other ids, unless `normalize`, or other logits.
    """
    import unicodedata

    import numpy as np
    import torch
    from llama_cpp import Llama

    length = min(LENGTH, model.config.max_position_embeddings)
    program = Llama(
        str(file), n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False,
        type_k=FLOAT32, type_v=FLOAT32, flash_attn=False, n_gpu_layers=0,
    )  # fmt: skip
    others, logits, inputs = [], [], []
    for text in other_programs.TEXTS:
        if normalize:
            text = " ".join(unicodedata.normalize("NFKC", text).split())
        ids = [int(number) for number in tokenizer(text)["input_ids"]]
        if program.tokenize(text.encode(), add_bos=True, special=True) != ids:
            others.append(text)
        inputs.append(ids[:length])
        program.reset()
        program.eval(inputs[-1])
        logits.append(np.array(program.scores[: len(inputs[-1])]))
    program.close()
    if others and not normalize:
        raise UserError(f"llama.cpp: other ids than the tokenizer's for {others[0]!r}; nothing was written")

    def compare_logits(name: str, choose: Callable[[NDArray[Any]], NDArray[Any]], tolerance: float) -> str:
        with torch.no_grad():
            expected = [model.float().eval()(torch.tensor([ids])).logits[0].numpy() for ids in inputs]
        got, wanted = np.concatenate(logits), np.concatenate(expected)
        kept = choose(np.abs(got - wanted).max(-1))
        return other_programs.compare_outputs("llama.cpp", name, got[kept], wanted[kept], tolerance=tolerance)

    same = len(inputs) - len(others)
    sentences = [translated(f"compared with llama.cpp: the ids of {same} of {len(inputs)} texts are the same")]
    if model.config.model_type not in GELU_LAYERS:
        return [*sentences, compare_logits("logits", np.argsort, other_programs.TOLERANCE)]
    sentences.append(compare_logits("logits, with its GELU in float16,", np.argsort, GELU_TOLERANCE))
    use_tabled_gelu(model)
    # A value between two entries of the table may take the other one; a token has many values, and most have none
    compare_logits("logits", lambda differences: np.argsort(differences)[: len(differences) // 2], TABLE_TOLERANCE)
    return sentences


def use_tabled_gelu(model: PreTrainedModel) -> None:
    """Makes `model` compute its GELU as llama.cpp does on a CPU: from a table of float16 between -10 and 10."""
    from torch import nn
    from torch.nn import functional

    class TabledGelu(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            exact = functional.gelu(hidden.half().float(), approximate="tanh").half().float()
            return exact.where(hidden.abs() < 10, hidden.clamp(min=0))

    name = GELU_LAYERS[model.config.model_type]
    for module in list(model.modules()):
        if hasattr(module, name):
            setattr(module, name, TabledGelu())
