"""From jsonl to a token store with MeCab and WordPiece, beside Transformers' tokenizer in a pool: whole commands.

    python tools/bench/prepare_mecab.py CORPUS.jsonl.gz --tokenizer WORDPIECE_FOLDER [--documents N]

Ours is `terakoya prepare --processes 2` on the plain jsonl file, the field's way is `prepare_mecab_peer.py` in two
processes with the same folder. Both write Megatron's format; their files have to be the same, byte for byte (ours
leaves the word starts behind as well). Exits with 1 below the goal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from prepare_turns import WORKERS, Way, compare, ours, plain, run

PEER = Path(__file__).with_name("prepare_mecab_peer.py")
NAME = "BertJapaneseTokenizer"
GOALS = {NAME: 3.5}


def main() -> int:
    """Prints a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path, help="a jsonl.gz file with a field text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of kind mecab_wordpiece, uint16 ids")
    parser.add_argument("--documents", type=int, help="only the first so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where a few GB can lie for a while")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        corpus = work / "corpus.jsonl"
        megabytes = plain(options.corpus, corpus, documents=options.documents)

        def our_way(out: Path) -> float | None:
            return ours(corpus, options.tokenizer, out, append_eos=False)

        def peer_way(out: Path) -> None:
            run([sys.executable, PEER, corpus, options.tokenizer, out, "--processes", WORKERS])

        same = {"tokens.bin": "tokens.bin", "tokens.idx": "tokens.idx"}
        ways = {"terakoya": Way(our_way), NAME: Way(peer_way, same)}
        return compare(ways, GOALS, rounds=options.rounds, work=work, megabytes=megabytes)


if __name__ == "__main__":
    sys.exit(main())
