"""`terakoya try`: shows the top words for each [MASK], the tokens that a discriminator considers replaced, or generated
text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from terakoya_inference.generation import Sampling, TextGenerator
    from terakoya_inference.predictions import TokenPrediction

NO_TEMPLATE = "; the tokenizer has no chat template: the model continues the whole conversation as plain text"
TASK_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
"""Endings of the classes that `terakoya finetune` writes."""


@dataclass(frozen=True, kw_only=True)
class TryOptions:
    """The options of `try`."""

    folder: Annotated[Path, typer.Argument(help="An exported model, a run or a checkpoint.", metavar="DIR")]
    texts: Annotated[
        Sequence[str], typer.Argument(help='For example "東京は日本の[MASK]です。"', metavar="TEXT...")
    ] = ()
    top: Annotated[int, typer.Option(min=1, help="Number of words to show for each mask.")] = 5
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 64
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; lower is less random, 0 is greedy decoding.")
    ] = 0.8
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample among the most probable tokens that together have this share.")
    ] = 0.95
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many most probable tokens; 0: all.")] = 0
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0
    chat: Annotated[bool, typer.Option("--chat", help="Start an interactive chat.")] = False
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False


def command(options: TryOptions) -> None:
    """Try a model on a text.

    A masked model fills in each [MASK]. A discriminator marks the tokens that it considers replaced. A causal model
    continues one or several texts, or chats. An encoder-decoder generates its output for the text.
    """
    from terakoya.runs.finding import names_checkpoint

    try_texts(options)
    if names_checkpoint(options.folder):
        next_command.show(*next_command.export_words(options.folder))
    elif not options.chat:
        prompt = ("--prompt", options.texts[0]) if options.texts else ()
        next_command.show(*next_command.upload_words(options.folder, *prompt))


def _refuse_task_head(model: Path) -> None:
    """Raises UserError if the model in the folder `model` has the head of a task in the place of words."""
    for name in json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures") or ():
        if name.endswith(TASK_HEADS):
            raise UserError(
                f"{model}: {name} was fine-tuned for a task and gives no words: use it in Transformers, with "
                f'{name}.from_pretrained("{model}")'
            )


def try_texts(options: TryOptions) -> None:
    """Prints what the model in `folder` makes of `texts`. Raises UserError as `terakoya try` reports it."""
    from rich.text import Text

    from terakoya.inference.loading import MASK, find_model, find_models, is_causal
    from terakoya.log import new_console
    from terakoya_inference.generation import Sampling, TextGenerator

    console, texts = new_console(), [re.sub("［(MASK|ＭＡＳＫ)］", MASK, text) for text in options.texts]
    for text in texts:
        valid = text.encode("utf-8", "replace").decode("utf-8")
        if valid != text:
            raise UserError(f'the text that ends in "{valid[-20:]}": expected UTF-8; a character is cut in two')
    folder = find_models(options.folder)
    model, is_discriminator = find_model(folder, texts[0] if texts else "")
    if not is_discriminator:
        _refuse_task_head(model)
    if is_causal(model):
        sampling = Sampling(
            options.max_new_tokens, options.temperature, options.top_p, options.top_k, options.seed
        )  # fmt: skip
        generator = TextGenerator(model, device=options.device, trust_remote_code=options.trust_remote_code)
        continuations = generator.generate(texts, sampling) if texts else ()
        for text, continuation in zip(texts, continuations, strict=True):
            console.print(Text(text, style="bold") + Text(continuation), soft_wrap=True)
        if options.chat:
            _chat(generator, sampling, console)
        elif not texts:
            raise UserError("expected a text to continue, or --chat")
        return
    if options.chat or not texts:
        not_causal = ", and no --chat: the model is not a causal language model" if options.chat else ""
        raise UserError(f"{model}: expected a text{not_causal}")
    for text in texts:
        if len(texts) > 1:
            console.print(Text(text, style="bold"), soft_wrap=True)
        _predict(folder, text, options, console)


def _predict(folder: Path, text: str, options: TryOptions, console: Console) -> None:
    """Prints the predictions for `text` of a model that is not causal."""
    from rich.text import Text

    from terakoya.inference.loading import find_model
    from terakoya_inference.predictions import fill_mask, find_replaced, generate

    model, is_discriminator = find_model(folder, text)
    how: Any = {"device": options.device, "trust_remote_code": options.trust_remote_code}
    if is_discriminator:
        print_tokens(find_replaced(folder, text, **how), console)
        return
    if json.loads((model / "config.json").read_text(encoding="utf-8")).get("is_encoder_decoder"):
        output = generate(folder, text, max_new_tokens=options.max_new_tokens, **how)
        console.print(Text(output))
        return
    filled = fill_mask(folder, text, top=options.top, **how)
    for number, predictions in enumerate(filled, 1):
        console.print(f"[MASK] {number}", markup=False)
        for prediction in predictions:
            console.print(Text(f"  {prediction.probability:6.3f}  {prediction.word}"))


def _chat(generator: TextGenerator, sampling: Sampling, console: Console) -> None:
    """Reads lines and prints a reply to each, until the input ends or a line is empty."""
    from rich.text import Text

    turns: list[dict[str, str]] = []
    console.print("an empty line ends the chat" + ("" if generator.has_template else NO_TEMPLATE), soft_wrap=True)
    while True:
        try:
            text = console.input("> ")
        except EOFError:
            return
        if not text.strip():
            return
        turns.append({"role": "user", "content": text})
        reply = generator.reply(turns, sampling)
        turns.append({"role": "assistant", "content": reply})
        console.print(Text(reply), soft_wrap=True)


def print_tokens(tokens: list[TokenPrediction], console: Console) -> None:
    """Prints the text with its replaced tokens marked, and the probabilities of these tokens.

    Replaced tokens are red, or between « and » where there is no colour. If no token is replaced, the most probable one
    is printed.
    """
    from rich.text import Text

    use_marks = not console.is_terminal or console.no_color
    line = Text()
    for number, token in enumerate(tokens):
        shown = f"«{token.token}»" if token.replaced and use_marks else token.token
        line.append(" " if number else "").append(shown, style="bold red" if token.replaced else "")
    console.print(line, soft_wrap=True)
    replaced = [token for token in tokens if token.replaced]
    if not replaced:
        console.print("the model considers no token replaced; the most probable one:")
    for token in replaced or sorted(tokens, key=lambda token: -token.probability)[:1]:
        console.print(Text(f"  {token.probability:6.3f}  {token.token}"))
