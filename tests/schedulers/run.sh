#!/usr/bin/env bash
# Runs a command that tests on this machine's own cluster:
#
#   tests/schedulers/run.sh python -m pytest -m cluster tests/schedulers
#
# Installs missing programs first, where that is allowed. As root, runs the
# command in a namespace with its own processes and its own /etc/hosts: no daemon
# and no job outlives it, however it ends.
set -euo pipefail

inside() { # This shell is process 1 of the namespace, so it must not exec.
  local hosts code=0
  hosts=$(mktemp)
  cat /etc/hosts >"$hosts"
  chmod 644 "$hosts"
  mount --bind "$hosts" /etc/hosts
  rm "$hosts"
  "$@" || code=$?
  exit "$code"
}

install_missing() {
  local -A packages=([slurmctld]=slurm-wlm [munged]=munge
    [mpirun]=openmpi-bin [shellcheck]=shellcheck)
  local missing=() program
  for program in "${!packages[@]}"; do
    PATH=$PATH:/usr/sbin command -v "$program" >/dev/null ||
      missing+=("${packages[$program]}")
  done
  if ((!${#missing[@]})); then
    return
  fi
  if ((EUID)) || ! command -v apt-get >/dev/null; then
    echo "Not installed: ${missing[*]}. Their tests are skipped: only root" \
      "on Debian or Ubuntu may install them here." >&2
    return
  fi
  echo "Installing ${missing[*]}."
  export DEBIAN_FRONTEND=noninteractive
  # The tests start their own daemons; the packages must not start any.
  local policy=/usr/sbin/policy-rc.d
  if [[ ! -e "$policy" ]]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get update -qq &&
    apt-get install -y -qq --no-install-recommends "${missing[@]}" \
      >/dev/null ||
    echo "That failed. The tests that need it are skipped." >&2
  if [[ -n "$(trap -p EXIT)" ]]; then
    rm -f "$policy"
    trap - EXIT
  fi
}

if [[ "${1:-}" == --inside ]]; then
  shift
  inside "$@"
fi
# .ci/run may have no time left for tests, see tests/conftest.py.
if (($(date +%s) < ${BIGTRAIN_TESTS_UNTIL:-$(date +%s) + 1})); then
  install_missing
fi
own=(unshare --mount --pid --fork --kill-child --mount-proc)
if ((EUID)) || ! "${own[@]}" true 2>/dev/null; then
  exec "$@"
fi
# Killing process 1 kills the whole namespace; it is killed with this script.
setpriv --pdeathsig KILL "${own[@]}" "$0" --inside "$@" &
namespace=$!
trap 'kill -KILL "$namespace"' INT TERM
wait "$namespace"
