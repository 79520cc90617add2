"""The data of mteb's tasks, in the cache of the Hugging Face Hub; nothing is downloaded."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.toolkit.hub_cache import find_snapshot


def find_data(task: Any) -> Path | None:
    """Returns the folder of the task's data in the Hub's cache, None if there is none."""
    return find_snapshot(task.metadata.dataset["path"], "dataset", revision=task.metadata.dataset["revision"])


def fetch_command(tasks: Sequence[Any]) -> str:
    """Returns the command that fetches the data of `tasks` into the Hub's cache."""
    names = [task.metadata.name for task in tasks]
    load = f"[(t.load_data(), t.unload_data()) for t in mteb.get_tasks(tasks={names}, languages=['jpn'])]"
    return f'python -c "import mteb; {load}"'


def load_data(task: Any, snapshot: Path, folder: Path) -> None:
    """Lets mteb load the task's data from `snapshot`; `folder` is a new one for links. Raises UserError if it cannot.

    What `datasets` does by itself without a network is not relied on: it takes whatever revision was prepared last, and
    does not tell mteb of the documents that a reranking task has chosen, so that all are ranked."""
    from datasets.exceptions import DatasetsError

    try:
        path = _with_own_languages(task, snapshot, folder)
        task.metadata = task.metadata.model_copy(update={"dataset": {**task.metadata.dataset, "path": str(path)}})
        task.load_data()
    except (DatasetsError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{snapshot}: mteb cannot read it: {reason}; fetch it again: {fetch_command([task])}"
        ) from error


def _with_own_languages(task: Any, snapshot: Path, folder: Path) -> Path:
    """Returns a folder that mteb can read the task's data from: `snapshot`, or the new `folder` with links to its
    files and a README.md that lists the task's own languages alone. `datasets` refuses a folder without the files of
    the first language of its list, and mteb downloads only those of the languages that it needs."""
    from huggingface_hub.repocard import metadata_load, metadata_save

    others = set(task.metadata.eval_langs) - set(task.hf_subsets) if task.metadata.is_multilingual else set()
    about = metadata_load(snapshot / "README.md") or {}
    all_configs = about.get("configs", [])
    configs = [each for each in all_configs if not any(f"{each['config_name']}-".startswith(f"{o}-") for o in others)]
    if configs == all_configs:
        return snapshot
    folder.mkdir()
    for each in snapshot.iterdir():
        if each.name != "README.md":
            (folder / each.name).symlink_to(each)
    metadata_save(folder / "README.md", {**about, "configs": configs})
    return folder


@contextmanager
def offline() -> Iterator[Path]:
    """Keeps huggingface_hub and `datasets` from the network as long as the block runs, lets `datasets` write its copies
    below the folder that is yielded, which is removed, and silences what mteb says of its own tasks."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_CACHE
    without_bars, mteb_logger = datasets.are_progress_bars_disabled(), logging.getLogger("mteb")
    level = mteb_logger.level
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mteb_logger.setLevel(logging.CRITICAL)
        datasets.disable_progress_bars()
        constants.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_CACHE = True, Path(temporary) / "datasets"
        try:
            yield Path(temporary)
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_DATASETS_CACHE = before
            mteb_logger.setLevel(level)
            if not without_bars:
                datasets.enable_progress_bars()
