#!/bin/bash
# Packs what a machine with a GPU and without a network needs beside its own torch and Transformers:
#
#   tools/gpu/pack.sh FOLDER [PYTHON_VERSION]
#
# FOLDER gets wheels: terakoya's, and those of the packages in PACKAGES for Python PYTHON_VERSION (3.12) on Linux x86-64.
set -euo pipefail
folder=$(realpath -m "$1") version=${2:-3.12}
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
packages=(pydantic pydantic-core annotated-types typing-inspection orjson pluggy)
mkdir -p "$folder"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
platforms=()
for each in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do platforms+=(--platform "$each"); done
pins=()
for package in "${packages[@]}"; do
  pins+=("$package==$("$python" -c "from importlib.metadata import version; print(version('$package'))")")
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
  "${platforms[@]}" --dest "$folder" "${pins[@]}"
du -sh "$folder"
