"""The sections of a card about the use of models: the code that loads them, what they are for and what limits them,
from their classes and their training alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from terakoya_hub import card_training

TASKS = (
    ("ForCausalLM", "text-generation"),
    ("LMHeadModel", "text-generation"),
    ("ForMaskedLM", "fill-mask"),
    ("ForConditionalGeneration", "text2text-generation"),
    ("ForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForMultipleChoice", "multiple-choice"),
)
"""Ending of a model's class -> the Hub's name of its task."""
EVALUATED_TASKS = (*TASKS, ("ElectraForPreTraining", "token-classification"), ("ForPreTraining", "fill-mask"))
"""The same for the entries of the model index, which cannot be without a task: a discriminator classifies tokens."""
INSTRUCTION = "instruction"
"""The objective whose models answer."""
CONTINUES = "It continues a text."
NO_ANSWERS = " It was not trained to answer questions or to follow instructions."
"""What else is said of a model that continues texts, where all of its training is known."""
_FINE_TUNED = "It was fine-tuned for one task, {}, and is of use for that task alone."
USES = (
    ("ForMaskedLM", "It fills in [MASK], and is meant to be fine-tuned for a task: classification, named entities, "
     "similarity, search. It does not write text."),
    ("BertForPreTraining", "It fills in [MASK] and tells whether two texts follow each other, and is meant to be "
     "fine-tuned for a task: classification, named entities, similarity, search. It does not write text."),
    ("ForPreTraining", "It tells which tokens of a text were replaced, and is meant to be fine-tuned for a task: "
     "classification, named entities, similarity, search. It does not write text."),
    ("ForSequenceClassification", _FINE_TUNED.format("the classification of texts")),
    ("ForTokenClassification", _FINE_TUNED.format("the classification of tokens")),
    ("ForQuestionAnswering", _FINE_TUNED.format("finding the answer to a question in a text")),
    ("ForMultipleChoice", _FINE_TUNED.format("the choice among several answers")),
    ("ForConditionalGeneration", "It writes what is missing in a text, and is meant to be fine-tuned for a task that "
     "turns a text into another."),
    ("ForCausalLM", CONTINUES),
    ("LMHeadModel", CONTINUES),
)  # fmt: skip
"""Ending of a model's class -> what the model is for."""
PADDED = (
    "Layers of local attention see {reach} tokens to each side, so that padding further from a text sees nothing. In "
    "bf16 on an H200 such batches gave NaN with torch's attention (`sdpa`). Where they do, load it with "
    '`attn_implementation="eager"`.'
)
ANSWERS = "It answers: it was trained on questions with their answers, in the form of its chat template."


def find_task(classes: Collection[str], tasks: Iterable[tuple[str, str]] = EVALUATED_TASKS) -> str | None:
    """Returns the Hub's name of the first of `tasks` that one of `classes` is for."""
    return next((task for ending, task in tasks if any(kind.endswith(ending) for kind in classes)), None)


def show_code(name: str, models: Mapping[str, str], trust_remote_code: bool) -> str:
    """Returns Python code that loads the models."""
    lines = [f"from transformers import AutoTokenizer, {', '.join(dict.fromkeys(models.values()))}", ""]
    trust = ", trust_remote_code=True" if trust_remote_code else ""
    for folder, kind in models.items():
        sub = f', subfolder="{folder}"' if folder else ""
        lines.append(f'{folder or "model"} = {kind}.from_pretrained("{name}"{sub}{trust})')
    sub = f', subfolder="{next(iter(models))}"' if "" not in models else ""
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}"{sub}{trust})')
    if models == {"": "AutoModelForCausalLM"}:
        lines += [
            "",
            'prompt = tokenizer("...", add_special_tokens=False, return_tensors="pt")  # without special tokens',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0], skip_special_tokens=True))",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def describe(classes: Iterable[str], manifest: Mapping[str, Any] | None) -> str:
    """Returns the section about the use and the limits of models.

    Args:
        classes: the Transformers classes of the models.
        manifest: that of the checkpoint; None if it is unknown how they were trained.
    """
    lines = list(dict.fromkeys(filter(None, (_use(each, manifest) for each in classes))))
    if manifest is not None:
        lines += _limits(manifest)
    lines.append(
        "Nothing filters its output, and no measurement in this card is about facts, bias or harm: what the text gets "
        "wrong, the model gets wrong. Test it for your purpose before others depend on it."
    )
    return "\n".join(["## Use and limits", "", *(f"- {line}" for line in lines)])


def _use(kind: str, manifest: Mapping[str, Any] | None) -> str | None:
    if manifest is not None and manifest["parameters"]["objective"]["type"] == INSTRUCTION and "LM" in kind:
        return ANSWERS
    use = next((use for ending, use in USES if kind.endswith(ending)), None)
    is_known = manifest is not None and not manifest.get("started_from")
    return use + NO_ANSWERS if use == CONTINUES and is_known else use


def _limits(manifest: Mapping[str, Any]) -> list[str]:
    tokens, count = manifest["consumed_tokens"], manifest["parameter_count"]
    origins = " and ".join(card_training.origins(manifest))
    begun = f"began with the weights of {origins}, and was trained on {tokens:,} further tokens"
    trained = begun if origins else f"was trained on {tokens:,} tokens in all"
    lines = [f"It {trained}, passes over the same text included: {tokens / count:,.2g} for each of its parameters."]
    if manifest["step"] < manifest["max_steps"]:
        lines.append(f"Its training is not finished: this is step {manifest['step']:,} of {manifest['max_steps']:,}.")
    architecture = manifest["parameters"]["architecture"]
    if window := architecture.get("local_attention"):
        lines.append(PADDED.format(reach=window // 2))
    longest = architecture.get("max_position_embeddings")
    if longest:
        lines.append(f"It reads at most {longest:,} tokens; longer texts must be cut.")
    return lines
