"""A process's place in its job, from environments that launchers set."""

import dataclasses
import functools
import http.server
import threading

import pytest
from jax._src.clusters import cloud_tpu_cluster

from bigtrain.cluster import launchers
from bigtrain.config.errors import ConfigError

SLURM = {
  "SLURM_JOB_ID": "4100",
  "SLURM_STEP_ID": "1",
  "SLURM_STEP_NODELIST": "gpu[007-009,012],login",
  "SLURM_STEP_NUM_TASKS": "5",
  "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
  "SLURM_NTASKS": "5",
  "SLURM_PROCID": "3",
  "SLURM_NODEID": "3",
  "SLURM_LOCALID": "0",
}
OPEN_MPI = {
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
  "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
BY_USER = {
  "JAX_COORDINATOR_ADDRESS": "first:1234",
  "JAX_NUM_PROCESSES": "4",
  "JAX_PROCESS_ID": "2",
}


def test_no_launcher():
  assert launchers.detect({}) is None
  # The batch script of a Slurm job, and a single pod of an indexed job.
  assert launchers.detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None
  assert launchers.detect({"JOB_COMPLETION_INDEX": "3"}) is None


def test_srun():
  # With one process per node, it uses all of the node's GPUs.
  assert launchers.detect(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == (
    launchers.Place("Slurm", "gpu007:61445", 5, 3, None)
  )
  assert launchers.detect(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
  place = launchers.detect(SLURM | {"JAX_COORDINATOR_PORT": "99"})
  assert place.address == "gpu007:99"


@pytest.mark.parametrize(
  "nodes, first",
  [
    ("a", "a"),
    ("a,b", "a"),
    ("n[1-3]", "n1"),
    ("n[03,7]-ib,m[1-2]", "n03-ib"),
    ("r[1-2]n[08-9],x", "r1n08"),
  ],
)
def test_first_host_of_slurms_list(nodes, first):
  assert launchers.first_host(nodes) == first


@pytest.mark.parametrize(
  "tasks, node, local, more, devices",
  [
    # Each process has its share of the node's GPUs.
    ("4,1", 0, 3, {}, [3]),
    ("2(x3),4", 3, 3, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [3]),
    ("2(x3),4", 1, 1, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [2, 3]),
    # Slurm has given each process its own.
    ("4,1", 0, 3, {"CUDA_VISIBLE_DEVICES": "3"}, None),
    (
      *("2,1", 0, 1),
      {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4"},
      None,
    ),
    # The user has chosen.
    ("4,1", 0, 3, {"JAX_LOCAL_DEVICE_IDS": "1"}, None),
    # The only process of a node.
    ("4,1", 1, 0, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
  ],
)
def test_gpus_of_several_processes_on_a_node(tasks, node, local, more, devices):
  env = SLURM | more | {"SLURM_STEP_TASKS_PER_NODE": tasks}
  env |= {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
  assert launchers.detect(env).devices == devices


def test_mpirun():
  assert launchers.detect(OPEN_MPI) == (
    launchers.Place("Open MPI", "10.96.0.1:62624", 4, 3, [1])
  )
  uri = "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::3000:2]:43370"
  place = launchers.detect(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri})
  assert place.address.startswith("[fe80::b9b:ac5d]:")
  assert launchers.detect(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_ranks_without_the_address_of_process_0():
  for env in (
    {"PMI_SIZE": "2", "PMI_RANK": "1"},
    {k: v for k, v in OPEN_MPI.items() if not k.endswith("uri")},
  ):
    with pytest.raises(ConfigError, match="launch/mpi.sh"):
      launchers.detect(env)
    env["JAX_COORDINATOR_ADDRESS"] = "first:1"
    place = launchers.detect(env)
    assert (place.address, place.count - place.index) == ("first:1", 1)


def test_set_by_the_user():
  place = launchers.Place("manual", "first:1234", 4, 2, None)
  assert launchers.detect(BY_USER) == place
  # The user's values take precedence; the launcher still sets the devices.
  with_slurm = launchers.detect(SLURM | BY_USER)
  assert with_slurm == dataclasses.replace(place, launcher="Slurm")
  assert launchers.detect(OPEN_MPI | BY_USER).devices == [1]
  assert launchers.detect(BY_USER | {"JAX_NUM_PROCESSES": "1"}) is None


def test_index_of_a_pod():
  env = {k: v for k, v in BY_USER.items() if k != "JAX_PROCESS_ID"}
  assert launchers.detect(env | {"JOB_COMPLETION_INDEX": "3"}).index == 3


@pytest.mark.parametrize(
  "change, words",
  [
    ({"JAX_COORDINATOR_ADDRESS": ""}, "--coordinator"),
    ({"JAX_COORDINATOR_ADDRESS": "first"}, "expected HOST:PORT"),
    ({"JAX_NUM_PROCESSES": "four"}, "--num_processes"),
    ({"JAX_PROCESS_ID": ""}, "--process_id"),
    ({"JAX_PROCESS_ID": "4"}, "below JAX_NUM_PROCESSES=4"),
  ],
)
def test_mistakes_of_the_user(change, words):
  with pytest.raises(ConfigError, match=words):
    launchers.detect(BY_USER | change)


# TPUs: jax reads the real environment, and only if it has detected a TPU.


@pytest.fixture
def tpu(monkeypatch):
  """A machine with a TPU; returns a function that sets its environment."""
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  monkeypatch.setattr("time.sleep", lambda secs: None)
  monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)

  def environment(**variables):
    for name, value in variables.items():
      monkeypatch.setenv(name, value)

  return environment


@pytest.fixture
def metadata():
  """A metadata server: its {key: text}, and its address."""
  texts = {}

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      text = texts.get(self.path.rpartition("/")[2])
      self.send_response(200 if text is not None else 404)
      self.end_headers()
      self.wfile.write((text or "").encode())

    def log_message(self, *arguments):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    serve = functools.partial(server.serve_forever, poll_interval=0.01)
    threading.Thread(target=serve, daemon=True).start()
    yield texts, f"127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_slice_on_gke(tpu, metadata):
  texts, address = metadata
  texts["tpu-env"] = ""
  tpu(GCE_METADATA_IP=address)
  tpu(TPU_WORKER_HOSTNAMES="localhost,b,c,d", TPU_WORKER_ID="2")
  assert launchers.detect({}) == (
    launchers.Place("TPU slice", "localhost:8482", 4, 2)
  )
  # Flags take precedence.
  assert launchers.detect(BY_USER).address == "first:1234"


def test_several_slices_on_gke(tpu):
  tpu(
    TPU_WORKER_HOSTNAMES="c,d",
    TPU_WORKER_ID="1",
    MEGASCALE_COORDINATOR_ADDRESS="localhost:8080",
    MEGASCALE_NUM_SLICES="3",
    MEGASCALE_SLICE_ID="2",
  )
  assert launchers.detect({}) == (
    launchers.Place("TPU slice", "localhost:8482", 6, 5)
  )


def test_one_host_on_gke(tpu, metadata):
  texts, address = metadata
  texts["tpu-env"] = ""
  tpu(GCE_METADATA_IP=address)
  tpu(TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
  assert launchers.detect({}) is None


@pytest.mark.parametrize(
  "workers", ["127.0.0.1,10.0.0.3", "a:1:127.0.0.1,b:2:10.0.0.3"]
)
def test_a_tpu_vm_asks_the_metadata_server(tpu, metadata, workers):
  texts, address = metadata
  tpu(GCE_METADATA_IP=address)
  texts["agent-worker-number"] = "1"
  texts["worker-network-endpoints"] = workers
  texts["tpu-env"] = "ACCELERATOR_TYPE: 'v4-16'\n"
  assert launchers.detect({}) == (
    launchers.Place("TPU slice", "127.0.0.1:8482", 2, 1)
  )
  texts["tpu-env"] = (
    "MEGASCALE_COORDINATOR_ADDRESS: '127.0.0.1'\nMEGASCALE_NUM_SLICES: '2'\n"
    "MEGASCALE_SLICE_ID: '1'\n"
  )
  place = launchers.detect({})
  assert (place.count, place.index) == (4, 3)


def test_a_tpu_vm_of_one_host(tpu, metadata):
  texts, address = metadata
  tpu(GCE_METADATA_IP=address)
  texts["agent-worker-number"] = "0"
  texts["worker-network-endpoints"] = "127.0.0.1"
  texts["tpu-env"] = ""
  assert launchers.detect({}) is None


def test_a_tpu_without_a_metadata_server(tpu, caplog):
  tpu(GCE_METADATA_IP="127.0.0.1:1")
  assert launchers.detect({}) is None
  assert "does not answer" in caplog.text
