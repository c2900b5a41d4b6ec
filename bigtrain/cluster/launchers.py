"""Detects which launcher started this process, and its place in the job.

`detect` looks for these, in this order: flags or environment variables that the
user has set; Slurm's srun; mpirun of Open MPI or another MPI; one or several
Cloud TPU slices.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping

from bigtrain.cluster import channel
from bigtrain.config.errors import ConfigError

# The same ports as jax's, above those that operating systems assign themselves.
_FIRST_PORT = 61440
_NUM_PORTS = 4096

_VISIBLE_DEVICES = (
  "CUDA_VISIBLE_DEVICES",
  "HIP_VISIBLE_DEVICES",
  "ROCR_VISIBLE_DEVICES",
)

_FLAGS = {
  "JAX_COORDINATOR_ADDRESS": "--coordinator",
  "JAX_NUM_PROCESSES": "--num_processes",
  "JAX_PROCESS_ID": "--process_id",
}
# Variables for the number of ranks, this process's rank, and both on this host.
_OMPI = (
  "OMPI_COMM_WORLD_SIZE",
  "OMPI_COMM_WORLD_RANK",
  "OMPI_COMM_WORLD_LOCAL_SIZE",
  "OMPI_COMM_WORLD_LOCAL_RANK",
)
# MPICH and Intel MPI.
_PMI = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")


@dataclasses.dataclass(frozen=True)
class Place:
  """One process's place in its job."""

  launcher: str  # Source of this information, for the log.
  address: str  # HOST:PORT of process 0.
  count: int  # Number of processes, at least two.
  index: int
  # GPUs of this process, as positions among the visible ones; None for all.
  devices: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class _Ranks:
  """Ranks from the environment that srun and mpirun set for each process."""

  launcher: str
  count: int
  index: int
  local_count: int
  local_index: int


def detect(
  env: Mapping[str, str] = os.environ, timeout_secs: float = 300.0
) -> Place | None:
  """Returns this process's place in a job of several; None if it is alone."""
  ranks = _slurm_ranks(env) or _mpi_ranks(env)
  if any(name in env for name in _FLAGS):
    place = _from_user(env, ranks)
  elif ranks is not None:
    place = _from_ranks(env, ranks)
  else:
    place = _from_tpu_slice(timeout_secs)
  return place if place is not None and place.count > 1 else None


def _from_user(env: Mapping[str, str], ranks: _Ranks | None) -> Place | None:
  """The place, if the user has set at least some of its variables."""
  # Kubernetes numbers the pods of an indexed job.
  defaults = {"JAX_PROCESS_ID": env.get("JOB_COMPLETION_INDEX", "")}
  if ranks is not None:
    defaults["JAX_NUM_PROCESSES"] = str(ranks.count)
    defaults["JAX_PROCESS_ID"] = str(ranks.index)
  values = {name: env.get(name) or defaults.get(name, "") for name in _FLAGS}
  if values["JAX_NUM_PROCESSES"] == "1":
    return None
  address = values["JAX_COORDINATOR_ADDRESS"]
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit():
    raise ConfigError(
      f"JAX_COORDINATOR_ADDRESS={address!r}: expected HOST:PORT of process 0 "
      "(flag --coordinator)."
    )
  for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
    if not values[name].isdigit():
      raise ConfigError(
        f"{name}={values[name]!r}: expected a number, since "
        f"JAX_COORDINATOR_ADDRESS is set (flag {_FLAGS[name]})."
      )
  count = int(values["JAX_NUM_PROCESSES"])
  index = int(values["JAX_PROCESS_ID"])
  if index >= count:
    raise ConfigError(
      f"JAX_PROCESS_ID={index}: must be below JAX_NUM_PROCESSES={count}."
    )
  launcher = ranks.launcher if ranks else "manual"
  return Place(launcher, address, count, index, _devices(env, ranks))


