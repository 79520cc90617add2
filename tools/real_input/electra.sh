#!/bin/sh
# ELECTRA-small with four layers on real Japanese text: trained, its curves drawn, the discriminator taken out and tuned
# on JSTS beside the same model with random weights.
#
#   tools/real_input/electra.sh DATA OUT
#
# Continues in the OUT of run.sh, whose tokenizer and store it takes; DATA also holds eval/jglue/jsts. What is finished
# stays, so the script can be stopped and started again. README.md beside it has what it printed.
set -eu
test $# -eq 2 || { sed -n '5p' "$0"; exit 2; }
data=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
cd "$2"
tokenizer=tokenizers/mecab_wordpiece

# Prints a command and its seconds; a command that succeeded once is not run again.
step() {
    step=$1
    shift
    test -e "done/$step" && return
    echo "\$ $*"
    began=$(date +%s)
    "$@"
    echo "($(($(date +%s) - began)) s)"
    mkdir -p done
    touch "done/$step"
}

step prepare-val terakoya prepare "$data/ja-medium.val.jsonl.gz" --tokenizer $tokenizer --out stores/mecab_wordpiece/ja-medium.val
cp "$here/electra.json" electra.json
step electra terakoya train electra.json --processes 2 --out electra/run
step curves python "$here/../plot_run.py" electra/run --out electra/curves.png \
    --numbers generator_loss discriminator_loss discriminator_auc replaced_rate
step export terakoya export electra/run --only discriminator --out electra/discriminator
step jsts python "$here/jsts.py" electra/discriminator --data "$data/eval/jglue/jsts"
