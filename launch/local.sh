#!/usr/bin/env bash
# Starts N processes of one job on this machine.
#
#   launch/local.sh N --config=configs/x.py --workdir=runs/x [--config.lr=...]
#
# On a machine with NVIDIA GPUs each process has its own GPU; otherwise each has
# DEVICES simulated devices (default: 1). Process 0 writes to the terminal, the
# others to the folder LOGS (default: runs/logs). Ctrl-C and SIGTERM reach all of
# them. The script exits with the job's exit code. With RESTARTS=5 it starts the
# job again when it fails, until five starts in a row make no progress.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "Usage: ${0} N --config=FILE --workdir=DIR [--config.KEY=VALUE ...]" >&2
  exit 2
fi
if [[ -n "${RESTARTS:-}" ]]; then
  exec env -u RESTARTS "${PYTHON:-python}" -m bigtrain.tools.supervise \
    "--failures=$RESTARTS" -- bash "$0" "$@"
fi
number=$1
shift
devices=${DEVICES:-1}
logs=${LOGS:-runs/logs}
python=${PYTHON:-python}
port=${PORT:-$("$python" -c 'import socket
s = socket.create_server(("", 0))
print(s.getsockname()[1])')}

gpus=0
if command -v nvidia-smi >/dev/null; then
  gpus=$(nvidia-smi --list-gpus | wc -l)
  if ((gpus && gpus < number)); then
    echo "$number processes need a GPU each, but this machine has $gpus." >&2
    exit 2
  fi
fi
if ((!gpus)); then
  XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"
  export XLA_FLAGS JAX_PLATFORMS=cpu
fi

mkdir -p "$logs"
pids=()
for ((i = 0; i < number; i++)); do
  command=("$python" -m bigtrain.main "$@" "--coordinator=localhost:$port"
    "--num_processes=$number" "--process_id=$i")
  if ((gpus)); then
    export CUDA_VISIBLE_DEVICES=$i
  fi
  if ((i)); then
    "${command[@]}" >"$logs/process-$i.log" 2>&1 &
  else
    "${command[@]}" &
  fi
  pids+=($!)
done

# After the first signal the program saves; after the second it exits at once.
# shellcheck disable=SC2317  # The traps call it.
forward() { kill "-$1" "${pids[@]}" 2>/dev/null || true; }
trap 'forward TERM' TERM INT
trap 'forward USR1' USR1

code=0
for pid in "${pids[@]}"; do
  # A trap interrupts `wait`, so wait again.
  while true; do
    own=0
    wait "$pid" || own=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  if ((own && (!code || own < 128))); then
    code=$own
  fi
done
exit "$code"
