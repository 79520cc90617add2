#!/bin/sh
# A small GPT on real Japanese text, then tuned on instructions: curves, what it writes before and after.
#
#   tools/real_input/gpt.sh DATA OUT [STEPS]
#
# DATA holds ja-medium.jsonl.gz and .val.jsonl.gz, and in sft/ dolly-15k-ja-4k and instruction_ja (.train and .val). What is
# finished stays, so the script can be stopped and started again. README.md beside it has what its commands printed. STEPS, to try
# the script, takes the place of both runs' lengths.
set -eu
test $# -eq 2 || test $# -eq 3 || { sed -n '4p' "$0"; exit 2; }
short=${3:+--set max_steps=$3 --set schedule.warmup_steps=1 --set evaluation.steps=$3}
data=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
mkdir -p "$2"
cd "$2"
mkdir -p gpt

. "$here/steps.sh"

step gpt-tokenizer terakoya tokenizer train "$data/ja-medium.jsonl.gz" --type sentencepiece --vocab-size 16384 --byte-fallback \
    --normalization-rule-name identity --set 'user_defined_symbols=["\n"]' \
    --input-sentence-size 200000 --shuffle-input-sentence --num-threads 2 --out gpt/tokenizer
for text in ja-medium ja-medium.val; do
    step "gpt-$text" terakoya prepare "$data/$text.jsonl.gz" --tokenizer gpt/tokenizer --out "gpt/stores/$text"
done
cp "$here/gpt.json" "$here/tune.json" .
step gpt terakoya train gpt.json --processes 2 $short --out gpt/run
step gpt-model terakoya export gpt/run --out gpt/model
step gpt-curves python "$here/../plot_run.py" gpt/run --out gpt/curves.png --numbers loss token_accuracy

step conversations terakoya prepare "$data/sft/dolly-15k-ja-4k.train.jsonl.gz" "$data/sft/instruction_ja.train.jsonl.gz" \
    --conversations --tokenizer gpt/tokenizer --out gpt/stores/conversations
step dolly.val terakoya prepare "$data/sft/dolly-15k-ja-4k.val.jsonl.gz" --conversations --tokenizer gpt/tokenizer \
    --out gpt/stores/dolly.val
step instruction_ja.val terakoya prepare "$data/sft/instruction_ja.val.jsonl.gz" --conversations --tokenizer gpt/tokenizer \
    --out gpt/stores/instruction_ja.val
step tune terakoya train tune.json --processes 1 ${short:+$short --set epochs=null} --out gpt/tuned
step tuned-model terakoya export gpt/tuned --out gpt/tuned-model
step tuned-curves python "$here/../plot_run.py" gpt/tuned --out gpt/tuned.png --numbers loss

for prompt in "京都は" "吾輩は猫である。" "関数の戻り値は"; do
    terakoya try gpt/model "$prompt" --max-new-tokens 60
done
for model in gpt/model gpt/tuned-model; do
    echo "健康のために気をつけることを三つ挙げてください。" | terakoya try "$model" --chat --max-new-tokens 60
done
