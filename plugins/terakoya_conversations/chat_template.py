"""Chat templates turn a conversation into the text that a model reads.

A template is one of Hugging Face's (https://huggingface.co/docs/transformers/chat_templating), in Jinja; the text
between `{% generation %}` and `{% endgeneration %}` is what a model learns to write. The template of a store is copied
into checkpoints and exports, so that users of the model write prompts in the form of its training data.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.process_pool import time_limit
from terakoya_conversations.conversations import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 10.0
"""Time for one conversation; the longest real ones take milliseconds."""
OWN = "chat"
"""Name of the tokenizer's own template."""
BUILT_IN = ("alpaca", "alpaca_en")
_FOLDER = Path(__file__).parent / "chat_templates"
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NAME = "pp{}qq"

logger = logging.getLogger("terakoya")

Span = tuple[int, int]
"""Characters [start, stop) of a text."""


class TemplateError(Exception):
    """The template cannot render a conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """The `text` of a template, and the `name` that selected it: `chat`, one of `BUILT_IN`, or a file name."""

    name: str
    text: str

    @property
    def fingerprint(self) -> str:
        """Hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def create_renderer(self, tokenizer: PreTrainedTokenizerBase) -> Renderer:
        """Returns a renderer that renders as `tokenizer.apply_chat_template` does. Raises UserError if the template
        cannot be used."""
        return Renderer(self, tokenizer)


def find_template(wanted: str | None, tokenizer: PreTrainedTokenizerBase, folder: Path) -> ChatTemplate:
    """Returns the template `wanted` for the `tokenizer` in `folder`; None means the tokenizer's own template if it has
    one, else `alpaca`. Warns if a model cannot learn all that it could from the template.

    Raises:
        UserError: the tokenizer has no template of its own, the file does not exist, the template is invalid or omits
            messages, or the tokenizer has no token that could end an answer.
    """
    template = _read_template(wanted, tokenizer, folder)
    renderer = template.create_renderer(tokenizer)
    if not renderer.ends_answers:
        logger.warning("template %s writes nothing after an answer: the model will not learn to stop", template.name)
    if not renderer.has_prompt:
        logger.warning(
            "template %s has no add_generation_prompt: the model learns the text before an answer as a part of it",
            template.name,
        )
    return template


def _read_template(wanted: str | None, tokenizer: PreTrainedTokenizerBase, folder: Path) -> ChatTemplate:
    own = getattr(tokenizer, "chat_template", None)
    if wanted == OWN or (wanted is None and own):
        if not own:
            raise UserError(
                f"{folder}: --template {OWN}: expected a tokenizer with a chat template of its own, this one has none; "
                f"choose another with --template {'|'.join(BUILT_IN)}, or a file of your own: --template FILE.jinja"
            )
        return ChatTemplate(OWN, tokenizer.get_chat_template())
    if wanted is None or wanted in BUILT_IN:
        return _read_built_in(wanted or BUILT_IN[0], tokenizer, folder)
    file = Path(wanted)
    if not file.is_file():
        raise UserError(
            f"--template: expected {OWN} (the tokenizer's own), {', '.join(BUILT_IN)} or a Jinja file, got {wanted}, "
            "which is no file"
        )
    try:
        return ChatTemplate(file.name, file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: expected a template in UTF-8, got something else: {error}") from None


def _read_built_in(name: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> ChatTemplate:
    """Returns the built-in template `name`. It begins with the tokenizer's beginning-of-sequence token if the tokenizer
    adds this token to texts."""
    if tokenizer.eos_token is None and tokenizer.sep_token is None:
        raise UserError(
            f"{folder}: --template {name}: expected a tokenizer with an end-of-sequence token (or [SEP]) to end "
            "answers with, this one has neither; name one in its tokenizer_config.json, or use a template of your own"
        )
    text = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
    return ChatTemplate(name, "{{- bos_token -}}\n" + text if begins else text)


class Renderer:
    """Renders conversations with a template and the special tokens of a tokenizer.

    Attributes:
        has_prompt: whether the template has an `add_generation_prompt`.
        ends_answers: whether the template writes something after an answer.
    """

    def __init__(self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises UserError for a template that is invalid or omits messages."""
        self._template = template
        self._marked = bool(_MARKED.search(template.text))
        self._tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        user, answer, source = (_NAME.format(name) for name in ("user", "answer", "input"))
        question: Message = {"role": "user", "content": user}
        try:
            text, spans = self.render([question, {"role": "assistant", "content": answer}])
            with_input, _ = self.render([{**question, "input": source}])
            prompt = self.prompt([question])
        except TemplateError as error:
            raise UserError(f"--template {template.name}: cannot be used: {error}") from error
        self._takes_input = source in with_input
        if user not in text or answer not in text:
            raise UserError(
                f"--template {template.name}: expected a template that writes every message, got this for a question "
                f"and its answer: {text!r}"
            )
        self.has_prompt = prompt != self.render([question])[0]
        self.ends_answers = text[text.rindex(answer) + len(answer) :].strip() != ""
        if spans is not None and not any(answer in text[start:stop] for start, stop in spans):
            raise UserError(
                f"--template {template.name}: expected the answer between its generation and endgeneration, got "
                f"{[text[start:stop] for start, stop in spans]}"
            )

    def render(self, turns: Sequence[Message]) -> tuple[str, list[Span] | None]:
        """Returns the text of `turns`, and the spans that the template marks as answers, None if it has no marks.

        Raises:
            TemplateError: with the message of the template.
        """
        texts, spans = self._call_jinja(turns, add_generation_prompt=False, return_assistant_tokens_mask=self._marked)
        return texts[0], [(int(start), int(stop)) for start, stop in spans[0]] if self._marked else None

    def prompt(self, turns: Sequence[Message]) -> str:
        """Returns the text that asks a model for the answer to `turns`. Raises TemplateError."""
        return str(self._call_jinja(turns, add_generation_prompt=True)[0][0])

    def join_inputs(self, turns: Sequence[Message]) -> list[Message]:
        """Returns `turns` with each `input` joined to its `content`, if the template does not use `input`."""
        if self._takes_input:
            return list(turns)
        return [
            {"role": turn["role"], "content": "\n\n".join([turn["content"], turn["input"]])}
            if "input" in turn
            else turn
            for turn in turns
        ]

    def _call_jinja(self, turns: Sequence[Message], **options: bool) -> Any:
        from jinja2 import exceptions
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with time_limit(RENDER_SECONDS):
                return render_jinja_template(
                    conversations=[list(turns)], chat_template=self._template.text, **options, **self._tokens
                )
        except TimeoutError as error:
            raise UserError(
                f"--template {self._template.name}: expected a template that renders a conversation at once; that of "
                f"{len(turns)} messages {error}. Look for a loop in it that does not end"
            ) from None
        except (exceptions.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise TemplateError(f"{where}{error}") from error
