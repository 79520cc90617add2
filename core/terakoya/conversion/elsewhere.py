"""Loads models as somebody else does: by Transformers alone, in a new process with another working directory, an empty
home and no network."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from terakoya.components.tokenizer import mecab_arguments
from terakoya.errors import UserError

TEXT = "これは日本の文章です。This is a text."
SECONDS = 600
"""The longest time that it may take; a chat template may never end."""
LEFT_OUT = ("HF_", "HUGGINGFACE_", "MECABRC", "TERAKOYA_", "TRANSFORMERS_", "XDG_")
"""How the names of variables begin that the process does not get."""
PROGRAM = """
import json, sys
import torch, transformers
from transformers import AutoTokenizer, PreTrainedModel

QUESTION, ANSWER = "ppquestionqq", "ppanswerqq"
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
failed = []
for work in map(json.loads, sys.stdin):
    folder, options = work["folder"], {"local_files_only": True, "trust_remote_code": work["trust"]}
    try:
        part = "AutoTokenizer.from_pretrained"
        tokenizer = AutoTokenizer.from_pretrained(folder, **options, **work["words"])
        part = "tokenizer(text)"
        ids = tokenizer(work["text"])["input_ids"]
        part = work["class"] + ".from_pretrained"
        # the device meta: names and shapes are compared, and a model of any size takes no memory
        model, info = getattr(transformers, work["class"]).from_pretrained(
            folder, **options, device_map="meta", output_loading_info=True
        )
        if info["missing_keys"]:
            raise ValueError("missing weights: " + ", ".join(sorted(info["missing_keys"])[:8]))
        part = "tokenizer(text)"
        size = getattr(model.config, "vocab_size", None)
        if size is not None and not 0 <= max(ids, default=-1) < size:
            raise ValueError(f"expected ids below {size}, the vocabulary of the model, got {ids[:8]}")
        if tokenizer.chat_template:
            part = "apply_chat_template"
            turn = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
            asked, after = tokenizer.apply_chat_template(turn, tokenize=False).split(ANSWER)
            if QUESTION not in asked:
                raise ValueError("the question is not in what it writes")
            special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
            following = tokenizer(after, add_special_tokens=False)["input_ids"]
            end = next((id for id in following if id in special), None)
            ends = model.generation_config.eos_token_id if model.can_generate() else end
            if end is not None and end not in (ends if isinstance(ends, list) else [ends]):
                word = tokenizer.convert_ids_to_tokens(end)
                raise ValueError(f"an answer ends with {word} (id {end}), where generation does not stop: {ends}")
    except BaseException as error:
        failed.append([folder, part, " ".join(f"{type(error).__name__}: {error}".split())])
print("\\n" + json.dumps(failed))
"""


class Elsewhere:
    """The process. What it imports takes seconds, in which its caller may work."""

    def __init__(self, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        own = {"HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        packages = {"PYTHONUSERBASE": site.getuserbase(), "PYTHONIOENCODING": "utf-8"}  # which may be below the home
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=home, env={**kept, **own, **packages},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def check(self, models: Mapping[Path, str], *, trusted: Collection[Path] = ()) -> None:
        """Loads folder -> the Transformers class of its model with its tokenizer, encodes a text, and writes a turn
        with the chat template, if there is one, at whose end generation must stop. Once. The code of `trusted` folders
        may run. Raises UserError if something of that fails."""
        works = [
            {"folder": str(folder.resolve()), "class": name, "trust": folder in trusted, "text": TEXT,
             "words": mecab_arguments(folder.resolve())}
            for folder, name in models.items()
        ]  # fmt: skip
        errors = ""
        try:
            said, errors = self.process.communicate("".join(json.dumps(each) + "\n" for each in works), timeout=SECONDS)
            failed = json.loads(said.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            code = self.process.poll()
            how = f"no answer in {SECONDS} s" if code is None else f"exit code {code}: {errors.strip()[-300:]}"
            failed = [[", ".join(map(str, models)), "python", how]]
        if failed:
            lines = (f"{folder}: {part}: {reason[:600]}" for folder, part, reason in failed)
            raise UserError("written, but Transformers alone cannot use it elsewhere: " + "\n".join(lines))


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """Yields a process that has just been started, and ends it."""
    with tempfile.TemporaryDirectory() as home:
        started = Elsewhere(Path(home))
        with started.process:
            try:
                yield started
            finally:
                started.process.kill()
