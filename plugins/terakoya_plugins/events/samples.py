"""Tries the model on texts of your own at each validation, so that one sees it learn.

A text with the tokenizer's mask token is filled in by a masked language model; any other is continued by a causal one.
The answers go to the screen, to metrics.jsonl (`"kind": "sample"`), to the trackers that show texts, and to the report.
No random number is drawn, and training is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin, Validations
from terakoya.components.run import Run
from terakoya.components.tokenizer import encode_texts, load_tokenizer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Samples(EventPlugin):
    """Fills in or continues `texts` at each validation, on rank 0 alone."""

    texts: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """The texts, such as `"東京は日本の[MASK]です。"` for a masked model and `"昔々、"` for a causal one."""
    top: PositiveInt = 3
    """How many tokens are shown for each mask. Unit: tokens."""
    max_new_tokens: PositiveInt = 32
    """How many tokens continue a text. Unit: tokens."""

    test_settings: ClassVar[Mapping[str, Any]] = {"texts": ["a"]}

    def start(self, run: Run) -> EventListener:
        return _Listener(self)


class _Listener(EventListener):
    def __init__(self, settings: Samples) -> None:
        self.settings = settings
        self.tokenizer: Any = None

    def run_started(self, run: Run) -> None:
        if run.rank != 0:
            return
        if not run.holds_whole_model:
            run.warn("events.samples: each process holds a part of the model only; there are no samples")
            return
        self.tokenizer = load_tokenizer(run.tokenizer_folder)
        models = run.objective.exports(run.module)
        for text in self.settings.texts:
            model, length = _choose(models, self._is_masked(text)), len(self._encode(text))
            longest = getattr(model and model.config, "max_position_embeddings", None)
            if longest and length >= longest:
                raise UserError(f'events.samples.texts: expected texts below {longest} tokens, got {length}: "{text}"')
        unanswered = [text for text in self.settings.texts if _choose(models, self._is_masked(text)) is None]
        if unanswered:
            mask = self.tokenizer.mask_token
            advice = f"a masked model needs {mask} in them" if mask else "the model does not continue texts"
            run.warn(f"events.samples: nothing can be said about {unanswered}: {advice}")

    def validation_finished(self, run: Run, values: Validations) -> None:
        if self.tokenizer is None:
            return
        models = run.objective.exports(run.module)
        shown = []
        for text in self.settings.texts:
            masked = self._is_masked(text)
            model = _choose(models, masked)
            if model is None:
                continue
            with _for_inference(model):
                answer = self._fill(model, text, run) if masked else self._continue(model, text, run)
            run.write("sample", text=text, **answer)
            words = [" ".join(f"{token} {share:.0%}" for token, share in each) for each in answer.get("masks", ())]
            line = f"{text} → {answer.get('continuation') or ' | '.join(words)}"
            run.print(f"step {run.step:,}  sample  {line}")
            shown.append(line)
        if shown:
            run.write_text("samples", "\n".join(shown))

    def _is_masked(self, text: str) -> bool:
        return bool(self.tokenizer.mask_token) and self.tokenizer.mask_token in text

    def _fill(self, model: PreTrainedModel, text: str, run: Run) -> dict[str, Any]:
        """Returns the likeliest tokens of each mask, with probabilities: {"masks": [[[token, share], ...], ...]}."""
        import torch

        ids = self._encode(text)
        output = model(input_ids=torch.tensor([ids], device=run.device))
        logits = output.logits if hasattr(output, "logits") else output.prediction_logits
        of_masks = [logits[0, place] for place, id in enumerate(ids) if id == self.tokenizer.mask_token_id]
        best = torch.stack(of_masks).float().cpu().softmax(-1).topk(self.settings.top)
        masks = [
            [
                [self.tokenizer.convert_ids_to_tokens(token), round(share, 4)]
                for token, share in zip(tokens, shares, strict=True)
            ]
            for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return {"masks": masks}

    def _continue(self, model: PreTrainedModel, text: str, run: Run) -> dict[str, Any]:
        """Returns the likeliest continuation, token by token: {"continuation": text}."""
        import torch

        ids = self._encode(text)
        begin, end = len(ids), self.tokenizer.eos_token_id
        longest = int(getattr(model.config, "max_position_embeddings", 0) or 0)
        for _ in range(self.settings.max_new_tokens):
            if longest and len(ids) >= longest:
                break
            token = int(model(input_ids=torch.tensor([ids], device=run.device)).logits[0, -1].argmax())
            if token == end:
                break
            ids.append(token)
        return {"continuation": self.tokenizer.decode(ids[begin:])}

    def _encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without an end: a text to continue is not finished."""
        ids = encode_texts(lambda texts: self.tokenizer(texts[0]), [text])["input_ids"]
        if not self._is_masked(text) and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]
        return list(ids)


def _choose(models: Mapping[str, PreTrainedModel], masked: bool) -> PreTrainedModel | None:
    """Returns the first of `models` that fills in masks, or continues texts; None without one."""
    for model in models.values():
        name = type(model).__name__
        if ("MaskedLM" in name or "PreTraining" in name) if masked else ("CausalLM" in name or "LMHead" in name):
            return model
    return None


@contextmanager
def _for_inference(model: PreTrainedModel) -> Iterator[None]:
    """Runs the block without dropout and gradients, with the attention of plain Transformers."""
    import torch

    training = {module for module in model.modules() if module.training}
    attention = model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            yield
    finally:
        model.config._attn_implementation = attention
        for module in training:
            module.training = True


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"samples": Samples}
