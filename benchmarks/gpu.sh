#!/usr/bin/env bash
# Measures one GPU in eight minutes; see gpu.py. Arguments are passed on to it.
#
# For a machine without network, on which a Python has jax with its CUDA plugin,
# flax, optax, torch, transformers, timm and peft. What else bigtrain needs comes
# from the folder WHEELS, which `make gpu-wheels` fills; tensorflow is not needed.
# TORCH_PYTHON names the interpreter with torch, if it is another one.
# The figures are also in the file FIGURES, as they come. Ctrl-C ends the
# measurement and still prints the table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
torch_python=${TORCH_PYTHON:-$python}
wheels=${WHEELS:-build/gpu-wheels}
figures=${FIGURES:-build/gpu/figures.txt}

# has PYTHON NAME>=VERSION...: prints the versions, and fails if one is too low.
has() {
  "$1" - "${@:2}" <<'PYTHON'
import importlib.metadata as metadata
import re
import sys


def number(version):
  return [int(x) for x in re.findall(r"\d+", version)[:3]]


found, misses = ["Python " + sys.version.split()[0]], []
for name, _, least in (x.partition(">=") for x in sys.argv[1:]):
  try:
    version = metadata.version(name)
  except metadata.PackageNotFoundError:
    version = "absent"
  found.append(f"{name} {version}")
  if version == "absent" or number(version) < number(least):
    misses.append(f"{name} is {version}, expected {least} or newer")
print(", ".join(found))
print(*misses, sep="\n", end="\n" if misses else "")
sys.exit(bool(misses))
PYTHON
}

for interpreter in "$python" "$torch_python"; do
  if ! command -v "$interpreter" >/dev/null; then
    echo "$interpreter: no such interpreter; set PYTHON or TORCH_PYTHON." >&2
    exit 1
  fi
done
has "$python" "jax>=0.10" "flax>=0.12.8" "optax>=0.2.8" "numpy>=2.4" || exit 1
has "$torch_python" "torch>=2.11" "transformers>=5.0" "timm>=1.0" \
  "peft>=0.18" ||
  echo "What needs these is skipped; TORCH_PYTHON may name another interpreter."

# Only what is missing: PYTHONPATH would hide what is installed.
missing=$("$python" - "$wheels" <<'PYTHON'
import importlib.metadata as metadata
import pathlib
import sys

for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
  try:
    metadata.version(wheel.name.split("-")[0])
  except metadata.PackageNotFoundError:
    print(wheel)
PYTHON
)
if [ "$missing" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  # shellcheck disable=SC2086  # Names of wheels have no spaces.
  "$python" -m pip install -q --no-index --no-deps --no-compile \
    --disable-pip-version-check --target "$site" $missing || {
    echo "$wheels does not fit this Python: where there is a network, run" \
      "make gpu-wheels GPU_PYTHON=3.12 with this version." >&2
    exit 1
  }
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
has "$python" "clu>=0" "ml_collections>=0" "google-crc32c>=0" "safetensors>=0" \
  "tensorboardX>=0" || {
  echo "$wheels lacks them: fill it where there is a network by" \
    "make gpu-wheels, or set WHEELS." >&2
  exit 1
}
mkdir -p "$(dirname "$figures")"
# Ctrl-C is for the program, which then prints its table through tee.
"$python" -m benchmarks.gpu "$@" 2>&1 | tee -i "$figures"
