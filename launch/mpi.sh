#!/usr/bin/env bash
# Starts a job with mpirun (Open MPI, MPICH, Intel MPI), one process per rank:
#
#   launch/mpi.sh -np 4 --hostfile hosts -- --config=configs/x.py --workdir=DIR
#
# The words before -- go to mpirun. DIR must be on storage that all hosts share.
# On SIGTERM or SIGUSR1 to this script the job saves and exits with code 75.
set -euo pipefail

# mpirun starts this file for each rank, with the address of rank 0.
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

# A rank has many threads, so it must not be bound to one core, the default of
# Open MPI 4 and 5 for two ranks. (--bind-to in the options takes precedence.)
export OMPI_MCA_hwloc_base_binding_policy=none
export PRTE_MCA_hwloc_default_binding_policy=none

# mpirun decides where rank 0 runs, so ask rank 0 for its host.
# shellcheck disable=SC2016  # The ranks' shells expand it.
first=$(mpirun "${options[@]}" bash -c \
  'if [[ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-}}}" == 0 ]]; then
     hostname; fi')
port=${PORT:-$((20000 + RANDOM % 10000))}

mpirun "${options[@]}" "$(realpath "$0")" --rank "$first:$port" "$@" &
pid=$!
# mpirun forwards SIGUSR1; after SIGTERM it would kill the ranks in a second.
trap 'kill -USR1 "$pid"' TERM USR1 INT
while true; do
  code=0
  wait "$pid" || code=$?
  kill -0 "$pid" 2>/dev/null || break
done
exit "$code"
