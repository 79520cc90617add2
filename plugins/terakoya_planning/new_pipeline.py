"""Writes a pipeline file with comments that give the reason for each number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terakoya.config.presets import presets_folder
from terakoya.json_settings import read_settings
from terakoya.log import lines_of, plural, translated
from terakoya_planning.choosing import (
    LEAST_STEPS,
    LEAST_STEPS_BETWEEN,
    PASSES,
    VALIDATION_SHARE,
    Choice,
    Goal,
    Machine,
    Recipe,
    describe_preset,
)
from terakoya_planning.corpus_facts import CorpusFacts
from terakoya_planning.speed import describe_hours

WIDTH = 110
HELD_OUT_DOCUMENTS = 200
"""About how many documents validation needs for a steady loss."""

FEW_DOCUMENTS = 100
"""Below this many, the last ones are for validation: by their hashes, none of them might be held out."""

SENTINELS = 26
"""Unused pieces of a tokenizer for T5, which mark the spans that are cut out of rows of up to 512 tokens."""

LIMITS = {
    "corpus": "a larger model would learn this corpus by heart",
    "hours": "a larger model would not see enough tokens in the given hours",
    "memory": "a larger model does not fit into memory",
    "family": "the largest preset of the family",
    "goal": "the goal is a first try",
}


def make_pipeline(
    sources: Sequence[str],
    facts: CorpusFacts,
    choice: Choice,
    *,
    recipe: Recipe,
    goal: Goal,
    machine: Machine,
    work: Path,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the content of a pipeline file with outputs in the folder `work`, and the comments by key path."""
    parameters = {key: value for key, value in choice.parameters.items() if key != "_comment"}
    parameters["data"] = {"sequence_length": parameters["data"]["sequence_length"]}
    if machine.device.gpu:
        parameters["deterministic"] = True
    share, is_few = held_out_share(facts.count), facts.count < FEW_DOCUMENTS
    held_out = round(share * facts.count) or min(1, facts.count - 1)
    if is_few and held_out:
        percent = round(100 * held_out / facts.count)  # of fewer than 100 documents exactly those held out
        parameters["data"]["split"] = [100 - percent, percent]
    elif is_few:
        del parameters["evaluation"]
    pipeline = {
        "corpus": list(sources),
        **({"field": facts.field} if facts.formats != ("txt",) else {}),
        **({"documents": facts.documents} if facts.documents != "blank" else {}),
        "clean": [{"type": "exact_duplicates"}, *([] if is_few else [{"type": "hold_out", "share": share}])],
        "tokenizer": make_tokenizer(recipe, facts.language, choice.vocabulary),
        "tokenizer_folder": str(work / "tokenizer"),
        "store": str(work / "store"),
        **({} if is_few else {"validation_store": str(work / "store.val")}),
        "parameters": parameters,
        "run": str(work / "run"),
        "export": str(work / "model"),
        **({"training_processes": machine.count} if machine.device.gpu else {}),
    }
    comments = _comments(facts, choice, recipe=recipe, machine=machine, share=share)
    if is_few:
        comments["clean"] = "Equal documents are dropped."
        comments["parameters.data"] = (
            f"Few documents: validation takes the last {held_out:,} of {facts.count:,}."
            if held_out
            else "There is one document, which training needs: nothing is validated."
        )
    return pipeline, comments


def make_tokenizer(recipe: Recipe, language: str, vocabulary: int) -> dict[str, Any]:
    """Returns the settings of the tokenizer for the models of a recipe and a language."""
    if recipe.causal:
        return {
            "type": "sentencepiece",
            "vocab_size": vocabulary,
            "byte_fallback": True,
            "input_sentence_size": 5_000_000,
        }
    words = {"dictionary": "unidic_lite"} if language == "ja" else {"word_tokenizer": "basic"}
    unused = {"num_unused_tokens": SENTINELS} if recipe.spans else {}
    return {"type": "mecab_wordpiece", **words, "vocab_size": vocabulary, **unused}


def held_out_share(documents: int) -> float:
    """Returns the share of the documents for validation: about `HELD_OUT_DOCUMENTS` of them, 0.2 % to 5 %; of a small
    corpus 20 documents, up to 20 %."""
    share = min(0.05, max(0.002, HELD_OUT_DOCUMENTS / max(1, documents)))
    return float(f"{max(share, min(0.2, 20 / max(1, documents))):.1g}")


