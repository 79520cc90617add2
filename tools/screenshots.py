"""Makes the pictures of the documentation: the screen of a training, the report, the page that follows a run, the
report of a tokenizer, and a model card. It trains the demo's model and looks at it in a headless Chromium.

python tools/screenshots.py [--toy] [--work FOLDER] [--out docs/figures]

--toy trains a few steps only, to try the script. Without a browser it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from browser import Browser, find_browser
from terakoya.process_pool import start_child

COLUMNS, ROWS = 92, 30
"""Size of the terminal."""
TALL = 4000
"""The height of a window in which no page scrolls, in CSS pixels."""
LARGEST = 150_000
"""The most bytes that a picture may have."""
COLOURS = 250
"""The number of colours of a picture that would be large otherwise."""
CARD_STYLE = """
body { font: 16px/1.55 system-ui, "Noto Sans CJK JP", sans-serif; max-width: 46rem; margin: 1.5rem auto;
  color: #1f2328 }
h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: .3rem; line-height: 1.25 } h2 { margin-top: 1.6rem }
pre { background: #f6f8fa; padding: .8rem 1rem; border-radius: 6px; overflow: auto; font-size: 13px }
table { border-collapse: collapse; font-size: 14px } th, td { border: 1px solid #d1d9e0; padding: .3rem .7rem }
th:empty { padding: 0 } img { max-width: 100% } code { font-size: 13px; overflow-wrap: anywhere }
"""


def main() -> None:
    """Makes all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs/figures")
    parser.add_argument("--work", type=Path, help="a folder for the runs, kept; default: a temporary one")
    parser.add_argument("--toy", action="store_true", help="train a few steps only")
    arguments = parser.parse_args()
    if find_browser() is None:
        print("no pictures: there is no browser here (apt-get install chromium)")
        return
    with contextlib.ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        make_pictures(work.resolve(), arguments.out.resolve(), steps=8 if arguments.toy else 600)


PROMPT = "パン屋の森さんは、毎朝たくさんの[MASK]を焼きます。"


def make_pictures(work: Path, out: Path, *, steps: int) -> None:
    """Trains in `work` and writes the pictures into `out`."""
    run_command(work, "demo", "--out", "demo", "--max-steps", str(steps))
    parameters = json.loads((work / "demo/run/parameters.json").read_text(encoding="utf-8"))
    parameters["optimizer"]["learning_rate"] = 5e-3
    parameters["logging_steps"] = max(1, steps // 12)
    parameters["evaluation"]["steps"] = max(1, steps // 5)
    parameters["events"] = {"samples": {"texts": [PROMPT]}}
    (work / "bert.json").write_text(json.dumps(parameters, ensure_ascii=False), encoding="utf-8")
    shutil.rmtree(work / "run", ignore_errors=True)
    with Browser(width=1200, height=860) as browser:
        screen = train_in_a_terminal(work, browser, out / "live.png", steps=steps)
        draw_terminal(browser, screen, work, out / "train.png")
        run_command(work, "report", "demo/run", "run", "--label", "1e-2", "--label", "5e-3", "--out", "report.html")
        browser.resize(1200, 840)
        browser.open(work / "report.html")
        save(out / "report.png", browser.picture())
        characters = ("demo/corpus.txt", "--type", "mecab_character", "--out", "characters")
        if not (work / "characters").is_dir():
            run_command(work, "tokenizer", "train", *characters)
        words = ("demo/tokenizer", "characters", "--corpus", "demo/corpus.txt", "--html", "tokenizer.html")
        run_command(work, "tokenizer", "report", *words)
        browser.resize(820, 910)
        browser.open(work / "tokenizer.html")
        save(out / "tokenizer_report.png", browser.picture())
        shutil.rmtree(work / "card", ignore_errors=True)
        upload = ("upload", "run", "--name", "my-lab/tiny-japanese-bert", "--license", "apache-2.0")
        run_command(work, *upload, "--prompt", PROMPT, "--dry-run", "card")
        browser.resize(860, TALL)
        browser.open(render_card(work / "card"))
        save(out / "card.png", picture_down_to(browser, "table", width=860))


def run_command(work: Path, *words: str) -> None:
    """Runs `terakoya WORDS` in `work`. It ends when this program does, however that ends."""
    command = [sys.executable, "-m", "terakoya", *words]
    if code := start_child(command, cwd=work, stdout=subprocess.DEVNULL).wait():
        raise subprocess.CalledProcessError(code, command)


@contextlib.contextmanager
def serving(work: Path) -> Iterator[str]:
    """Runs `terakoya report run --live` while the block runs; yields the page's address."""
    command = [sys.executable, "-m", "terakoya", "report", "run", "--live", "--port", "0", "--every", "2"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = start_child(command, cwd=work, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise RuntimeError(f"expected the address of the page, got {line!r}")
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def train_in_a_terminal(work: Path, browser: Browser, live: Path, *, steps: int) -> str:
    """Trains `bert.json` in a terminal of its own, and takes the picture `live` of the page that follows the run on its
    way. Returns what the terminal had received when four fifths of the steps were done."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "terakoya", "train", "bert.json", "--out", "run"]
    training = start_child(command, cwd=work, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    received, moment = bytearray(), bytearray()

    def collect() -> None:
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the program has closed its side
                return
            if not piece:
                return
            received.extend(piece)
            shown = re.findall(rb"(\d[\d,]*)/(\d[\d,]*)", piece)
            if shown and int(shown[-1][0].replace(b",", b"")) >= 0.8 * steps and not moment:
                moment.extend(received)

    reader = threading.Thread(target=collect)
    reader.start()
    metrics = work / "run/metrics.jsonl"
    half = f'"kind": "validation", "step": {3 * max(1, steps // 5)},'
    while training.poll() is None and not (metrics.is_file() and half in metrics.read_text(encoding="utf-8")):
        time.sleep(0.2)
    if training.poll() not in (None, 0):
        raise RuntimeError(received.decode(errors="replace"))
    with serving(work) as address:
        browser.resize(1200, TALL)
        browser.open(address)
        browser.wait_for("document.querySelector('svg.chart')")
        browser.wait_for("seen")
        left, top, width, height = browser.box("svg.chart")
        browser.mouse("moved", left + 0.3 * width, top + 0.5 * height)
        save(live, picture_down_to(browser, "svg.chart", width=1200))
    training.wait()
    reader.join()
    os.close(master)
    if training.returncode:
        raise RuntimeError(received.decode(errors="replace"))
    return bytes(moment or received).decode(errors="replace")


def draw_terminal(browser: Browser, received: str, work: Path, picture: Path) -> None:
    """Draws what a terminal received as a picture."""
    from rich.console import Console
    from rich.text import Text

    lines = [line.rpartition("\r\x1b[K")[2] for line in received.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("$ terakoya train bert.json --out run"))
    for line in lines[-(ROWS - 1) :]:
        console.print(Text.from_ansi(line))
    drawing = work / "terminal.html"
    svg = console.export_svg(title="terakoya train")
    drawing.write_text(f'<body style="margin:0;width:1000px">{svg}</body>', encoding="utf-8")
    browser.resize(1000, 800)
    browser.open(drawing)
    left, top, width, height = browser.box("svg")
    save(picture, browser.picture(clip=(left, top, width, height)))


def picture_down_to(browser: Browser, selector: str, *, width: int) -> bytes:
    """Returns a picture of the page from its top to the end of the first element of `selector`. The page does not
    scroll: the window is TALL."""
    _, top, _, height = browser.box(selector)
    return browser.picture(clip=(0, 0, width, round(top + height) + 16))


def render_card(folder: Path) -> Path:
    """Returns a page that shows the card in `folder` as the Hub would: metadata above, then the text."""
    import markdown

    _, metadata, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    start = metadata[: metadata.find("model-index")].rstrip() if "model-index" in metadata else metadata
    body = markdown.markdown(text, extensions=["tables", "fenced_code"])
    page = folder / "card.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><style>{CARD_STYLE}</style><pre>{start}</pre>{body}',
        encoding="utf-8",
    )
    return page


def save(file: Path, picture: bytes) -> None:
    """Writes a picture, with fewer colours if it is large.

    Raises:
        RuntimeError: it is larger than a picture in the documentation may be.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    if len(picture) > LARGEST / 2:
        image = image.quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    size = file.stat().st_size
    if size > LARGEST:
        raise RuntimeError(f"{file}: {size:,} bytes; a picture may have {LARGEST:,}")
    print(f"{file}: {image.width} x {image.height}, {size:,} bytes")


if __name__ == "__main__":
    main()
