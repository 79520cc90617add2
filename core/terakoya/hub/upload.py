"""From a run, a checkpoint or an exported folder to a repository on the Hub: tried, described, pushed, loaded back.

The token is Hugging Face's own business: `HF_TOKEN` in the environment, or what `hf auth login` keeps. It is no option,
is read by huggingface_hub alone, and is written nowhere.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.conversion.export import export, find_checkpoint
from terakoya.errors import UserError
from terakoya.hub import model_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
PROBE = "これは日本の文章です。This is a text."
"""What both sides read where no prompt is given, to see that the model that comes back is the one that was sent."""


@dataclass(frozen=True)
class Uploaded:
    """What stands on the Hub now.

    Attributes:
        address: where a browser finds it.
        commit: the repository's commit, None after a trial.
        folder: what was pushed; only after a trial, where it stays.
        models: by sub-folder the Transformers class that loads each.
    """

    address: str
    commit: str | None
    folder: Path | None
    models: dict[str, str]


def upload(
    source: Path,
    name: str,
    *,
    prompt: str | None = None,
    private: bool = False,
    only: str | None = None,
    run: Path | None = None,
    license: str | None = None,
    languages: Sequence[str] = ("ja",),
    trust_remote_code: bool = False,
    dry_run: Path | None = None,
    ask: Callable[[Path, str], str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Uploaded:
    """Pushes the model(s) of `source` to the repository `name` (ORGANISATION/NAME) and loads them back from there.

    Args:
        source: RUN, RUN/checkpoints/step-..., or a folder that `export` wrote. A README.md in it stays as it is.
        prompt: run through the model first; what comes out is said and stands in the card. An error pushes nothing.
        only: of several models the one to push, which then is the repository itself.
        trust_remote_code: run the code that a model of its own kind brings, to try it and to load it back.
        run: where the card finds what an exported folder does not say: the run or checkpoint it comes from.
        license: the Hub's identifier, such as "apache-2.0", for the card.
        dry_run: a new folder to write instead of pushing.
        ask: folder and prompt -> what the model makes of it.
        say: told each thing that was done.

    Raises:
        UserError: no model, a model that does not load, no token, no right to push, or another model came back.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--name {name}: expected ORGANISATION/NAME: {error}") from None
    if dry_run is not None and dry_run.exists():
        raise UserError(f"{dry_run}: is there already; choose a new folder or remove it")
    with tempfile.TemporaryDirectory() as temporary:
        folder = _gather(source, Path(temporary) / "model", only)
        models = {sub: _load_class(folder / sub) for sub in _model_folders(folder)}
        for sub in models:
            if not (folder / sub / "tokenizer_config.json").is_file():  # else Transformers makes up an empty one
                raise UserError(f"{source / sub}: expected the model's tokenizer, found no tokenizer_config.json")
        first = folder / next(iter(models))
        own_code = any("auto_map" in _config(folder / sub) for sub in models)
        if own_code and not trust_remote_code:
            raise UserError(f"{source}: the model brings its own code; --trust-remote-code runs it to try the model")
        sent = {sub: _outputs(folder / sub, prompt or PROBE, trust=own_code) for sub in models}
        sample = None
        if prompt is not None and ask is not None:
            sample = (prompt, ask(first if len(models) == 1 else folder, prompt))
            say(sample[1].rstrip())
        if not (folder / CARD).is_file():
            trained = _trained(source, run)
            card = model_card.write(
                name, models, trained=trained, license=license, languages=languages, sample=sample,
                trust_remote_code=own_code,
            )  # fmt: skip
            (folder / CARD).write_text(card, encoding="utf-8")
            if trained is not None and (curve := trained.picture()) is not None:
                (folder / model_card.CURVE).write_text(curve, encoding="utf-8")
        if dry_run is not None:
            shutil.copytree(folder, dry_run)
            return Uploaded("", None, dry_run, models)
        address, commit = _push(folder, name, private=private)
        say(f"pushed {commit[:12]}")
        for sub in models:
            back = _outputs(name, prompt or PROBE, subfolder=sub, revision=commit, trust=own_code)
            if back != sent[sub]:
                raise UserError(
                    f"{address}: another model came back than was pushed from {folder / sub}; push it again"
                )
        say("loaded back from there: the same numbers")
        return Uploaded(address, commit, None, models)


