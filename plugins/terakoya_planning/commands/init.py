"""`terakoya init`: looks at a corpus and a machine, and writes a pipeline file."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError, nearest
from terakoya.log import console, error_console, lines_of, print_labelled, translated
from terakoya.preparation.options import PrepareOptions

Goal = Literal["try", "model"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `init`, which says what it asks for."""

    corpus: Annotated[
        Sequence[str],
        typer.Argument(
            metavar="CORPUS...",
            help="jsonl, txt, csv, tsv (.gz, .zst, .xz, .bz2 too), parquet; folders, s3://, gs://, hf://.",
        ),
    ] = ()
    family: Annotated[
        str | None,
        typer.Option(
            help="encoder (default), electra: models that understand text; decoder: writes text; t5: text to text. "
            "Each but t5 by the recipe that was measured best."
        ),
    ] = None
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="By the recipe of a paper: bert, electra, roberta, deberta, modernbert, gpt2 or llama.",
        ),
    ] = None
    goal: Annotated[
        Goal | None,
        typer.Option(help="try: the smallest model, ten minutes; model: the best that corpus and hours allow."),
    ] = None
    gpu: Annotated[
        str | None, typer.Option(help="The GPU that trains: h100, a100-80gb, rtx-4090, ... Default: this machine's.")
    ] = None
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs. Default: this machine's, or 1.")] = None
    hours: Annotated[
        float | None, typer.Option(min=0.01, help="How long training may take. Default: 24, on a CPU 2.")
    ] = None
    field: Annotated[
        str | None,
        typer.Option(help="The key or column with the text, or several with commas. Default: what seems to hold it."),
    ] = None
    encoding: Annotated[str | None, PrepareOptions] = None
    max_rejects: Annotated[int | float, PrepareOptions] = 0.01
    vocab_size: Annotated[int | None, typer.Option(min=100, help="Pieces of the tokenizer. Default: chosen.")] = None
    work: Annotated[Path, typer.Option(help="The folder for tokenizer, stores, run and model.")] = Path("work")
    out: Annotated[Path, typer.Option(help="The new pipeline file.")] = Path("pipeline.json")
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Where this machine trains: take steps of each model in question for at most 20 seconds, once.",
        ),
    ] = True
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given is the default.")] = False

    def heading(self, *words: str) -> str:
        """Returns the first comment of the file: the command that writes it again, with `words` after the corpus."""
        options = ["terakoya", "init", *self.corpus, *words]
        for name in ("field", "encoding", "max_rejects", "vocab_size", "gpus", "work", "out"):
            if (value := getattr(self, name)) != getattr(Options, name):
                options += [f"--{name.replace('_', '-')}", str(value)]
        return translated(f"Written by `{shlex.join(options)}`. Change what you like, then: terakoya run {self.out}")


