"""How a causal model goes on from a text: in a batch, or turn by turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.inference.loading import load, longest


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, by the names of Transformers' `GenerationConfig`; temperature 0 takes the likeliest."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 0


def is_causal(folder: Path) -> bool:
    """Whether the Transformers folder `folder` holds a model that writes on."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = [*(config.get("architectures") or ()), *(config.get("auto_map") or ())]
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


class Writer:
    """A causal model with its tokenizer, loaded once."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Loads the Transformers folder `folder`. Raises UserError where it does not load."""
        from transformers import AutoModelForCausalLM

        self.model, self.tokenizer = load(AutoModelForCausalLM, folder, trust=trust_remote_code)
        self.folder, self.longest = folder, longest(self.model)
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))

    def write(self, texts: Sequence[str], sampling: Sampling = Sampling()) -> list[str]:
        """How each of `texts` goes on, all in one batch; special tokens are left out.

        Raises:
            UserError: a text is too long for the model, or empty for a tokenizer without a beginning of its own.
        """
        return self._write([self.prompt(text) for text in texts], sampling)

    def answer(self, turns: Sequence[Mapping[str, str]], sampling: Sampling = Sampling()) -> str:
        """The next turn after `turns`, each with `role` and `content`: by the tokenizer's chat template, or without one
        as the text goes on. The oldest turns are forgotten where all are too long together."""
        kept = list(turns)
        room = None if self.longest is None else self.longest - min(sampling.max_new_tokens, self.longest // 2)
        while True:
            if self.has_template:
                ids = self.tokenizer.apply_chat_template(kept, add_generation_prompt=True, return_dict=False)
            else:
                ids = self.prompt("".join(turn["content"] for turn in kept))
            if room is None or len(ids) <= room or len(kept) == 1:
                return self._write([list(ids)], sampling)[0]
            kept = kept[2:] if len(kept) > 2 else kept[-1:]

    def prompt(self, text: str) -> list[int]:
        """The ids that `text` begins a document with: what the tokenizer gives, without what ends or frames it."""
        tokenizer = self.tokenizer
        ids: list[int] = list(tokenizer(text)["input_ids"])
        own = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > own and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            ids = ids[:-1]
        if len(ids) > own and ids[0] == tokenizer.cls_token_id != tokenizer.bos_token_id:
            ids = ids[1:]
        if not ids:
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            if start is None:
                raise UserError("the text is empty, and the tokenizer has no token that a document begins with")
            ids = [start]
        return ids

    def _write(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[str]:
        import torch

        width = max(map(len, prompts))
        most = sampling.max_new_tokens
        if self.longest is not None:
            if width >= self.longest:
                raise UserError(
                    f"a text of {width} tokens leaves no room to write: the model in {self.folder} takes "
                    f"{self.longest} in all"
                )
            most = min(most, self.longest - width)
        end = self.model.generation_config.eos_token_id
        pad = next((each for each in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if each is not None), 0)
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            drawn = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        torch.manual_seed(sampling.seed)
        written = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=most, pad_token_id=pad,
            eos_token_id=self.tokenizer.eos_token_id if end is None else end, **drawn,
        )  # fmt: skip
        return [self._new_text(prompt, row[width:].tolist()) for prompt, row in zip(prompts, written, strict=True)]

    def _new_text(self, prompt: list[int], new: list[int]) -> str:
        """The text of the ids `new` after those of `prompt`: what they add to it, so that a space between the two is
        right, and a character whose bytes lie in both."""
        before = self.tokenizer.decode(prompt, skip_special_tokens=True)
        whole = self.tokenizer.decode([*prompt, *new], skip_special_tokens=True)
        if whole.startswith(before):
            return str(whole[len(before) :])
        return str(self.tokenizer.decode(new, skip_special_tokens=True))