def _comments(facts: CorpusFacts, choice: Choice, *, recipe: Recipe, machine: Machine, share: float) -> dict[str, str]:
    parameters, estimated = choice.parameters, choice.estimated
    preset = read_settings(presets_folder() / f"{choice.preset}.json")
    preset_rows = sum(preset["batch_size"].values())
    speed = estimated.speed
    assert speed is not None, "a choice has a speed"
    rows, length = sum(parameters["batch_size"].values()), parameters["data"]["sequence_length"]
    kind = "causal" if recipe.causal else "masked"
    language = {"ja": "Japanese", "en": "English or another language in Latin letters", "other": "another language"}
    splitter = "SentencePiece, which needs no dictionary, with bytes for rare characters"
    if kind == "masked":
        splitter = (
            "MeCab's words, cut into pieces" if facts.language == "ja" else "words between spaces, cut into pieces"
        )
    memory = f"{estimated.memory.peak / 1e9:.1f} GB at the peak"
    return {
        "corpus": f"{facts.files:,} file{plural(facts.files)} ({', '.join(facts.formats)}), "
        f"{facts.size / 1e6:,.1f} MB on disk; from a sample: about {facts.count:,} documents, {facts.characters:,} "
        f"characters, {translated(language[facts.language])} ({facts.japanese:.0%} Japanese characters)",
        "field": f"The text is that of {facts.field}, the first of them that a line or table has."
        if "," in facts.field
        else f"The text is that of {facts.field}.",
        "documents": "No blank line was seen between documents of the txt files: each line is one.",
        "clean": f"Equal documents are dropped; {share:.1%} are held out for validation, by a hash of their text.",
        "tokenizer": f"{splitter[0].upper()}{splitter[1:]}.",
        "tokenizer.vocab_size": f"{choice.vocabulary:,} pieces for {facts.characters:,} characters: a smaller corpus "
        "gets fewer, so that each is seen often enough to be learned.",
        "parameters": f"The preset {choice.preset}: {describe_preset(choice.preset)}. With this vocabulary it has "
        f"{estimated.sizes.parameters / 1e6:,.1f} M. Chosen because: {LIMITS[choice.limit]}.",
        **({"parameters.architecture": reason} if (reason := recipe.explain(choice.preset)) else {}),
        "parameters.optimizer": "The preset's."
        if parameters["optimizer"] == preset["optimizer"]
        else "The preset's, with a learning rate of Muon for a run of so many steps of a model so wide."
        if preset["optimizer"]["type"] == "muon"
        else "The preset's learning rate, times the square root of the change of the batch.",
        "parameters.schedule": "Warm-up: the preset's, at most a tenth of the run."
        if parameters["schedule"]["type"] == preset["schedule"]["type"]
        else "The preset's rate never falls, for other runs to end; this run ends itself in its last fifth.",
        "parameters.batch_size": f"{rows:,} row{plural(rows)} of {length:,} tokens a step"
        + (
            f". The preset has {preset_rows:,}; a run of fewer than {LEAST_STEPS:,} steps gets a smaller batch."
            if rows != preset_rows
            else ", as in the preset."
        ),
        "parameters.micro_batch_size": f"Rows that one process computes at once: {memory}"
        + (f" of {estimated.device.memory / 2**30:,.0f} GiB." if estimated.device.memory else "."),
        "parameters.max_steps": f"{choice.steps:,} step{plural(choice.steps)} x {rows:,} row{plural(rows)} "
        f"x {length:,} tokens = {_amount(choice.trained_tokens)} tokens: {choice.passes:.3g} passes over about "
        f"{_amount(choice.tokens)} tokens (at most {PASSES[kind]} are useful). Predicted: "
        f"{translated(describe_hours(choice.hours))} on {machine.name}, {translated(speed.said)}.",
        "parameters.precision": machine.explain_precision(),
        "parameters.deterministic": "A run that is stopped goes on to the bit. false is faster: a BERT base on an H200 "
        "1.47 times, with CUDA graphs.",
        "parameters.checkpoint": explain_checkpoints(),
        "parameters.evaluation": "A validation after each tenth of the run, each twentieth of a long one, and at least "
        f"every half-hour where that takes no more than {VALIDATION_SHARE:.0%} of the time, but at least "
        f"{LEAST_STEPS_BETWEEN} steps apart.",
        "training_processes": "One for each GPU.",
    }


def explain_checkpoints() -> str:
    """Returns how far apart the checkpoints of a run are, for its comment."""
    return (
        "A checkpoint after each tenth of the run and at least every half-hour, but at least "
        f"{LEAST_STEPS_BETWEEN} steps apart."
    )


def _amount(tokens: float) -> str:
    return f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,.0f}"


def render(pipeline: Mapping[str, Any], comments: Mapping[str, str], *, heading: str) -> str:
    """Returns the pipeline as JSON with `//` comments: `heading` at the top, and each comment above its key."""
    lines = [*_comment(heading, ""), *_object(pipeline, comments, "", "")]
    return "\n".join(lines) + "\n"


def _object(value: Mapping[str, Any], comments: Mapping[str, str], path: str, indent: str) -> list[str]:
    lines, inner = ["{"], indent + "  "
    for number, (key, each) in enumerate(value.items()):
        here = f"{path}.{key}" if path else key
        comma = "," if number < len(value) - 1 else ""
        if here in comments:
            lines += _comment(comments[here], inner)
        text = json.dumps(each, ensure_ascii=False)
        nested = isinstance(each, Mapping) and (
            len(text) > WIDTH - 30 or any(other.startswith(f"{here}.") for other in comments)
        )
        if nested:
            first, *rest = _object(each, comments, here, inner)
            lines += [f"{inner}{json.dumps(key)}: {first}", *rest]
        else:
            lines.append(f"{inner}{json.dumps(key)}: {text}")
        lines[-1] += comma
    return [*lines, indent + "}"]


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}// "
    return [prefix + line for line in lines_of(text, WIDTH - len(prefix))]
