"""A script's command is found with the same words as in bash, and nothing of the script runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from terakoya.errors import UserError

pytest.importorskip("tree_sitter_bash")

from terakoya_megatron.shell_script import Script, as_written, unknown_text

TRAINING = r"""#!/bin/bash
# sizes of the model
export LAYERS=24
HIDDEN=$((128 * 16 + 2 * (LAYERS / 2)))  # a comment behind it
NAME="tiny model"
size='literal $LAYERS'
ROOT=/data/run/
FILES=(
  "/data/one_text_document"  # the first
  # "/data/left_out"
  /data/two_text_document
)
MIX=$(IFS=' '; echo "${FILES[*]}")
WEIGHTED="0.3 ${FILES[0]} 0.7 ${FILES[1]}"
if [[ -f "${ROOT}/latest_iteration.txt" ]]; then
  LOAD="--load ${ROOT}"
else
  LOAD="--load ${ROOT} --no-load-rng"
fi
if [ $LAYERS -gt 12 ] && [ "${NAME}" = "tiny model" ]; then
  KIND=deep
elif [ -z "$NAME" ]; then
  KIND=none
else
  KIND=flat
fi
case ${KIND} in
  fl*) STYLE=linear ;;
  deep|wide) STYLE=cosine ;;
esac
OPTIONS=" \
    --num-layers ${LAYERS} \
    --hidden-size $HIDDEN \
	--lr-decay-style ${STYLE} \
    ${LOAD} \
    --swiglu"
OPTIONS="${OPTIONS} \
    --bf16"
EXTRA=(--seed 7)
EXTRA+=(--name "${NAME}")
python pretrain_gpt.py ${OPTIONS} --data-path ${MIX} "${EXTRA[@]}" --root "${ROOT%/}/x" --size "$size" \
  --default ${UNSET:-5} --escaped "a \"b\" \$c" --joined ${LAYERS}x$HIDDEN \
  2>&1 | tee ${ROOT}/log.txt
"""


def build_splitter(text: str, folder: Path, **defined: str) -> list[list[str]]:
    """Returns the words of the commands that start with python or torchrun."""
    return [words for words in Script(folder, defined).commands(text) if words[0].endswith(("python", "torchrun"))]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_words_are_expanded_as_in_bash(tmp_path: Path) -> None:
    instrumented = f'python() {{ printf "%s\\0" python "$@" >&3; }}\ntee() {{ :; }}\n{TRAINING}'
    (tmp_path / "instrumented.sh").write_text(instrumented)
    command = f"exec 3>{tmp_path}/words; . {tmp_path}/instrumented.sh"
    subprocess.run(["bash", "-c", command], check=True, timeout=60, capture_output=True)
    expected = (tmp_path / "words").read_text().split("\0")[:-1]
    assert "--no-load-rng" in expected and "tiny model" in expected and "2072" in expected  # bash ran the script
    assert build_splitter(TRAINING, tmp_path) == [expected]


def test_the_output_of_a_program_is_unknown_and_the_program_never_runs(tmp_path: Path) -> None:
    text = (
        f"N=$(touch {tmp_path}/file; echo 3)\npython train.py --num-layers $N --node ${{SLURM_NODEID}} --x $(date)y\n"
    )
    (words,) = build_splitter(text, tmp_path)
    assert not (tmp_path / "file").exists()
    layers, node, joined = words[3], words[5], words[7]
    assert unknown_text(layers) == f"$(touch {tmp_path}/file; echo 3)"
    assert unknown_text(node) == "${SLURM_NODEID}" and as_written(node) == "${SLURM_NODEID}"
    assert unknown_text(joined) == "$(date)" and as_written(joined) == "$(date)y"


def test_defined_values_replace_those_of_the_script(tmp_path: Path) -> None:
    text = "n=$(yq -e '.layers' config.yaml)\npython train.py --num-layers ${n}\n"
    assert unknown_text(build_splitter(text, tmp_path)[0][3]) == "$(yq -e '.layers' config.yaml)"
    assert build_splitter(text, tmp_path, n="12") == [["python", "train.py", "--num-layers", "12"]]
    (tmp_path / "config.yaml").write_text("layers: 9\n")
    assert build_splitter(text, tmp_path) == [["python", "train.py", "--num-layers", "9"]]


def test_commands_in_strings_are_found(tmp_path: Path) -> None:
    text = (
        'log="out_$(date "+%Y").log"\ncmd="torchrun --nnodes 2 pretrain_gpt.py --num-layers 3 \\\n 2>&1 | tee ${log}"\n'
    )
    expected = [["torchrun", "--nnodes", "2", "pretrain_gpt.py", "--num-layers", "3"]]
    assert build_splitter(f"{text}echo ${{cmd}}\neval ${{cmd}}\n", tmp_path) == expected
    assert build_splitter(f'{text}srun bash -c "${{cmd}}"\n', tmp_path) == expected


def test_the_scripts_own_arguments_do_not_change_its_defaults(tmp_path: Path) -> None:
    text = (
        "steps=1000\nwhile [[ ${#} -gt 0 ]]; do\n  case ${1} in\n    --steps) steps=${2}; shift ;;\n  esac\n"
        "  shift\ndone\n"
        "python train.py --num-layers 2 --train-iters ${steps}\n"
    )
    assert build_splitter(text, tmp_path)[0][-1] == "1000"


def test_without_the_parser_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tree_sitter_bash", None)
    with pytest.raises(UserError, match=r'pip install "terakoya\[megatron\]"'):
        Script(tmp_path, {})
