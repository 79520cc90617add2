"""Under datatrove's executors a store has the bytes of one process after any kill, and either engine can finish it."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import psutil
import pytest
from fake_slurm import FakeSlurm
from selection import at_night
from small_preparation import contents, new_job, prepare_corpus
from word_tokenizer import WordTokenizer, make_folder

from terakoya.atomic_files import dump_hashed_json
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya.preparation.job import PrepareJob
from terakoya.preparation.options import PrepareOptions
from terakoya.store.token_store import StoreFacts
from terakoya_clusters.preparation.block_list import list_blocks
from terakoya_clusters.preparation.datatrove_settings import executor_settings

datatrove = pytest.importorskip("datatrove", reason="datatrove is not installed")

from terakoya_clusters.preparation.datatrove import SubmittedJobs, prepare_with_datatrove  # noqa: E402
from terakoya_clusters.preparation.datatrove_steps import EncodeBlocks, JoinParts  # noqa: E402

SLURM = {"tasks": 3, "partition": "cpu", "time": "01:00:00"}


def rows(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    words = ["北斎", "寺子屋", "abcdefgh", "往来物", "き"]
    return [json.dumps({"text": " ".join(rng.choices(words, k=rng.randrange(1, 60)))}) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: two files in about 25 blocks, the second compressed, one bad line, and a tokenizer."""
    lines = rows(1, 300)
    lines.insert(200, '{"no text": 1}')
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:150]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[150:]).encode()))
    make_folder(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), os.environ.get("PYTHONPATH", "")])
    )
    return tmp_path


def one_process(out: str, *, shard: str | None = None) -> dict[str, bytes]:
    corpus = Corpus([Path("a.jsonl"), Path("b.jsonl.gz")], block_bytes=6000)
    prepare_corpus(corpus, WordTokenizer(), Path("tokenizer"), Path(out), max_rejects=1.0, shard=shard)
    return contents(Path(out))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake


def submit(settings: dict | None = None, *, force: bool = False) -> SubmittedJobs:
    made = prepare_with_datatrove(new_job("out", force=force), executor="slurm", settings={**SLURM, **(settings or {})})
    assert isinstance(made, SubmittedJobs)
    return made


@pytest.mark.parametrize(
    "settings",
    at_night(
        [{"tasks": 1}, {"tasks": 2}, {"tasks": 7, "workers": 2}, {"tasks": 1000}], always=[{"tasks": 7, "workers": 2}]
    ),
)
def test_local_gives_the_bytes_of_one_process(folder: Path, settings: dict) -> None:
    facts = prepare_with_datatrove(new_job("out", processes=2), settings=settings)
    assert contents(folder / "out") == one_process("whole")
    assert isinstance(facts, StoreFacts) and facts.rejected == 1
    assert prepare_with_datatrove(new_job("out")) == facts  # finished already
    blocks = len(list(new_job("again").blocks()))
    assert 15 < blocks < 30  # each task has at least one
    assert len(list((folder / "out.datatrove" / "stats").iterdir())) == min(settings["tasks"], blocks)


@pytest.mark.nightly
def test_a_shard_keeps_its_place(folder: Path) -> None:
    for number in (1, 2, 3):
        shard = f"{number}/3"
        prepare_with_datatrove(new_job(f"out{number}", shard=shard, processes=2))
        assert contents(folder / f"out{number}") == one_process(f"whole{number}", shard=shard)


def test_shares_are_adjacent_and_hold_every_block_once(folder: Path) -> None:
    (folder / "a.jsonl").write_text("\n".join(rows(2, 400)))
    job = new_job("out")
    job.task.parts.mkdir(parents=True)
    blocks = list_blocks(job)
    numbers = tuple(range(3, len(blocks.blocks)))
    for world in (1, 2, 5, 100):
        shares = [list(blocks.rank_share(numbers, rank, world)) for rank in range(world)]
        assert [number for share in shares for number in share] == list(numbers)
        if world <= 5:
            sizes = [sum(blocks.blocks[n].stop - blocks.blocks[n].start for n in share) for share in shares]
            assert max(sizes) - min(sizes) < 2 * 7000
    again = list(blocks.with_bytes(job.task.corpus, numbers, block_bytes=job.block_bytes))
    direct = list(enumerate(job.blocks()))[3:]
    assert again == [(n, b) for n, b in direct]
    assert any(block.data is not None for _, block in again) and any(block.data is None for _, block in again)


