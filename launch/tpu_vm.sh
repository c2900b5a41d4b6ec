#!/usr/bin/env bash
# A run on all workers of a Cloud TPU slice, with the gcloud command:
#
#   export TPU=my-slice ZONE=us-central2-b
#   TYPE=v4-32 VERSION=tpu-ubuntu2204-base launch/tpu_vm.sh create
#   launch/tpu_vm.sh install             # this commit, and its environment
#   launch/tpu_vm.sh run --config=configs/x.py --workdir=gs://bucket/x
#   launch/tpu_vm.sh follow [WORKER]     # the log
#   launch/tpu_vm.sh stop                # save and exit with code 75
#   launch/tpu_vm.sh delete
#
# `run` starts the program detached, so a lost connection does not end it, and
# starts it again if it fails.
set -euo pipefail

usage() {
  sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$0" >&2
  exit 2
}

tpus() { gcloud compute tpus "$@" --zone="$ZONE"; }
on() { # WORKER COMMAND
  tpus tpu-vm ssh "$TPU" --worker="$1" --command="$2"
}

(($#)) || usage
: "${TPU:?the name of the slice}" "${ZONE:?its zone}"
action=$1
shift
case "$action" in
  create)
    # Google starts a queued slice when capacity is available.
    read -ra more <<<"${OPTIONS:-}"
    tpus queued-resources create "$TPU" --node-id="$TPU" \
      --accelerator-type="${TYPE:?such as v4-32}" \
      --runtime-version="${VERSION:?such as tpu-ubuntu2204-base}" "${more[@]}"
    ;;
  install)
    root=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
    archive=$(mktemp)
    trap 'rm -f "$archive"' EXIT
    git -C "$root" archive --format=tar.gz -o "$archive" HEAD
    tpus tpu-vm scp "$archive" "$TPU:bigtrain.tar.gz" --worker=all
    on all 'mkdir -p bigtrain && tar -xzf bigtrain.tar.gz -C bigtrain &&
      make -C bigtrain install EXTRAS=tpu'
    ;;
  run)
    # After a preemption, run the same command on a new slice.
    printf -v flags '%q ' "$@"
    on all "cd bigtrain && { nohup .venv/bin/python -m bigtrain.tools.supervise \
      --when_preempted=end -- .venv/bin/python -m bigtrain.main $flags \
      >>run.log 2>&1 </dev/null & echo \$! >run.pid; }"
    ;;
  follow)
    on "${1:-0}" 'tail -n 100 -F bigtrain/run.log'
    ;;
  stop)
    # shellcheck disable=SC2016  # The worker's shell expands it.
    on "${1:-0}" 'kill -TERM "$(cat bigtrain/run.pid)"'
    ;;
  delete)
    tpus queued-resources delete "$TPU" --force
    ;;
  *)
    usage
    ;;
esac
