#!/bin/sh
# Everything before training on real Japanese text: tokenizers of four kinds, reports side by side, stores, and a mix of
# three corpora in shares of 70, 20 and 10.
#
#   tools/real_input/run.sh DATA OUT
#
# DATA holds ja-medium.jsonl.gz, ja-medium.val.jsonl.gz and blend/{fiction,wiki,tech}.jsonl.gz with their .val files. What
# is finished in OUT stays, so the script can be stopped and started again. README.md beside it has what it printed.
set -eu
test $# -eq 2 || { sed -n '5p' "$0"; exit 2; }
data=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
mkdir -p "$2"
cd "$2"
kinds="mecab_wordpiece mecab_character sentencepiece byte_bpe"

. "$here/steps.sh"

corpus="$data/ja-medium.jsonl.gz"
step counts terakoya tokenizer count "$corpus" --type mecab_wordpiece --out counts
step train-mecab_wordpiece terakoya tokenizer train "$corpus" --type mecab_wordpiece --counts counts --out tokenizers/mecab_wordpiece
step train-mecab_character terakoya tokenizer train "$corpus" --type mecab_character --counts counts --out tokenizers/mecab_character
step train-sentencepiece terakoya tokenizer train "$corpus" --type sentencepiece --vocab-size 32768 \
    --input-sentence-size 200000 --shuffle-input-sentence --num-threads 2 --out tokenizers/sentencepiece
step train-byte_bpe terakoya tokenizer train "$corpus" --type byte_bpe --vocab-size 32768 --out tokenizers/byte_bpe

for text in ja-medium blend/fiction blend/wiki blend/tech; do
    name=$(basename "$text")
    step "report-$name" terakoya tokenizer report tokenizers/mecab_wordpiece tokenizers/mecab_character \
        tokenizers/sentencepiece tokenizers/byte_bpe --corpus "$data/$text.val.jsonl.gz" --html "report-$name.html"
    for kind in $kinds; do
        step "prepare-$name-$kind" terakoya prepare "$data/$text.jsonl.gz" --tokenizer "tokenizers/$kind" --out "stores/$kind/$name"
    done
done
step count terakoya store count stores/*/*

sed "s|DATA|$data|g" "$here/mix.json" > mix.json
step mix terakoya run mix.json
step shares python3 "$here/shares.py" mix/run