def command(options: Options) -> None:
    """Write a pipeline file for a corpus and a machine, with the reason for each number.

    Asks in a terminal for what is not given, unless --yes: corpus, family, goal and hours; for the GPU only where goal
    or hours are left open. Reads samples of the corpus, and takes steps of models that may fit the hours.
    """
    from terakoya.atomic_files import check_writable, write_text
    from terakoya_pipeline.settings import Pipeline, read_pipeline
    from terakoya_planning.choosing import choose, choose_vocabulary, count_tokens, find_machine, find_recipe
    from terakoya_planning.corpus_facts import look_at
    from terakoya_planning.measuring import measure_here
    from terakoya_planning.new_pipeline import held_out_share, make_pipeline, render

    corpus, family, goal, gpu, hours = options.corpus, options.family, options.goal, options.gpu, options.hours
    out = options.out
    if out.exists() and not options.force:
        raise UserError(f"{out}: exists already; choose another name with --out, or overwrite it with --force")
    check_writable(out.parent)
    asks = not options.yes and _asks()
    how: Any = {"encoding": options.encoding, "max_rejects": options.max_rejects}
    looking: Any = {"field": options.field, **how}
    if corpus:
        facts = look_at(corpus, **looking)
    else:
        question = "corpus: files or folders of text"
        corpus, facts = _ask(
            question,
            None,
            lambda text: (_paths(text), look_at(_paths(text), **looking)),
            asks,
            missing="CORPUS: expected files of text",
        )
    question = "family: encoder, electra (understand text), decoder (writes it), t5"
    if family is None and options.like is None:
        family, recipe = _ask(question, "encoder", lambda text: (text, find_recipe(text, None)), asks)
    else:
        recipe = find_recipe(family, options.like)
    is_told = goal == "try" or (goal is not None and hours is not None)
    goal = goal or _choice(
        "goal: try (a first small model in minutes) or model (the best in the hours)", Goal, "model", asks
    )
    find = partial(find_machine, measure=measure_here if options.measure else None)
    if gpu is None and not is_told and asks:
        question = "GPU that trains, such as h100; empty: this machine's"
        gpu, machine = _ask(question, "", lambda text: (text or None, find(text or None, options.gpus)), asks)
    else:
        machine = find(gpu, options.gpus)
    if hours is None:
        default = 24.0 if machine.device.gpu else 2.0
        hours = default if goal == "try" else _ask("hours of training", f"{default:g}", _number, asks)
    vocabulary = options.vocab_size or choose_vocabulary(facts.characters, facts.language, causal=recipe.causal)
    tokens = count_tokens(facts.characters, facts.language)
    held_out = round(tokens * held_out_share(facts.count))
    with error_console().status(translated("measuring and choosing"), spinner="dots"):
        choice = choose(
            tokens=tokens, vocabulary=vocabulary, recipe=recipe, goal=goal, machine=machine, hours=hours,
            held_out=held_out,
        )  # fmt: skip
    pipeline, comments = make_pipeline(
        corpus, facts, choice, recipe=recipe, goal=goal, machine=machine, work=options.work
    )
    pipeline |= {name: value for name, value in how.items() if value != Pipeline.model_fields[name].default}
    kind = ("--like", options.like) if options.like else ("--family", family or "encoder")
    heading = replace(options, corpus=corpus).heading(
        *kind, "--goal", goal, "--hours", f"{hours:g}", *(("--gpu", gpu) if gpu else ())
    )
    comments = {key: translated(comment) for key, comment in comments.items()}
    write_text(out, render(pipeline, comments, heading=heading))
    read_pipeline(out)
    for key in ("corpus", "field", "parameters", "parameters.architecture", "parameters.data", "parameters.max_steps"):
        if key in comments and (key != "field" or "field" in pipeline):
            console().print(comments[key], markup=False, soft_wrap=True)
    speed = choice.estimated.speed
    if speed is not None and speed.source == "range" and choice.hours[1] > 0.9 * hours:
        told = translated("Where the run trains, this command measures the speed, and the run then fills the hours.")
        console().print(told, soft_wrap=True)
    console().print(f"{out}: written; it gives the reason for each number", markup=False, soft_wrap=True)
    next_command.show("run", out)


def _asks() -> bool:
    """Returns whether somebody sits at a terminal and can answer."""
    return sys.stdin.isatty()


def _ask(question: str, default: str | None, read: Callable[[str], T], asks: bool, *, missing: str = "") -> T:
    """Returns what `read` makes of the answer. Asks again, and says why, where `read` raises UserError. If nobody is
    asked, the answer is `default`. Raises UserError if nobody is asked, and there is no default (`missing`) or one that
    `read` refuses."""
    if not asks:
        if default is None:
            raise UserError(missing)
        return read(default)

    shown = f"{translated(question)} [{default}]:" if default else f"{translated(question)}:"
    prompt = "\n".join(lines_of(shown, error_console().width - 1))
    while True:
        answer = typer.prompt(prompt, default=default, err=True, show_default=False, prompt_suffix=" ")
        try:
            return read(str(answer))
        except UserError as error:
            print_labelled("error:", str(error), style="bold red")


def _paths(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: {error}; quote a name with a space or a quote in it") from None


def _choice(question: str, kind: Any, default: str, asks: bool) -> Any:
    """Asks for one of the strings of the literal type `kind`."""

    def read(answer: str) -> str:
        if answer not in get_args(kind):
            raise UserError(f'"{answer}": expected one of {", ".join(get_args(kind))}{nearest(answer, get_args(kind))}')
        return answer

    return _ask(question, default, read, asks)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UserError(f'hours: expected a number above 0, got "{text}"')
    return value
