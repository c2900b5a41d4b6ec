"""Every test sees eight simulated devices: code that needs one is wrong."""

import functools
import gc
import os
import pathlib
import random
import signal
import sys
import time

import pytest
from support import compile_cache

# Without .pyc files, every process that a test starts compiles the sources of
# the program again, which takes 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"
flags = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in flags:
  flags += " --xla_force_host_platform_device_count=8"
if "xla_backend_optimization_level" not in flags:
  flags += f" {compile_cache.QUICK_XLA_FLAGS}"
os.environ["XLA_FLAGS"] = flags.strip()
# TensorFlow and absl are chatty at start-up; a failing test should not be.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# A shell's command in the background ignores Ctrl-C, and so would the processes
# that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

compile_cache.enable()


# Unix time from which .ci/run starts no further test.
_UNTIL_SECS = float(os.environ.get("BIGTRAIN_TESTS_UNTIL", "inf"))


def pytest_collection_modifyitems(items):
  """Mixes the files if time is limited: each run leaves out other tests."""
  if _UNTIL_SECS < float("inf"):
    files = sorted({item.path for item in items})
    random.Random(_UNTIL_SECS).shuffle(files)  # The same in all workers.
    items.sort(key=lambda item: files.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
  """Leaves out a test that begins too late; the summary has their number."""
  if time.time() > _UNTIL_SECS:
    pytest.skip("left out for lack of time")


def pytest_collection_finish():
  """Makes garbage collections rarer, and leaves out what is imported by now.

  They took a tenth of the time.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(10_000, 20, 20)


# Linux allows a process 65,530 memory mappings. A compiled program has several,
# and XLA crashes where it gets no more.
_MANY_MAPPINGS = 40_000


def pytest_runtest_teardown(item, nextitem):
  """Drops the compiled programs of past files before there are too many."""
  if nextitem is None or nextitem.path != item.path:
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > _MANY_MAPPINGS:
      import jax

      jax.clear_caches()
      gc.collect()


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory):
  """tiny.config on data that are there; see tests/tiny."""
  import tiny

  folder = tmp_path_factory.mktemp("tiny")
  tiny.write_data(folder)
  return functools.partial(tiny.config, folder)


@pytest.fixture(scope="session")
def old_runs(tmp_path_factory):
  """Folder with checkpoints that T5X and big_vision wrote."""
  from support import old_runs

  folder = tmp_path_factory.mktemp("old")
  old_runs.unpack(folder)
  return folder


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory):
  """A folder shared by all workers of the test session."""
  folder = tmp_path_factory.getbasetemp()
  return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


# Tensorstore keeps the first server of a process, so all tests share one of
# each kind.
@pytest.fixture(scope="session")
def gs_store():
  yield from _store("gs")


@pytest.fixture(scope="session")
def s3_store():
  yield from _store("s3")


def _store(scheme):
  from support import object_stores

  server = object_stores.Server(scheme)
  if server.missing:
    pytest.skip(server.missing)
  server.start()
  # It would name another server.
  os.environ.pop("TENSORSTORE_GCS_HTTP_URL", None)
  os.environ.update(server.env)
  yield server
  server.kill()


@pytest.fixture(scope="session")
def gs_bucket(gs_store):
  """URL of a bucket."""
  return gs_store.root


@pytest.fixture(scope="session")
def s3_bucket(s3_store):
  return s3_store.root


@pytest.fixture(scope="session")
def two_processes(session_folder):
  """two_processes(name): results of a part of a shared job of two processes."""
  from support import two_processes

  return functools.partial(two_processes.part, session_folder / "two")


@pytest.fixture(scope="session")
def picture_run(tmp_path_factory):
  """Folder with train/, val/, and a run of picture_runs in runs/mine."""
  from support import picture_runs

  from bigtrain import main

  folder = tmp_path_factory.mktemp("pictures")
  picture_runs.write_pictures(folder)
  main.train(picture_runs.config(folder), str(folder / "runs" / "mine"))
  return folder


@pytest.fixture
def float64_models(float64, monkeypatch):
  """Lets models have the dtype float64, also where they compute in float32."""
  import jax.numpy as jnp

  from bigtrain.models.layers import options

  monkeypatch.setattr(options, "DTYPES", (*options.DTYPES, "float64"))
  monkeypatch.setattr(jnp, "float32", jnp.float64)


@pytest.fixture
def float64():
  """Computes in float64, so that a result is the same on every processor."""
  import jax

  with jax.enable_x64():
    yield


@pytest.fixture
def traces_cudnn(monkeypatch):
  """Lets cuDNN's attention be traced without a GPU, as for an H100."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  from bigtrain.sharding import absent

  for name in (
    "check_cudnn_version",
    "check_compute_capability",
    "is_cuda_compute_capability_equal",
  ):  # Restored after the test.
    monkeypatch.setattr(cudnn, name, getattr(cudnn, name))
  absent.tell_cudnn(absent.GPUS["h100"].read_text())
