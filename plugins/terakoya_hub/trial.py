"""A model as others load it: its class, and what it answers, from a folder and from the Hub."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terakoya.components.tokenizer import encode_texts, mecab_arguments
from terakoya.errors import UserError

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in `file`."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def load_class(folder: Path) -> str:
    """Name of the Transformers class that loads the model in `folder`; an Auto class if the folder contains code."""
    config = read_object(folder / CONFIG)
    autos = [name for name in config.get("auto_map", {}) if name.startswith("AutoModel")]
    names = autos or config.get("architectures") or []
    if not names:
        raise UserError(f"{folder / CONFIG}: expected the model's class in architectures, found none")
    return str(names[0])


def outputs_of(
    source: Path | str,
    text: str,
    *,
    subfolder: str = "",
    revision: str | None = None,
    trust: bool,
    beside: Sequence[str] = (),
) -> bytes:
    """Returns the bytes of the model's logits for `text`.

    A repository is loaded through an empty cache, so that every file comes from the Hub.

    Args:
        source: a folder, or the name of a repository, whose commit is `revision`.
        beside: files of the repository that the tokenizer reads and Transformers does not fetch.

    Raises:
        UserError: the model or its tokenizer cannot be loaded.
    """
    import torch
    import transformers
    from huggingface_hub import hf_hub_download

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as cache:
        options: dict[str, Any] = {"cache_dir": cache}
        local = {"local_files_only": True}
        options |= local if isinstance(source, Path) else {"subfolder": subfolder, "revision": revision}
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust, **options)
            names = [name for name in getattr(config, "auto_map", None) or {} if name.startswith("AutoModel")]
            kind = getattr(transformers, (names or config.architectures)[0])
            wanted = [TOKENIZER, *beside] if beside else []
            fetched = [Path(hf_hub_download(str(source), name, **options)) for name in wanted]
            words = mecab_arguments(fetched[0].parent if fetched else Path(source))
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust, **options, **words)
            model = kind.from_pretrained(source, trust_remote_code=trust, **options).eval()
        except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
            raise UserError(f"{source}: expected a model and a tokenizer that Transformers loads: {error}") from error
        longest = getattr(model.config, "max_position_embeddings", None) or 64
        table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        if table is not None and table.padding_idx is not None:
            longest -= table.padding_idx + 1  # RoBERTa's positions start after the padding id
        options = {"return_tensors": "pt", "truncation": True, "max_length": min(64, longest)}
        inputs = encode_texts(lambda texts: tokenizer(texts[0], **options), [text])
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
            inputs.pop("token_type_ids", None)
        if kind.__name__.endswith("ForMultipleChoice"):  # (texts, choices, tokens): the text is the only choice
            inputs = {name: each[:, None] for name, each in inputs.items()}
        with torch.no_grad():
            logits = model(**inputs)[0]
        return bytes(logits.float().contiguous().numpy().tobytes())