@pytest.mark.parametrize("engine", at_night(["datatrove", "processes"], always=["datatrove"]))
def test_a_killed_command_is_finished_by_either_engine(engine: str, folder: Path) -> None:
    code = """
from small_preparation import new_job
from terakoya_clusters.preparation.datatrove import prepare_with_datatrove
if __name__ == "__main__":
    prepare_with_datatrove(new_job("out", processes=2))
"""
    (folder / "command.py").write_text(code)
    environment = {**os.environ, "WORD_TOKENIZER_DELAY": "0.2", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "command.py"], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(Path("out/.parts").glob("0*.json"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not psutil.wait_procs(children, timeout=20)[1], "workers outlived the command"
    assert 4 <= len(list(Path("out/.parts").glob("0*.part"))) < 20
    if engine == "processes":
        one_process("out")
    else:
        prepare_with_datatrove(new_job("out", processes=2))
    assert contents(folder / "out") == one_process("whole")


@pytest.mark.nightly
def test_parts_of_the_local_engine_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_job("out")
    with pytest.raises(UserError, match="--max-rejects 0"):
        prepare_corpus(job.task.corpus, WordTokenizer(), Path("tokenizer"), Path("out"), max_rejects=0)
    for number in (0, 7, 19):
        (job.task.parts / f"{number:06d}.json").unlink()
    kept = {file: file.stat().st_mtime_ns for file in job.task.parts.glob("0*.json")}
    seen: list[int] = []

    def notes(totals: object, *_: object, **__: object) -> None:
        seen.extend(file.stat().st_mtime_ns == at for file, at in kept.items())

    monkeypatch.setattr("terakoya.preparation.job.PrepareJob._check_rejects", notes)
    prepare_with_datatrove(job)
    assert len(seen) > 15 and all(seen), "finished parts were made again"
    monkeypatch.undo()
    os.chdir(folder)
    (folder / "whole").mkdir()
    written = contents(folder / "out")
    assert {**one_process("whole"), "rejects.jsonl": b""} == {**written, "rejects.jsonl": b""}


def test_a_task_that_runs_again_writes_only_missing_parts(folder: Path, slurm: FakeSlurm) -> None:
    submit()
    job = new_job("out")
    task = EncodeBlocks(job, tuple(range(len(list(job.blocks())))))
    task.run(rank=1, world_size=3)
    made = sorted(job.task.parts.glob("0*.json"))
    assert 3 < len(made) < 12
    made[2].unlink()
    times = [file.stat().st_mtime_ns for file in made if file.exists()]
    task.run(rank=1, world_size=3)
    assert sorted(job.task.parts.glob("0*.json")) == made
    assert [file.stat().st_mtime_ns for number, file in enumerate(made) if number != 2] == times


@pytest.mark.nightly
def test_a_dead_worker_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "terakoya.preparation.disk_space._samples", lambda text, _: [text[:100]]
    )  # not the document that kills the worker
    lines = rows(5, 900)
    (folder / "a.jsonl").write_text("\n".join([*lines, '{"text": "die!"}', *lines]))
    with pytest.raises(UserError, match=r"killed because memory ran out; .* Finished parts"):
        prepare_with_datatrove(new_job("out", processes=2))
    assert list((folder / "out" / ".parts").glob("0*.part")) and not (folder / "out" / "store.json").exists()


@pytest.mark.nightly
def test_datatroves_record_of_completed_tasks_is_ignored(folder: Path) -> None:
    prepare_with_datatrove(new_job("out", processes=2))
    (folder / "a.jsonl").write_text("\n".join(rows(3, 150)))  # the record of completed tasks belongs to other text
    prepare_with_datatrove(new_job("out", processes=2, force=True))
    assert contents(folder / "out") == one_process("whole")


@pytest.mark.nightly
def test_a_failed_task_is_reported_and_its_parts_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one_process("whole")
    job = new_job("out", processes=2)
    job.task.parts.mkdir(parents=True)
    monkeypatch.setattr("terakoya_clusters.preparation.datatrove._run_local", lambda *_: None)
    with pytest.raises(UserError, match=r"(\d+) of \1 parts are missing, number 0 the first.*run the same command"):
        prepare_with_datatrove(job)
    monkeypatch.undo()
    os.chdir(folder)
    prepare_with_datatrove(new_job("out"))
    assert contents(folder / "out") == whole


@pytest.mark.parametrize(
    ("executor", "settings", "message"),
    [
        ("slurm", {**SLURM, "partitions": "cpu"}, r'partitions: unknown key; did you mean "partition"'),
        ("slurm", {**SLURM, "account": "lab"}, r"--set account: .* --set sbatch_args.account="),
        ("slurm", {"tasks": 3, "time": "1:00"}, "partition: missing"),
        ("slurm", {**SLURM, "depends": "7"}, "depends: unknown key"),
        ("local", {"tasks": 0}, "tasks: .*greater than 0, got 0"),
        ("local", {"partition": "cpu"}, "partition: unknown key; known"),
        ("ray", {"cpus_per_tasks": 2}, r'did you mean "cpus_per_task"'),
    ],
)
def test_settings_an_executor_does_not_have_are_refused(executor: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        executor_settings(executor, settings)  # type: ignore[arg-type]


def test_every_setting_is_an_argument_of_datatroves_executor() -> None:
    import inspect

    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor

    from terakoya_clusters.preparation.datatrove_settings import LocalSettings, RaySettings, SlurmSettings

    pairs = (
        (LocalSettings, LocalPipelineExecutor),
        (SlurmSettings, SlurmPipelineExecutor),
        (RaySettings, RayPipelineExecutor),
    )
    for settings, executor in pairs:
        taken = inspect.signature(executor.__init__).parameters
        assert set(settings.model_fields) <= set(taken)
        for name, field in settings.model_fields.items():
            if name not in ("tasks", "workers", "job_name", "sbatch_args", "srun_args") and not field.is_required():
                assert field.default == taken[name].default, name


def test_slurm_gives_the_bytes_of_one_process(folder: Path, forks: None, slurm: FakeSlurm) -> None:
    made = submit({"sbatch_args": {"account": "lab"}, "max_array_size": 2, "mem_per_cpu_gb": 3})
    jobs = slurm.jobs()
    assert len(jobs) == 3 and made.join == "103"  # two arrays of at most two tasks, and the join
    assert jobs["101"] | {"account": "lab", "partition": "cpu", "time": "01:00:00", "mem-per-cpu": "3G"} == jobs["101"]
    assert jobs["103"]["dependency"] == "afterany:102"
    with pytest.raises(UserError, match=r"jobs 102 and 103 were submitted for it and are not done.*scancel 102 103"):
        one_process("out")
    with pytest.raises(UserError, match="not done yet"):
        submit(force=True)
    assert set(slurm.work_off().values()) == {"completed"}
    assert contents(folder / "out") == one_process("whole")
    facts = prepare_with_datatrove(new_job("out"), executor="slurm", settings=SLURM)
    assert isinstance(facts, StoreFacts) and len(slurm.jobs()) == 3


@pytest.mark.nightly
def test_a_slurm_task_that_died_is_repeated(folder: Path, forks: None, slurm: FakeSlurm) -> None:
    submit({"tasks": 2})
    ended = slurm.work_off(run=lambda job, task: (job, task) != ("101", 1))
    assert ended == {"101": "failed", "102": "failed"}
    log = next((folder / "out.datatrove" / "join" / "slurm_logs").iterdir()).read_text()
    assert "parts are missing" in log and not (folder / "out" / "store.json").exists()
    submit({"tasks": 1})
    parts = {file: file.stat().st_mtime_ns for file in Path("out/.parts").glob("0*.part")}
    assert slurm.work_off(run=lambda job, task: job != "104") | {"103": "completed"} == slurm.work_off()
    assert all(file.stat().st_mtime_ns == time for file, time in parts.items()), "finished parts were made again"
    made = submit()  # only the join remains
    assert made.encode is None and set(slurm.work_off().values()) >= {"completed"}
    assert contents(folder / "out") == one_process("whole")


def test_a_task_of_other_input_keeps_the_parts(folder: Path, slurm: FakeSlurm) -> None:
    submit()
    job = new_job("out")
    Path("out/.parts/inputs.json").write_bytes(dump_hashed_json({"inputs": {"corpus": "another"}, "options": {}}))
    for step in (EncodeBlocks(job, (0, 1, 2)), JoinParts(job)):
        with pytest.raises(UserError, match="started again with other input; this task belongs to the earlier start"):
            step.run()
    assert not list(Path("out/.parts").glob("0*"))


def test_without_slurm_it_is_refused(folder: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    submit()
    monkeypatch.setenv("PATH", str(folder))  # without the programs of this machine
    with pytest.raises(UserError, match=r"there is no squeue on this machine; .*remove out/\.parts/jobs\.json"):
        submit()
    Path("out/.parts/jobs.json").unlink()
    with pytest.raises(UserError, match="sbatch: not found; run this where jobs are submitted"):
        submit()
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(UserError, match="outside of Slurm's array jobs"):
        submit()


def test_a_password_in_an_address_is_refused_as_jobs_are_written_to_disk(folder: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/user:PLANTED@corpus/a.jsonl", b'{"text": "a"}')
    try:
        corpus = Corpus(find_files(["memory://user:PLANTED@corpus/a.jsonl"]))
        options = PrepareOptions(sources=corpus.sources, tokenizer=Path("tokenizer"), out=Path("out"))
        with pytest.raises(
            UserError, match=r"without a password with --engine datatrove.* --engine processes$"
        ) as refused:
            prepare_with_datatrove(
                PrepareJob.create(options, corpus, WordTokenizer()), executor="slurm", settings=SLURM
            )
    finally:
        system.rm("/user:PLANTED@corpus", recursive=True)
    assert "PLANTED" not in str(refused.value) and not Path("out").exists()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_bytes_of_one_process(folder: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    prepare_with_datatrove(new_job("out", processes=2), executor="ray", settings={"tasks": 3, "mem_per_cpu_gb": 0.2})
    assert contents(folder / "out") == one_process("whole")
