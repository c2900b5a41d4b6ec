#!/usr/bin/env bash
# Installs what the cluster tests need and this machine lacks, where it may.
set -euo pipefail

declare -A packages=([slurmctld]=slurm-wlm [munged]=munge [mpirun]=openmpi-bin
  [shellcheck]=shellcheck)
missing=()
for program in "${!packages[@]}"; do
  PATH=$PATH:/usr/sbin command -v "$program" >/dev/null ||
    missing+=("${packages[$program]}")
done
if ((!${#missing[@]})); then
  exit 0
fi
if ((EUID)) || ! command -v apt-get >/dev/null; then
  echo "Not installed: ${missing[*]}. Their tests are skipped." >&2
  exit 0
fi
echo "Installing ${missing[*]}."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
