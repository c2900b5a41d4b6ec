#!/usr/bin/env bash
# Starts a job with mpirun (Open MPI, MPICH, Intel MPI), one process a rank:
#
#   launch/mpi.sh -np 4 --hostfile hosts -- --config=configs/x.py --workdir=DIR
#
# What stands before -- is mpirun's. DIR is on storage that all hosts see.
# SIGTERM and SIGUSR1 to this script save and end the job with code 75.
set -euo pipefail

# mpirun starts this same file on each host, with the addresses it needs.
if [[ "${1:-}" == --rank ]]; then
  shift
  export JAX_COORDINATOR_ADDRESS=$1
  shift
  export JAX_PROCESS_ID=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-}}}
  export JAX_NUM_PROCESSES=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}
  exec "${PYTHON:-python}" -m bigtrain.main "$@"
fi

options=()
while (($#)) && [[ "$1" != -- ]]; do
  options+=("$1")
  shift
done
if ((!$#)); then
  echo "Usage: ${0} [mpirun's options] -- --config=FILE --workdir=DIR" >&2
  exit 2
fi
shift

# A rank has threads: it must not be bound to one core, as Open MPI 4 and 5 would
# do where there are two ranks. (--bind-to in the options goes before this.)
export OMPI_MCA_hwloc_base_binding_policy=none
export PRTE_MCA_hwloc_default_binding_policy=none

# Rank 0 is where mpirun puts it: it says itself where that is.
# shellcheck disable=SC2016  # The ranks' shells expand it.
first=$(mpirun "${options[@]}" bash -c \
  'if [[ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-}}}" == 0 ]]; then
     hostname; fi')
port=${PORT:-$((20000 + RANDOM % 10000))}

mpirun "${options[@]}" "$(realpath "$0")" --rank "$first:$port" "$@" &
pid=$!
# mpirun passes SIGUSR1 on; on SIGTERM it would leave a second to the ranks.
trap 'kill -USR1 "$pid"' TERM USR1 INT
while true; do
  code=0
  wait "$pid" || code=$?
  kill -0 "$pid" 2>/dev/null || break
done
exit "$code"
