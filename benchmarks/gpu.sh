#!/usr/bin/env bash
# Measures one GPU in eight minutes; see gpu.py. Arguments are passed on to it.
#
# For a machine without network, on which a Python has jax with its CUDA plugin,
# flax, optax, torch, transformers, timm and peft. What else bigtrain needs comes
# from the folder WHEELS, which `make gpu-wheels` fills; tensorflow is not needed.
# The figures are also in the file FIGURES.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
wheels=${WHEELS:-build/gpu-wheels}
figures=${FIGURES:-build/gpu/figures.txt}

"$python" - <<'PYTHON'
import importlib.metadata as metadata
import sys

LEAST = dict(jax="0.10", flax="0.12.8", optax="0.2.8", numpy="2.4")
PEERS = dict(torch="2.11", transformers="5.0", timm="1.0", peft="0.18")


def number(version):
  return [int(x) for x in version.split("+")[0].split(".")[:2]]


def versions(least):
  for name, bound in least.items():
    try:
      version = metadata.version(name)
    except metadata.PackageNotFoundError:
      yield name, "absent", False
      continue
    yield name, version, number(version) >= number(bound)


ours, peers = list(versions(LEAST)), list(versions(PEERS))
print("Python", sys.version.split()[0], *(f"{n} {v}," for n, v, _ in ours + peers))
for name, version, fits in ours:
  if not fits:
    sys.exit(f"{name} is {version}, but this needs {name}>={LEAST[name]}")
for name, version, fits in peers:
  if not fits:
    print(f"{name} is {version}: its comparisons are left out (TORCH_PYTHON may "
          f"name an interpreter with {name}>={PEERS[name]})")
PYTHON

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
    --disable-pip-version-check --target "$site" $missing
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
mkdir -p "$(dirname "$figures")"
"$python" -m benchmarks.gpu "$@" 2>&1 | tee "$figures"