def _gather(source: Path, folder: Path, only: str | None) -> Path:
    """The files to push, in the new folder `folder`."""
    if (source / "manifest.json").is_file() or (source / "checkpoints").is_dir():
        export(source, folder, only=only)
        return folder / only if only else folder
    if only is not None:
        source = source / only
    if not source.is_dir() or not _model_folders(source):
        raise UserError(f"{source}: expected a run, a checkpoint or an exported folder, found no config.json there")
    shutil.copytree(source, folder)
    return folder


def _model_folders(folder: Path) -> list[str]:
    """The sub-folders of `folder` with a model; "" is the folder itself."""
    if (folder / "config.json").is_file():
        return [""]
    return sorted(each.name for each in folder.iterdir() if (each / "config.json").is_file())


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _load_class(folder: Path) -> str:
    """The Transformers class that loads the model in `folder`: an Auto class for one that brings its code."""
    config = _config(folder)
    autos = [name for name in config.get("auto_map", {}) if name.startswith("AutoModel")]
    names = autos or config.get("architectures") or []
    if not names:
        raise UserError(f"{folder / 'config.json'}: expected the model's class in architectures, found none")
    return str(names[0])


def _outputs(place: Path | str, text: str, *, subfolder: str = "", revision: str | None = None, trust: bool) -> bytes:
    """The bytes of what the model at `place` (a folder, or a repository at `revision`) makes of `text`.

    A repository is loaded through an empty cache, so that it is the Hub that answers.

    Raises:
        UserError: it does not load, or has no tokenizer.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    local = isinstance(place, Path)
    with tempfile.TemporaryDirectory() as cache:
        options: dict[str, Any] = {"trust_remote_code": trust, "cache_dir": cache}
        options |= {"local_files_only": True} if local else {"subfolder": subfolder, "revision": revision}
        try:
            config = transformers.AutoConfig.from_pretrained(place, **options)
            names = [name for name in getattr(config, "auto_map", None) or {} if name.startswith("AutoModel")]
            kind = getattr(transformers, (names or config.architectures)[0])
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
            model = kind.from_pretrained(place, **options).eval()
        except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
            raise UserError(f"{place}: expected a model and a tokenizer that Transformers loads: {error}") from error
        longest = getattr(model.config, "max_position_embeddings", None) or 512
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=min(64, longest - 4))
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
            inputs.pop("token_type_ids", None)
        with torch.no_grad():
            logits = model(**inputs)[0]
        return bytes(logits.float().contiguous().numpy().tobytes())


def _trained(source: Path, run: Path | None) -> model_card.Trained | None:
    """Where the card's facts come from: `run`, else `source` if that is a run or checkpoint."""
    if run is not None:
        return model_card.Trained.read(find_checkpoint(run))
    with suppress(UserError):
        return model_card.Trained.read(find_checkpoint(source))
    return None


def _push(folder: Path, name: str, *, private: bool) -> tuple[str, str]:
    """Creates the repository `name` if it is not there and commits `folder` to it. Returns its address and commit.

    Raises:
        UserError: no token, no such right, or the Hub does not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if get_token() is None:
        raise UserError("no token for the Hub: set HF_TOKEN in the environment, or run `hf auth login`")
    api: HfApi = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model, tokenizer and card")
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set: nothing can be pushed; unset it") from None
    except HfHubHTTPError as error:
        raise UserError(f"{name}: the Hub refused: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{name}: the Hub does not answer: {error}") from None
    except RuntimeError as error:  # what it raises where a file does not go through
        raise UserError(f"{name}: {error} {error.__cause__ or ''}; run the same command again") from error
    return str(address), str(done.oid)