def _slurm_ranks(env: Mapping[str, str]) -> _Ranks | None:
  count = int(env.get("SLURM_STEP_NUM_TASKS", 1))
  if count == 1 or "SLURM_PROCID" not in env:
    return None
  # Number of tasks on each node; "2(x3),1" means 2, 2, 2, 1.
  tasks: list[int] = []
  for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
    number, _, times = part.rstrip(")").partition("(x")
    tasks += [int(number or 1)] * int(times or 1)
  node = int(env.get("SLURM_NODEID", 0))
  return _Ranks(
    launcher="Slurm",
    count=count,
    index=int(env["SLURM_PROCID"]),
    local_count=tasks[node] if node < len(tasks) else 1,
    local_index=int(env.get("SLURM_LOCALID", 0)),
  )


def _mpi_ranks(env: Mapping[str, str]) -> _Ranks | None:
  for launcher, names in (("Open MPI", _OMPI), ("MPI", _PMI)):
    count, index, local_count, local_index = names
    ranks = _Ranks(
      launcher=launcher,
      count=int(env.get(count, 1)),
      index=int(env.get(index, -1)),
      local_count=int(env.get(local_count, 1)),
      local_index=int(env.get(local_index, 0)),
    )
    if ranks.count > 1 and ranks.index >= 0:
      return ranks
  return None


def _from_ranks(env: Mapping[str, str], ranks: _Ranks) -> Place:
  """The place, from the launcher's variables alone."""
  host = ""
  number = (
    0  # Chooses the port, so that two jobs on a host have different ones.
  )
  if ranks.launcher == "Slurm":
    host = first_host(env.get("SLURM_STEP_NODELIST", ""))
    number = int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
  elif env.get("OMPI_MCA_orte_hnp_uri"):
    uri = env["OMPI_MCA_orte_hnp_uri"]
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or tcp6://[fe80::b9b]:43370
    match = re.search(r"tcp://([^,:]+)|tcp6://(\[[^,\]]+)", uri)
    if match:
      host = match[1] or f"{match[2]}]"
    number = int(uri.partition(".")[0]) // _NUM_PORTS
  if not host:
    raise ConfigError(
      f"{ranks.launcher} started {ranks.count} processes without the address "
      "of process 0: use launch/mpi.sh or --coordinator=HOST:PORT."
    )
  port = env.get("JAX_COORDINATOR_PORT") or _FIRST_PORT + number % _NUM_PORTS
  return Place(
    launcher=ranks.launcher,
    address=f"{host}:{port}",
    count=ranks.count,
    index=ranks.index,
    devices=_devices(env, ranks),
  )


def first_host(nodes: str) -> str:
  """The first node of Slurm's list.

  >>> first_host("n[07-12,15]-ib,other")
  'n07-ib'
  """
  first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
  return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _devices(env: Mapping[str, str], ranks: _Ranks | None) -> list[int] | None:
  """This process's share of the host's GPUs."""
  if ranks is None or ranks.local_count == 1 or "JAX_LOCAL_DEVICE_IDS" in env:
    return None  # jax reads JAX_LOCAL_DEVICE_IDS itself.
  visible = [env[name] for name in _VISIBLE_DEVICES if env.get(name)]
  if not visible:
    return [ranks.local_index]
  num_visible = len(visible[0].split(","))
  num_gpus = int(env.get("SLURM_GPUS_ON_NODE") or ranks.local_count)
  if num_visible < max(num_gpus, ranks.local_count):
    return None  # Slurm has already given each process its own.
  share = num_visible // ranks.local_count
  begin = ranks.local_index * share
  return list(range(begin, begin + share))


def _from_tpu_slice(timeout_secs: float) -> Place | None:
  for cluster in channel.tpu_clusters():
    try:
      if not cluster.is_env_present():
        continue
      count = cluster.get_process_count()
      if count == 1:
        return None
      address = cluster.get_coordinator_address(
        timeout_secs=int(timeout_secs),
        override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
      )
      return Place("TPU slice", address, count, cluster.get_process_id())
    except OSError as e:  # No metadata server: a TPU outside Google Cloud.
      logging.warning("%s does not answer: %s", cluster.__name__, e)
  return None
