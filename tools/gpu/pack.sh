#!/bin/bash
# Packs what a machine with a GPU and without a network needs beside its own torch and Transformers:
#
#   tools/gpu/pack.sh FILE.tar.gz [PYTHON_VERSION] [STORE]
#
# The archive is a folder `pack`: wheels of terakoya and of PACKAGES for Python PYTHON_VERSION (3.12) on Linux x86-64,
# the tools, the presets, the commit, and STORE, a token store of real text. Without one, documents are random ids.
set -euo pipefail
archive=$(realpath -m "$1") version=${2:-3.12} store=${3:+$(realpath "$3")}
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
packages=(pydantic pydantic-core annotated-types typing-inspection orjson pluggy lion-pytorch torchao nvidia-ml-py psutil)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pack=$folder/pack
mkdir -p "$pack/tools" "$pack/wheels"

git ls-files tools/gpu tools/bench tools/real_input/jsts.py parameters | tar -c --exclude=figures --exclude=results -T - | tar -x -C "$pack"
git rev-parse --short HEAD > "$pack/commit"
if [ -n "$store" ]; then cp -rL "$store" "$pack/store"; fi

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$pack/wheels" .
platforms=()
for each in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do platforms+=(--platform "$each"); done
wanted=() # the versions of this installation, of what it has
for package in "${packages[@]}"; do
  found=$("$python" -c "from importlib.metadata import distributions as all
print(*{each.version for each in all(name='$package')})")
  wanted+=("$package${found:+==$found}")
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
  "${platforms[@]}" --dest "$pack/wheels" "${wanted[@]}"
tar -czf "$archive" -C "$folder" pack
du -h "$archive"
