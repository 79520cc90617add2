"""Prints what the exported models say, with the Transformers of this environment and without terakoya.

python tools/real_input/programs/answers.py OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

GAPS = ("京都は日本の{}である。", "彼は本を{}だ。", "明治時代の{}が残っている。")
BEGINNINGS = ("京都は", "吾輩は猫である。")


def fill(folder: Path) -> None:
    """Prints the three likeliest tokens of each gap."""
    import transformers

    find = transformers.pipeline("fill-mask", model=str(folder), device="cpu", top_k=3)
    for gap in GAPS:
        found = find(gap.format(find.tokenizer.mask_token))
        print("  ", gap.format("[MASK]"), " ".join(f"{each['token_str']} {each['score']:.3f}" for each in found))


def generate(folder: Path) -> None:
    """Prints how the model continues each beginning, always with the likeliest token."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    for text in BEGINNINGS:
        with torch.no_grad():
            ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=30, do_sample=False)[0]
        print("  ", tokenizer.decode(ids, skip_special_tokens=True))


def main(out: Path) -> None:
    """Asks both models."""
    import transformers

    transformers.logging.set_verbosity_error()
    fill(out / "models" / "bert")
    generate(out / "models" / "gpt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
