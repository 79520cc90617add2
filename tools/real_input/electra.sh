#!/bin/sh
# ELECTRA-small with four layers on real Japanese text: trained, its curves drawn, the discriminator taken out and tuned
# on JSTS beside the same model with random weights.
#
#   tools/real_input/electra.sh DATA OUT
#
# Continues in the OUT of run.sh, whose counted words it takes; DATA also holds eval/jglue/jsts. What is finished
# stays, so the script can be stopped and started again. README.md beside it has what it printed.
set -eu
test $# -eq 2 || { sed -n '5p' "$0"; exit 2; }
data=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
cd "$2"
mkdir -p electra

. "$here/steps.sh"

step electra-tokenizer terakoya tokenizer train "$data/ja-medium.jsonl.gz" --type mecab_wordpiece --counts counts \
    --vocab-size 8192 --limit-alphabet 3000 --out electra/tokenizer
for text in ja-medium ja-medium.val; do
    step "electra-$text" terakoya prepare "$data/$text.jsonl.gz" --tokenizer electra/tokenizer --out "electra/stores/$text"
done
cp "$here/electra.json" electra.json
step electra terakoya train electra.json --processes 2 --out electra/run
step curves python "$here/../plot_run.py" electra/run --out electra/curves.png \
    --numbers generator_loss discriminator_loss discriminator_auc replaced_rate
step export terakoya export electra/run --only discriminator --out electra/model
step jsts python "$here/jsts.py" electra/model --data "$data/eval/jglue/jsts"
