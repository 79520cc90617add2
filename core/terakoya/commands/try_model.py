"""`terakoya try`: the top words for each [MASK] of a sentence, the tokens a discriminator believes replaced, or how a
text goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.errors import UserError
from terakoya.inference.loading import find_model
from terakoya.inference.predictions import Judged, fill_mask, find_replaced, write_on

if TYPE_CHECKING:
    from rich.console import Console

    from terakoya.inference.generation import Sampling, Writer
NO_TEMPLATE = "; the tokenizer has no chat template: each line goes on from all that was written before"


def command(
    folder: Annotated[Path, typer.Argument(help="An exported model, a run or a checkpoint.", metavar="DIR")],
    texts: Annotated[
        list[str] | None, typer.Argument(help='For example "東京は日本の[MASK]です。"', metavar="[TEXT]...")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many words for each mask.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens are written at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Lower is less daring; 0 takes the likeliest.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw among the likeliest that hold this share.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many of the likeliest; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Go on writing to it, turn by turn.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of its own kind brings.")
    ] = False,
) -> None:
    """Fill in the [MASK]s of a sentence; with a discriminator, mark the tokens it believes replaced; with a causal
    model, write on, several texts at once or in a chat; with an encoder-decoder, write what it makes of the text."""
    from rich.console import Console

    from terakoya.inference.generation import Sampling, Writer, is_causal

    console = Console(highlight=False)
    for text in texts or ():
        whole = text.encode("utf-8", "replace").decode("utf-8")
        if whole != text:
            raise UserError(f'the text that ends in "{whole[-20:]}": expected UTF-8; a character is cut in two')
    model, _ = find_model(folder, texts[0] if texts else "")
    if is_causal(model):
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
        writer = Writer(model, trust_remote_code=trust_remote_code)
        for text, written in zip(texts or (), writer.write(texts, sampling) if texts else (), strict=True):
            console.print(f"[bold]{_plain(text)}[/bold]{_plain(written)}", soft_wrap=True)
        if chat:
            _chat(writer, sampling, console)
        elif not texts:
            raise UserError("expected a text to go on from, or --chat")
        return
    if chat or not texts:
        raise UserError(f"{model}: expected a text" + (", and no --chat: the model does not write" if chat else ""))
    for text in texts:
        _answer(folder, text, top, max_new_tokens, console, trust=trust_remote_code)


def _answer(folder: Path, text: str, top: int, most: int, console: Console, *, trust: bool) -> None:
    """What a model that is not causal makes of `text`."""
    model, is_discriminator = find_model(folder, text)
    if is_discriminator:
        show(find_replaced(folder, text, trust_remote_code=trust), console)
        return
    if json.loads((model / "config.json").read_text(encoding="utf-8")).get("is_encoder_decoder"):
        console.print(write_on(folder, text, most=most, trust_remote_code=trust), markup=False)
        return
    for number, guesses in enumerate(fill_mask(folder, text, top=top, trust_remote_code=trust), 1):
        console.print(f"[MASK] {number}", markup=False)
        for guess in guesses:
            console.print(f"  {guess.probability:6.3f}  {guess.word}", markup=False)


def _chat(writer: Writer, sampling: Sampling, console: Console) -> None:
    """Reads a line, answers, and so on, until the input ends or an empty line comes."""
    turns: list[dict[str, str]] = []
    console.print("an empty line ends the chat" + ("" if writer.has_template else NO_TEMPLATE), soft_wrap=True)
    while True:
        try:
            text = console.input("> ")
        except EOFError:
            return
        if not text.strip():
            return
        turns.append({"role": "user", "content": text})
        answer = writer.answer(turns, sampling)
        turns.append({"role": "assistant", "content": answer})
        console.print(answer, markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    """`text` so that rich prints it as it is."""
    from rich.markup import escape

    return escape(text)


def show(tokens: list[Judged], console: Console) -> None:
    """Prints the text with replaced tokens in red, or between marks where there is no colour, and their probabilities;
    if there are none, the likeliest."""
    from rich.text import Text

    marks = not console.is_terminal or console.no_color
    line = Text()
    for number, each in enumerate(tokens):
        shown = f"«{each.token}»" if each.replaced and marks else each.token
        line.append(" " if number else "").append(shown, style="bold red" if each.replaced else "")
    console.print(line, soft_wrap=True)
    found = [each for each in tokens if each.replaced]
    if not found:
        console.print("no token is believed replaced; the likeliest:")
    for each in found or sorted(tokens, key=lambda each: -each.probability)[:1]:
        console.print(f"  {each.probability:6.3f}  {each.token}", markup=False)
