#!/bin/sh
# A GPT that reads characters, at the sizes and for the steps of nanoGPT's recipe for a CPU: its validation loss.
#
#   tools/real_input/shakespeare.sh TINYSHAKESPEARE.txt[.gz] OUT
#
# The first 90 % of the text are for training, the rest for validation, as there. README.md beside it has what it printed.
set -eu
test $# -eq 2 || { sed -n '4p' "$0"; exit 2; }
text=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
mkdir -p "$2"
cd "$2"
python3 - "$text" <<'PYTHON'
import gzip, json, sys
file = sys.argv[1]
with (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf-8") as stream:
    text = stream.read()
bound = int(len(text) * 0.9)
for name, part in (("whole", text), ("store", text[:bound]), ("store.val", text[bound:])):
    with open(f"{name}.jsonl", "w", encoding="utf-8") as out:
        out.write(json.dumps({"text": part}) + "\n")
PYTHON
plugin="$here/../../plugins/examples/characters.py"
terakoya --plugin "$plugin" tokenizer train whole.jsonl --type characters --out work/characters
for name in store store.val; do
    terakoya --plugin "$plugin" prepare "$name.jsonl" --tokenizer work/characters --out "work/$name"
done
terakoya --plugin "$plugin" train "$here/../../parameters/shakespeare_char.json" --out work/run
terakoya try work/run "KING RICHARD III:" --max-new-tokens 40
