"""Generates text with a causal model: continues texts in a batch, or replies in a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.components.tokenizer import encode_texts
from terakoya.errors import UserError
from terakoya.inference.loading import find_device, load_model_and_tokenizer, move
from terakoya.process_pool import time_limit
from terakoya.toolkit.formats.chat_end import TEMPLATE_SECONDS, add_chat_end
from terakoya.toolkit.formats.transformers_folder import longest_input


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, named as in Transformers' `GenerationConfig`; temperature 0 is greedy decoding."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 0


class TextGenerator:
    """A causal model with its tokenizer, loaded once."""

    def __init__(self, folder: Path, *, device: str | None = None, trust_remote_code: bool = False) -> None:
        """Loads the Transformers folder `folder` onto `device`, by default the first GPU, or the CPU. Raises UserError
        if it cannot be loaded, or there is no such device."""
        from transformers import AutoModelForCausalLM

        chosen = find_device(device)
        model, self.tokenizer = load_model_and_tokenizer(AutoModelForCausalLM, folder, trust=trust_remote_code)
        self.model = move(model, chosen)
        self.folder, self.max_length = folder, longest_input(self.model)
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))
        end = self.model.generation_config.eos_token_id
        self.ends = add_chat_end(self.tokenizer.eos_token_id if end is None else end, self.tokenizer)

    def generate(self, texts: Sequence[str], sampling: Sampling = Sampling()) -> list[str]:
        """Returns the continuation of each of `texts`, computed in one batch, without special tokens. Raises UserError
        if a text is too long for the model, or is empty and the tokenizer has no token that begins a document."""
        return self._generate([self.prompt_ids(text) for text in texts], sampling)

    def reply(self, turns: Sequence[Mapping[str, str]], sampling: Sampling = Sampling()) -> str:
        """Returns the next turn of a conversation after `turns`, each with `role` and `content`.

        The tokenizer's chat template formats the prompt; without a template, the turns are joined and continued. If the
        prompt is too long for the model, the oldest turns are left out.
        """
        kept = list(turns)
        limit = None
        if self.max_length is not None:
            limit = self.max_length - min(sampling.max_new_tokens, self.max_length // 2)
        while True:
            if self.has_template:
                ids = self._apply_template(kept)
            else:
                ids = self.prompt_ids("".join(turn["content"] for turn in kept))
            if limit is None or len(ids) <= limit or len(kept) == 1:
                return self._generate([list(ids)], sampling)[0]
            kept = kept[2:] if len(kept) > 2 else kept[-1:]

    def _apply_template(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            with time_limit(TEMPLATE_SECONDS):
                ids: list[int] = encode_texts(
                    lambda _: self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False),
                    [turns[-1]["content"]],
                )
        except (TimeoutError, TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UserError(f"{self.folder}: the chat template of its tokenizer cannot be used: {error}") from error
        return ids

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a prompt: those of `text`, with BOS if the tokenizer adds it, without tokens that end or frame a text.
        Raises UserError if `text` is empty and the tokenizer has no token that begins a document."""
        tokenizer = self.tokenizer
        ids: list[int] = list(encode_texts(lambda texts: tokenizer(texts[0]), [text])["input_ids"])
        plain_length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > plain_length and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            ids = ids[:-1]
        if len(ids) > plain_length and ids[0] == tokenizer.cls_token_id != tokenizer.bos_token_id:
            ids = ids[1:]
        if not ids:
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            if start is None:
                raise UserError("the text is empty, and the tokenizer has no token that begins a document")
            ids = [start]
        return ids

    def _generate(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[str]:
        import torch

        width = max(map(len, prompts))
        max_new_tokens = sampling.max_new_tokens
        if self.max_length is not None:
            if width >= self.max_length:
                raise UserError(
                    f"a text of {width} tokens leaves no room for new tokens: the model in {self.folder} accepts "
                    f"{self.max_length} in total"
                )
            max_new_tokens = min(max_new_tokens, self.max_length - width)
        special_ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        pad = next((number for number in special_ids if number is not None), 0)
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        torch.manual_seed(sampling.seed)
        generated = self.model.generate(
            ids.to(self.model.device), attention_mask=mask.to(self.model.device), max_new_tokens=max_new_tokens,
            pad_token_id=pad, eos_token_id=self.ends, **settings,
        )  # fmt: skip
        return [self._new_text(prompt, row[width:].tolist()) for prompt, row in zip(prompts, generated, strict=True)]

    def _new_text(self, prompt: list[int], new: list[int]) -> str:
        """The text that the ids `new` add to `prompt`.

        Decoding the two together gets two things right: a space between them, and a character whose bytes are in both.
        """
        before = self.tokenizer.decode(prompt, skip_special_tokens=True)
        whole = self.tokenizer.decode([*prompt, *new], skip_special_tokens=True)
        if whole.startswith(before):
            return str(whole[len(before) :])
        return str(self.tokenizer.decode(new, skip_special_tokens=True))
