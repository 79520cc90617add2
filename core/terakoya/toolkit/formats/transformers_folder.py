"""A Transformers folder with config, safetensors weights and tokenizer, which versions 4 and 5 load offline."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components.tokenizer import try_tokenizer
from terakoya.toolkit.formats.chat_end import write_chat_end
from terakoya.toolkit.formats.model_files import tokenizer_files
from terakoya.toolkit.tokenizers import sentencepiece_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CODE = """import transformers


class {name}(transformers.{name}):
    \"\"\"The class of Transformers, under a name by which AutoTokenizer finds it for any model.\"\"\"
"""
CLS_SEP_CODE = '''import transformers

if hasattr(transformers, "SentencePieceBackend"):

    class SentencePieceBackend(transformers.SentencePieceBackend):
        """The class of Transformers 5, under a name by which AutoTokenizer finds it for any model."""

else:

    class SentencePieceBackend(transformers.BertGenerationTokenizer):
        """The class of Transformers 5 with [CLS] and [SEP], for Transformers 4, which does not have it."""

        vocab_files_names = {"vocab_file": "tokenizer.model"}

        def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
            first = [self.cls_token_id, *token_ids_0, self.sep_token_id]
            return first if token_ids_1 is None else [*first, *token_ids_1, self.sep_token_id]

        def create_token_type_ids_from_sequences(self, token_ids_0, token_ids_1=None):
            first = [0] * (len(token_ids_0) + 2)
            return first if token_ids_1 is None else [*first, *[1] * (len(token_ids_1) + 1)]

        def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens=False):
            if already_has_special_tokens:
                return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
            first = [1, *[0] * len(token_ids_0), 1]
            return first if token_ids_1 is None else [*first, *[0] * len(token_ids_1), 1]
'''
RELATIVE_LENGTH = 512
"""The `model_max_length` for models whose positions have no end, such as T5's: that of the published T5 tokenizers."""
FORMER_SENTENCEPIECE = "BertGenerationTokenizer", "spiece.model"
"""The class of Transformers 4 and 5 that returns a SentencePiece model's own ids, and the file that it reads."""


def write(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Writes `model` into `folder`, with the tokenizer of `tokenizer_folder` fitted to it."""
    from terakoya.toolkit.architectures import attention
    from terakoya.toolkit.formats import model_folder

    attention.release(model)
    model_folder.write(model, folder)
    write_tokenizer(model, tokenizer_folder, folder)


def write_tokenizer(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Writes the tokenizer of `tokenizer_folder`, fitted to `model`, into `folder`, which has the model's config.json.

    AutoTokenizer of Transformers 4 and 5 loads from there a tokenizer with the same ids, and with the inputs that
    `model` accepts: `truncation=True` cuts texts to its positions, and `padding=True` works.
    """
    for file in tokenizer_files(tokenizer_folder):
        shutil.copyfile(file, folder / file.name)
    _fit_tokenizer(model, folder, tokenizer_folder)


def _fit_tokenizer(model: PreTrainedModel, folder: Path, original: Path) -> None:
    """Rewrites tokenizer_config.json in `folder` as `write_tokenizer` says; `original` is where the tokenizer is from.

    For some models, such as ModernBERT, AutoTokenizer ignores the class that tokenizer_config.json names, unless
    `auto_map` names it; so `auto_map` then names the same class. Models without token types get no token types.

    Code that came with the tokenizer is not run, and not named any more: the tokenizer loads without it. If the model
    has code of its own, this runs it. The code is that of the plugin which has just trained the model.
    """
    tokenizer = try_tokenizer(original)
    if tokenizer is None:
        return
    write_chat_end(folder, tokenizer)
    file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    settings.pop("auto_map", None)
    tokenizer_class = type(tokenizer)
    names = list(tokenizer.model_input_names)
    # A GPT-2 would look token types up in its word embeddings and add them; other decoders do not accept them.
    parameters = inspect.signature(type(model).forward).parameters
    has_no_types = (
        model.can_generate()
        or getattr(model.config, "type_vocab_size", 2) < 2
        or ("token_type_ids" not in parameters and "args" not in parameters)
    )
    judges_pairs = any(name.endswith("seq_relationship") for name, _ in model.named_modules())  # next sentences
    if has_no_types:
        names = [name for name in names if name != "token_type_ids"]
    elif "token_type_ids" not in names and judges_pairs:
        names.insert(1, "token_type_ids")  # trained with them, although Transformers 5 makes none for this class
    settings["model_input_names"] = names  # defaults of the same class differ between Transformers 4 and 5
    # not the tokenizer's own: it may be from a model with fewer positions
    settings["model_max_length"] = longest_input(model) or RELATIVE_LENGTH
    if tokenizer.pad_token is None and (pad := _choose_padding(tokenizer, model)):
        settings["pad_token"] = str(pad)  # an id that the model has; the attention mask says what is padding
    code = None
    if settings.get("tokenizer_class") == "SentencePieceBackend" and settings.get("legacy", True):
        if settings.get("special_tokens_pattern") == "none":
            import transformers

            name, model_file = FORMER_SENTENCEPIECE
            tokenizer_class = getattr(transformers, name)
            shutil.copyfile(folder / "tokenizer.model", folder / model_file)
            del settings["special_tokens_pattern"]
            tokens = {f"{role}_token": None for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
            settings = {**tokens, **settings, "tokenizer_class": name}
        elif settings.get("special_tokens_pattern") == "cls_sep":
            code = CLS_SEP_CODE
    if tokenizer_class.__name__ in sentencepiece_folder.FILES:  # its ids are the model's own
        sentencepiece_folder.check_decoding(tokenizer.sp_model, tokenizer)
    _use_former_names(settings)
    _write(file, settings)
    is_builtin = tokenizer_class.__module__.startswith("transformers.")
    trust = model._auto_class is not None
    if code is None and is_builtin and type(try_tokenizer(folder, trust_remote_code=trust)) is not tokenizer_class:
        code = CODE.format(name=tokenizer_class.__name__)
    if code is not None:
        (folder / "tokenization.py").write_text(code, encoding="utf-8")
        _write(file, settings | {"auto_map": {"AutoTokenizer": [f"tokenization.{tokenizer_class.__name__}", None]}})


def _choose_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> str | None:
    """Returns the token that fills up short texts for a `tokenizer` that has none for it: the one that the config of
    `model` names, by which a classifier finds the end of a text, if it is no ordinary piece; else another special
    token."""
    number = getattr(model.config, "pad_token_id", None)
    if number in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
        return str(tokenizer.convert_ids_to_tokens(number))
    return tokenizer.unk_token or tokenizer.eos_token or tokenizer.sep_token


def _use_former_names(settings: dict[str, Any]) -> None:
    """Gives what Transformers 5 has renamed in tokenizer_config.json the names that 4 knows and 5 still reads."""
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):  # Transformers 4 has an object of named tokens here
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def longest_input(model: PreTrainedModel) -> int | None:
    """The largest number of tokens that `model` accepts, or is configured for if its positions are relative alone, as
    DeBERTa's may be; None if its config does not say, as T5's."""
    named = (getattr(model.config, each, None) for each in ("max_position_embeddings", "n_positions"))
    length: int | None = next(filter(None, named), None)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if length is not None and getattr(table, "padding_idx", None) is not None:  # RoBERTa counts from padding + 1
        length -= table.padding_idx + 1  # type: ignore[union-attr]
    return length
