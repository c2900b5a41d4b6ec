"""What whoever started this process says of the job that it belongs to.

In the order in which they are asked: a person, by flags or in the environment;
Slurm's srun; Open MPI's mpirun; a Cloud TPU slice, or several of them. Nobody
of these means a process alone.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping

from bigtrain.settings import ConfigError

# jax's choice, too: above the ports that systems give away by themselves.
_FIRST_PORT = 61440
_NUM_PORTS = 4096

_VISIBLE = (
  "CUDA_VISIBLE_DEVICES",
  "HIP_VISIBLE_DEVICES",
  "ROCR_VISIBLE_DEVICES",
)


_BY_HAND = {
  "JAX_COORDINATOR_ADDRESS": "--coordinator",
  "JAX_NUM_PROCESSES": "--num_processes",
  "JAX_PROCESS_ID": "--process_id",
}
# Number of ranks, own rank, and both on this host alone.
_MPI = (
  (
    "Open MPI",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
  ),
  # MPICH and Intel MPI.
  ("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)


@dataclasses.dataclass(frozen=True)
class Place:
  """One process's place in its job.

  Attributes:
    launcher: who says so.
    address: HOST:PORT of process 0.
    count: how many processes there are, at least two.
    index: which of them this is.
    devices: numbers of the GPUs that this process shall use, of those that it
      sees; None for all.
  """

  launcher: str
  address: str
  count: int
  index: int
  devices: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class _Ranks:
  """What srun and mpirun tell each of the processes that they start."""

  launcher: str
  count: int
  index: int
  local_count: int
  local_index: int


def find(
  env: Mapping[str, str] = os.environ, timeout_secs: float = 300.0
) -> Place | None:
  """This process's place in a job of several, or None if it is alone.

  Args:
    env: the environment.
    timeout_secs: how long to wait until the name of process 0's host is known,
      where it is being started at the same time.

  Raises:
    ConfigError: what is said is not enough, or makes no sense.
  """
  ranks = _slurm_ranks(env) or _mpi_ranks(env)
  if any(name in env for name in _BY_HAND):
    place = _by_hand(env, ranks)
  elif ranks is not None:
    place = _of_ranks(env, ranks)
  else:
    place = _tpu_slice(timeout_secs)
  return place if place is not None and place.count > 1 else None


def _by_hand(env: Mapping[str, str], ranks: _Ranks | None) -> Place | None:
  """From JAX_COORDINATOR_ADDRESS and its like; a launcher may say the rest."""
  said = {name: env.get(name, "") for name in _BY_HAND}
  launcher = "the environment"
  if ranks is not None:
    launcher = ranks.launcher
    said["JAX_NUM_PROCESSES"] = said["JAX_NUM_PROCESSES"] or str(ranks.count)
    said["JAX_PROCESS_ID"] = said["JAX_PROCESS_ID"] or str(ranks.index)
  # Kubernetes numbers the pods of an indexed job.
  said["JAX_PROCESS_ID"] = said["JAX_PROCESS_ID"] or env.get(
    "JOB_COMPLETION_INDEX", ""
  )
  if said["JAX_NUM_PROCESSES"] == "1":
    return None
  address = said["JAX_COORDINATOR_ADDRESS"]
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit():
    raise ConfigError(
      f"JAX_COORDINATOR_ADDRESS={address!r}: expected HOST:PORT of process 0 "
      "(flag --coordinator)."
    )
  for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
    if not said[name].isdigit():
      raise ConfigError(
        f"{name}={said[name]!r}: expected a number beside "
        f"JAX_COORDINATOR_ADDRESS (flag {_BY_HAND[name]})."
      )
  count, index = int(said["JAX_NUM_PROCESSES"]), int(said["JAX_PROCESS_ID"])
  if not 0 <= index < count:
    raise ConfigError(
      f"JAX_PROCESS_ID={index}: expected a number below JAX_NUM_PROCESSES="
      f"{count}."
    )
  return Place(launcher, address, count, index, _devices(env, ranks))


def _slurm_ranks(env: Mapping[str, str]) -> _Ranks | None:
  count = int(env.get("SLURM_STEP_NUM_TASKS", 1))
  if count == 1 or "SLURM_PROCID" not in env:
    return None
  tasks: list[int] = []  # On each node; 2(x3),1 stands for 2, 2, 2, 1.
  for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
    number, _, times = part.rstrip(")").partition("(x")
    tasks += [int(number or 1)] * int(times or 1)
  node = int(env.get("SLURM_NODEID", 0))
  return _Ranks(
    "Slurm",
    count,
    int(env["SLURM_PROCID"]),
    tasks[node] if node < len(tasks) else 1,
    int(env.get("SLURM_LOCALID", 0)),
  )


def _mpi_ranks(env: Mapping[str, str]) -> _Ranks | None:
  for launcher, size, rank, local_size, local_rank in _MPI:
    if int(env.get(size, 1)) > 1 and rank in env:
      return _Ranks(
        launcher,
        int(env[size]),
        int(env[rank]),
        int(env.get(local_size, 1)),
        int(env.get(local_rank, 0)),
      )
  return None


def _of_ranks(env: Mapping[str, str], ranks: _Ranks) -> Place:
  """Where process 0 is follows from what the launcher says besides."""
  host, number = "", 0
  if ranks.launcher == "Slurm":
    host = first_host(env.get("SLURM_STEP_NODELIST", ""))
    number = int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
  elif uri := env.get("OMPI_MCA_orte_hnp_uri"):
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or tcp6://[fe80::b9b]:43370
    found = re.search(r"tcp://([^,:]+)|tcp6://(\[[^,\]]+)", uri)
    if found:
      host = found[1] or f"{found[2]}]"
    number = int(uri.partition(".")[0]) // _NUM_PORTS
  if not host:
    raise ConfigError(
      f"{ranks.launcher} started {ranks.count} processes and does not say "
      "where process 0 is: start them with launch/mpi.sh, or give "
      "--coordinator=HOST:PORT."
    )
  port = env.get("JAX_COORDINATOR_PORT") or _FIRST_PORT + number % _NUM_PORTS
  return Place(
    ranks.launcher,
    f"{host}:{port}",
    ranks.count,
    ranks.index,
    _devices(env, ranks),
  )


def first_host(nodes: str) -> str:
  """The first of Slurm's list of nodes: "n[07-12,15]-ib,other" -> "n07-ib"."""
  first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
  return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _devices(env: Mapping[str, str], ranks: _Ranks | None) -> list[int] | None:
  """The GPUs of one of several processes on a host: its share of them."""
  if ranks is None or ranks.local_count == 1 or "JAX_LOCAL_DEVICE_IDS" in env:
    return None  # All that it sees, or those that jax reads there.
  visible = next((env[name] for name in _VISIBLE if env.get(name)), "")
  if not visible:
    return [ranks.local_index]
  number = len(visible.split(","))
  everything = int(env.get("SLURM_GPUS_ON_NODE") or ranks.local_count)
  if number < max(everything, ranks.local_count):
    return None  # Slurm has dealt them out already.
  share = number // ranks.local_count
  begin = ranks.local_index * share
  return list(range(begin, begin + share))


def _tpu_slice(timeout_secs: float) -> Place | None:
  """From the environment on GKE, else from the metadata server.

  jax knows where these are found, also for several slices; it has no public
  way to ask it only that.
  """
  from jax._src import clusters

  for cluster in (clusters.GkeTpuCluster, clusters.GceTpuCluster):
    try:
      if not cluster.is_env_present():
        continue
      count = cluster.get_process_count()
      if count == 1:
        return None
      return Place(
        "the TPU slice",
        cluster.get_coordinator_address(
          timeout_secs=int(timeout_secs),
          override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        ),
        count,
        cluster.get_process_id(),
      )
    except OSError as e:  # No metadata server: a TPU that is not Google's.
      logging.warning("%s does not answer: %s", cluster.__name__, e)
  return None
