"""The optimizer's state in host memory: rules, copies and whole runs."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import main, sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import (
  averages,
  checksums,
  device_checksums,
  snapshot,
)
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.runtime import hook_context
from bigtrain.tools.plan import program

HOST = {"opt_memory": "pinned_host"}
# Everything that touches the state, in one run.
RUN = {
  "model.statistics": True,
  "model.dropout": 0.3,
  "ema_decay": 0.5,
  "microbatches": 2,
  "weight_stats": "per_param",
  "ckpt_steps": 2,
  "keep_ckpts": 4,
  "mesh": dict(replica=4, fsdp=2),
  "opt_sharding": "replica",
  "hooks": {
    "replay": dict(type="replay", every_steps=3),
    "replicas": dict(type="replicas", every_steps=2),
    "kinds": dict(type=f"{__name__}.Kinds"),
  },
}


class Kinds:
  """Notes where the arrays of the state are after each step."""

  noted = []

  def __init__(self, *, context: hook_context.Context):
    self._context = context

  def after_step(self, step):
    state = trees.flatten_with_names(self._context.state)
    self.noted.append({n: x.sharding.memory_kind for n, x in state})


@pytest.fixture(scope="module")
def on_device(tiny_config, tmp_path_factory):
  """Workdir of the run without opt_memory."""
  workdir = tmp_path_factory.mktemp("on_device")
  main.train(tiny_config(RUN), str(workdir))
  return workdir


def spec(mesh, opt_memory, **shapes):
  """Specs of optimizer state of these shapes, and of a parameter."""
  shapes = {
    "params": {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
    "opt": {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()},
  }
  pairs = sharding.read_opt_memory(settings.Config({"opt_memory": opt_memory}))
  return sharding.state_spec(shapes, mesh, sharding.Rules(opt_memory=pairs))


def kinds(tree):
  named = trees.flatten_with_names(tree)
  return {
    n.rpartition("/")[2]: x.sharding.memory_kind
    for n, x in named
    if x.sharding.memory_kind != "device"
  }


# The rules.


def test_large_arrays_of_the_optimizer_are_in_host_memory():
  mesh = sharding.make_mesh()
  shapes = dict(mu=(64, 64), nu=(64, 64), count=())
  assert kinds(spec(mesh, "device", **shapes)) == {}
  both = spec(mesh, "pinned_host", **shapes)
  assert kinds(both) == {"mu": "pinned_host", "nu": "pinned_host"}
  assert both["opt"]["mu"].sharding.spec == PartitionSpec(None, "fsdp")
  rules = [("opt/nu", "pinned_host"), ("opt/mu", "device")]
  assert kinds(spec(mesh, rules, **shapes)) == {"nu": "pinned_host"}
  layout = jax.tree.map(lambda x: x.sharding, both)
  count = functools.partial(sharding.bytes_per_device, both, layout)
  assert (count(), count(in_host=True)) == (64 * 64 // 2 + 4, 64 * 64)


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ("pinned", "unknown 'pinned'. Did you mean 'pinned_host'"),
    ([("opt/mu", 3)], "unknown 3"),
    (["opt/mu"], "expected (regex, kind), got 'opt/mu'"),
    ([("opt/(mu", "device")], "bad regex 'opt/(mu'"),
    ([("params/x", "pinned_host")], "'params/x' decides nothing; expected"),
  ],
)
def test_mistakes_in_the_config(value, message):
  with pytest.raises(ConfigError) as error:
    spec(sharding.make_mesh(), value, mu=(64, 64))
  assert message in str(error.value)


def test_devices_without_such_memory():
  class Device:
    device_kind = "Toaster"

    def addressable_memories(self):
      return [types.SimpleNamespace(kind="device")]

  mesh = types.SimpleNamespace(
    local_devices=[Device()], devices=np.array([Device()])
  )
  mesh.shape = dict(replica=1, fsdp=1)
  with pytest.raises(ConfigError, match="Toaster has no memory 'pinned_host'"):
    sharding.memory.placed({}, {}, mesh, [(".*", "pinned_host")])


# Copies.


def pinned(values, *spec):
  place = NamedSharding(sharding.make_mesh(2, 4), PartitionSpec(*spec))
  return jax.device_put(values, place.with_memory_kind("pinned_host"))


def test_a_snapshot_outlives_the_array_in_host_memory(monkeypatch):
  compiled = functools.partial(device_checksums.start, compiled=True)
  monkeypatch.setattr(device_checksums, "start", compiled)
  values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
  x = pinned(values, "fsdp")
  buffers = {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
  snapshots = snapshot.Snapshots()
  pieces, _, sums = snapshots.take([("opt/x", x)])
  assert not buffers & {p.data.unsafe_buffer_pointer() for p in pieces}
  x.delete()
  whole = checksums.of_part(values, (slice(0, 8),) * 2, (8, 8))
  assert checksums.add(sums()) == whole
  for piece in pieces:
    np.testing.assert_array_equal(piece.data, values[piece.place])


def test_devices_sum_what_is_in_host_memory():
  values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
  named = [("x", pinned(values, "fsdp", "replica"))]
  sums = device_checksums.start(named)()
  assert sums == device_checksums.start(named, compiled=True)()
  assert len(sums["x"]) == 8


def test_averages_of_schedule_free_optimizers():
  z = pinned(np.ones((8, 8), np.float32), "fsdp")
  place = z.sharding.with_memory_kind("device")
  y = jax.device_put(3 * np.ones((8, 8), np.float32), place)
  opt = {"b1": 0.5, "weight_sum": 0.0, "max_lr": 0.0, "z": {"x": z}}
  average = averages.evaluation_form({"x": y}, opt)["x"]
  assert average.sharding == y.sharding
  np.testing.assert_array_equal(average, np.full((8, 8), 5.0))


# Runs.


def test_a_run_has_the_same_bits(tiny_config, tmp_path, on_device):
  Kinds.noted.clear()
  main.train(tiny_config(RUN | HOST), str(tmp_path))
  in_host = {n for n, kind in Kinds.noted[-1].items() if kind == "pinned_host"}
  assert len(Kinds.noted) == 6
  assert in_host == {"opt/0/mu/first/kernel", "opt/0/nu/first/kernel"}
  assert tiny.rows(tmp_path) == tiny.rows(on_device)
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(on_device))


@pytest.mark.slow
def test_one_device(tiny_config, tmp_path, monkeypatch):
  one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
  monkeypatch.setattr(sharding, "from_config", lambda config: one())
  config = tiny_config({"weight_stats": "global"})
  for name, changes in (("device", {}), ("host", HOST)):
    main.train({**config, **changes}, str(tmp_path / name))
  assert tiny.rows(tmp_path / "host") == tiny.rows(tmp_path / "device")
  tiny.assert_same(*(tiny.arrays(tmp_path / n) for n in ("device", "host")))


@pytest.mark.parametrize(
  "first", [HOST, pytest.param({}, marks=pytest.mark.slow)]
)
def test_resumed_with_another_memory(tiny_config, tmp_path, on_device, first):
  second = {} if first else HOST
  changes = {**RUN, "mesh": dict(replica=4, fsdp=2)}
  main.train(tiny_config(changes | first | {"stop_at_steps": 2}), str(tmp_path))
  assert tiny.checkpoint_steps(tmp_path) == [2]
  main.train(tiny_config(changes | second), str(tmp_path))
  assert tiny.rows(tmp_path) == tiny.rows(on_device)
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(on_device))


def test_the_footprint_counts_host_memory_apart(tiny_config, tmp_path):
  footprints = []
  for name, changes in (("device", {}), ("host", HOST)):
    workdir = tmp_path / name
    on_update = lambda run, fn, specs, _: program.measure(run, fn, specs)
    config = tiny_config(changes)
    footprints.append(main.train(config, str(workdir), on_update=on_update))
  device, host = footprints
  moments = 2 * 64 * 32 * 4 // 8  # Of the only large parameter, by device.
  assert device["host_state_bytes"] == 0
  assert host["host_state_bytes"] == moments
  smaller = device["state_bytes"]["opt"] - host["state_bytes"]["opt"]
  assert smaller == moments
