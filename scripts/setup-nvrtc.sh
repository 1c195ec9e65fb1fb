#!/usr/bin/env bash
# Puts NVRTC, the CUDA run-time compiler, into a folder, without a toolkit and without a GPU.
#
#   scripts/setup-nvrtc.sh [FOLDER]
#
# The default folder, ${XDG_DATA_HOME:-~/.local/share}/rollout/nvrtc, is one where it is looked for; for another one
# the script prints the variable to set. Does nothing if it is there already.
set -euo pipefail

version=13.0.88
default=${XDG_DATA_HOME:-$HOME/.local/share}/rollout/nvrtc
folder=${1:-$default}
library=nvidia/cu13/lib/libnvrtc.so.13
stamp=.nvrtc-$version

if [ ! -e "$folder/$library" ] || [ ! -e "$folder/$stamp" ]; then
  python=$(command -v python3 || command -v python || true)
  [ -n "$python" ] || { echo "setup-nvrtc: python3 with pip is needed" >&2; exit 1; }
  mkdir -p "$folder"
  # Beside the target, so that the last step is a rename.
  work=$(mktemp -d "$folder/.unpacking-XXXXXX")
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$work/wheel" "nvidia-cuda-nvrtc==$version"
  "$python" -m zipfile -e "$work"/wheel/*.whl "$work/content"
  [ -e "$work/content/$library" ] || { echo "setup-nvrtc: the wheel holds no $library" >&2; exit 1; }
  rm -rf "$folder/nvidia"
  mv "$work/content/nvidia" "$folder/nvidia"
  touch "$folder/$stamp"
fi

echo "NVRTC $version is in $folder"
if [ "$folder" != "$default" ]; then
  echo "export ROLLOUT_CUDA_LIBRARIES=$folder"
fi
