"""Executes play.ipynb with a model, and keeps of its outputs what does not tell of the machine.

python tools/notebooks/execute.py --model work/model [--encoder work/bert] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).with_name("play.ipynb")
PICTURE_BYTES = 60_000
"""The largest picture that may stand in a notebook."""


def main() -> None:
    """Runs all cells; a cell that fails ends it with that cell's error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder that AutoModelForCausalLM loads")
    parser.add_argument("--encoder", type=Path, help="a folder that AutoModelForMaskedLM loads")
    parser.add_argument("--out", type=Path, default=NOTEBOOK, help="default: play.ipynb itself")
    arguments = parser.parse_args()
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError as error:
        sys.exit(f'{error}; install it with: pip install "terakoya[notebook]"')
    os.environ["TERAKOYA_MODEL"] = str(arguments.model.resolve())
    os.environ["TERAKOYA_ENCODER"] = str(arguments.encoder.resolve()) if arguments.encoder else ""
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            tells = re.search(r"/(home|root|work|tmp|Users)/", str(output))
            if tells:
                sys.exit(f"an output names a folder of this machine: {str(output)[:300]}")
            if len(output.get("data", {}).get("image/png", "")) * 3 // 4 > PICTURE_BYTES:
                sys.exit(f"a picture has more than {PICTURE_BYTES:,} bytes; make it smaller")
    nbformat.write(notebook, arguments.out)
    print(f"{arguments.out}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells executed")


if __name__ == "__main__":
    main()
