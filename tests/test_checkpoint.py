import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import save_and_die
from hypothesis import given, settings, strategies
from jax.experimental.array_serialization import serialization
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import (
  checkpoint,
  manifest,
  sharding,
  snapshot,
  storage,
  trees,
)
from bigtrain.manifest import CheckpointError, DamagedError
from bigtrain.settings import ConfigError

MESHES = ((8, 1), (2, 4), (1, 8))
ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def like(replica=2, fsdp=4):
  return save_and_die.spec(sharding.make_mesh(replica, fsdp))


def save(workdir, *steps, spec=None, **kwargs):
  spec = spec or like()
  saver = checkpoint.Checkpointer(workdir, **kwargs)
  for step in steps:
    saver.save(step, save_and_die.state(spec, step), {"at": step})
  saver.close()
  return saver


def same(found, step):
  """Asserts bit-equality with the state of a step."""
  for (name, x), y in zip(
    trees.flatten_with_names(found),
    jax.tree.leaves(save_and_die.values(found, step)),
  ):
    assert x.dtype == y.dtype and x.shape == y.shape, name
    for shard in x.addressable_shards:
      mine = np.asarray(shard.data)
      assert mine.tobytes() == y[shard.index].tobytes(), name


def path_of(workdir, step, *parts):
  return os.path.join(workdir, "checkpoints", f"{step:08d}", *parts)


def one_device():
  device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like()
  )


# Saving and restoring.


@pytest.mark.parametrize("saved", MESHES)
def test_restores_bit_equal_under_any_mesh(workdir, saved):
  save(workdir, 7, spec=like(*saved), config_digest="abc")
  for mesh in MESHES:
    found, told = checkpoint.restore(workdir, like(*mesh))
    same(found, 7)
    jax.tree.map(
      lambda x, s: x.sharding == s.sharding or 1 / 0, found, like(*mesh)
    )
  same(checkpoint.restore(path_of(workdir, 7), one_device())[0], 7)
  assert (told.step, told.host_state) == (7, {"at": 7})
  assert told.config_digest == "abc"
  assert checkpoint.verify(path_of(workdir, 7)) == []


def test_jax_array_serialization_reads_the_files(workdir):
  save(workdir, 7)
  names, wanted = zip(*trees.flatten_with_names(like(1, 8)))
  specs = []
  for name in names:
    spec = serialization.get_tensorstore_spec(path_of(workdir, 7, name))
    specs.append({**spec, "driver": "zarr3", "fill_missing_data_reads": False})
  found = serialization.run_deserialization([x.sharding for x in wanted], specs)
  same(trees.from_flat(dict(zip(names, found))), 7)


def test_the_step_may_overwrite_the_state_while_it_is_written(
  workdir, monkeypatch
):
  stepped = threading.Event()
  monkeypatch.setattr(
    checkpoint,
    "_point",
    lambda name: (name == "begin" and stepped.wait(30)) or None,
  )
  train = jax.jit(
    lambda s: jax.tree.map(lambda x: x + x.dtype.type(1), s), donate_argnums=0
  )
  spec = {"params": like()["params"], "step": like()["step"]}
  # Copied, as jax cannot overwrite what it borrowed from numpy.
  state = jax.tree.map(jnp.copy, save_and_die.state(spec, 5))
  saver = checkpoint.Checkpointer(workdir)
  saver.save(5, state)
  assert saver.in_flight and checkpoint.newest(workdir) is None
  pointers = [s.data.unsafe_buffer_pointer() for s in _shards(state)]
  state = jax.block_until_ready(train(state))
  assert pointers == [s.data.unsafe_buffer_pointer() for s in _shards(state)]
  stepped.set()
  saver.close()
  assert checkpoint.newest(workdir) == 5
  same(checkpoint.restore(workdir, spec)[0], 5)


def _shards(state):
  return state["params"]["wide"].addressable_shards


def test_one_save_in_flight_and_the_wait_is_in_the_stall(workdir, monkeypatch):
  release = threading.Event()
  monkeypatch.setattr(
    checkpoint,
    "_point",
    lambda name: (name == "data written" and release.wait(30)) or None,
  )
  saver = checkpoint.Checkpointer(workdir)
  state = save_and_die.state(like(), 1)
  saver.save(1, state)
  threading.Timer(0.5, release.set).start()
  saver.save(2, state)  # Waits for the first.
  assert saver.last_saved_step == 1
  assert saver.last_stall_secs > 0.4
  assert saver.last_write_secs > 0.4
  saver.wait()
  assert saver.last_saved_step == 2 and not saver.in_flight
  saver.close()


def test_keeps_the_newest_and_every_so_many_for_good(workdir):
  save(workdir, *range(10, 90, 10), keep=2, keep_every_steps=30)
  assert checkpoint.steps(workdir) == [30, 60, 70, 80]
  # A run that was rolled back leaves what is ahead of it alone.
  save(workdir, 50, 55, keep=1)
  assert checkpoint.steps(workdir) == [55, 60, 70, 80]
  assert checkpoint.newest(workdir) == 80
  for keep in (0, -1, 1.5, None):
    with pytest.raises(ConfigError, match=r"config\.keep_ckpts"):
      checkpoint.Checkpointer(workdir, keep=keep)


def test_a_step_saved_again_replaces_the_older(workdir):
  save(workdir, 10)
  shutil.rmtree(path_of(workdir, 10, "params"))
  save(workdir, 10, spec=like(1, 8))
  same(checkpoint.restore(workdir, like())[0], 10)
  assert os.listdir(storage.folder(workdir)) == ["00000010"]
  # Killed between the two renames: the old one gets its name back.
  os.rename(path_of(workdir, 10), path_of(workdir, 10) + ".old-ab12-0")
  found, _ = checkpoint.resume(workdir, like())
  same(found, 10)


def test_host_state_is_taken_at_the_call_and_must_be_json(workdir):
  saver = checkpoint.Checkpointer(workdir)
  state = save_and_die.state(like(), 1)
  host = {"loss": 0.1 + 0.2, "nan": float("inf"), "hooks": {"best": [1, None]}}
  saver.save(1, state, host)
  host["hooks"]["best"].append(2)
  saver.wait()
  read = storage.read_manifest(path_of(workdir, 1)).host_state
  assert read == {**host, "hooks": {"best": [1, None]}}
  with pytest.raises(TypeError):
    saver.save(2, state, {"loss": np.float32(1)})
  saver.close()


@pytest.mark.parametrize(
  "name, ok",
  [
    ("params/layer 0/kernel:0", True),
    ("../x", False),
    ("a/../../x", False),
    ("/etc/x", False),
    ("a//b", False),
    ("", False),
    ("a/.", False),
    ("a\\b", False),
    ("a\0b", False),
    ("manifest.json", False),
    ("a/zarr.json", False),
  ],
)
def test_names_that_lead_elsewhere_are_refused(workdir, name, ok):
  saver = checkpoint.Checkpointer(workdir)
  state = {name: jnp.zeros(2)}
  if ok:
    saver.save(1, state, block=True)
    assert checkpoint.newest(workdir) == 1
  else:
    with pytest.raises(CheckpointError, match="array name"):
      saver.save(1, state)
    assert not os.path.exists(workdir)
  saver.close()


def test_arrays_that_cannot_be_saved_are_refused(workdir):
  saver = checkpoint.Checkpointer(workdir)
  for bad in (jax.random.key(0), 3, jnp.zeros(2, jnp.int4)):
    with pytest.raises(CheckpointError, match=r"rng|int4"):
      saver.save(1, {"rng": bad})
  with pytest.raises(CheckpointError, match="'a' is an array already"):
    saver.save(1, {"a": jnp.zeros(1), "a/b": jnp.zeros(1)})
  with pytest.raises(CheckpointError, match="two arrays"):
    saver.save(1, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)})
  saver.close()


# How arrays lie in files.


@settings(max_examples=200, deadline=None)
@given(
  strategies.lists(
    strategies.tuples(
      strategies.integers(1, 4), strategies.sampled_from([0, 1, 3, 8, 50257])
    ),
    max_size=3,
  ),
  strategies.sampled_from([jnp.float32, jnp.bfloat16, jnp.bool_]),
)
def test_chunks_tile_the_shards(dims, dtype):
  shape = [split * size for split, size in dims]
  shard = [size for _, size in dims]
  array = manifest.describe(shape, dtype, shard)
  itemsize = jnp.dtype(dtype).itemsize
  for (split, size), chunk in zip(dims, array.chunk_shape):
    assert chunk >= 1
    # No chunk has parts of two shards.
    assert split == 1 or size == 0 or size % chunk == 0
  num_bytes = np.prod(array.chunk_shape, dtype=float) * itemsize
  assert array.chunk_bytes == num_bytes + 4
  assert num_bytes <= 8 * manifest.CHUNK_BYTES or 0 in shape
  if np.prod(shard, dtype=float) * itemsize <= manifest.CHUNK_BYTES:
    # Nothing is cut that need not be.
    assert array.chunk_shape == tuple(max(1, n) for n in shard)
  if 0 in shape:
    assert list(array.chunks()) == []
  elif np.prod(array.grid) < 1000:
    covered = sum(
      int(np.prod([s.stop - s.start for s in index]))
      for _, index in array.chunks()
    )
    assert covered == np.prod(shape)


def test_small_shards_share_a_file_and_large_ones_are_cut(workdir, monkeypatch):
  monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)
  monkeypatch.setattr(snapshot, "_SMALL_SHARD_BYTES", 1024)
  monkeypatch.setattr(snapshot, "_SHARED_FILE_BYTES", 2048)
  mesh = sharding.make_mesh(2, 4)

  def put(shape, *spec):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  state = {
    "rows": put((16, 8), "fsdp"),  # 512 bytes in all.
    "columns": put((4, 64), None, "fsdp"),  # 1 kB.
    "pairs": put((8, 112), ("replica", "fsdp")),  # 448 bytes a shard.
    "both": put((4, 8), "replica", "fsdp"),
    "large": put((64, 128), "fsdp"),  # 8 kB a shard.
    "uneven": put((7, 500)),  # 14 kB, not split.
  }
  saver = checkpoint.Checkpointer(workdir)
  saver.save(1, state)
  saver.close()
  arrays = storage.read_manifest(path_of(workdir, 1)).arrays
  chunks = {name: arrays[name].grid for name in arrays}
  assert chunks == {
    "rows": (1, 1),
    "columns": (1, 1),
    "pairs": (2, 1),
    "both": (2, 4),
    "large": (8, 1),
    "uneven": (4, 1),
  }
  for other in MESHES:
    mesh = sharding.make_mesh(*other)
    spec = {}
    for name, x in state.items():
      axes = PartitionSpec("fsdp" if x.shape[0] % 8 == 0 else None)
      place = NamedSharding(mesh, axes)
      spec[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    found, _ = checkpoint.restore(workdir, spec)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_the_copy_is_spread_over_the_devices_that_hold_the_state():
  mesh = sharding.make_mesh(8, 1)
  everywhere = NamedSharding(mesh, PartitionSpec())
  state = [(f"{i}", jax.device_put(np.ones(64), everywhere)) for i in range(16)]
  taken = snapshot.Snapshots()
  pieces, _ = taken.take(state)
  assert len(pieces) == 16  # Each array once.
  loads = [0] * 8
  for replica in taken._plan.replicas.values():
    loads[replica] += 1
  assert loads == [2] * 8
  taken.close()


# Faults 13 to 17: damage.


def damage_deleted(path):
  os.remove(path)


def damage_cut(path):
  with open(path, "r+b") as file:
    file.truncate(os.path.getsize(path) // 2)


def damage_grown(path):
  with open(path, "ab") as file:
    file.write(b"x")


def damage_flipped(path):
  with open(path, "r+b") as file:
    content = bytearray(file.read())
    content[len(content) // 3] ^= 16
    file.seek(0)
    file.write(content)


@pytest.mark.parametrize(
  "damage", [damage_deleted, damage_cut, damage_grown, damage_flipped]
)
@pytest.mark.parametrize(
  "array, file", [("params/dense/kernel", "c/0/0"), ("opt/seen", "zarr.json")]
)
def test_damage_is_refused_naming_array_and_file(workdir, damage, array, file):
  save(workdir, 1)
  path = path_of(workdir, 1, array, file)
  damage(path)
  (problem,) = checkpoint.verify(path_of(workdir, 1))
  assert problem.array == array and problem.path == path
  with pytest.raises(DamagedError) as e:
    checkpoint.restore(workdir, like())
  assert repr(array) in str(e.value) and path in str(e.value)


def test_a_missing_array_is_named(workdir):
  save(workdir, 1)
  shutil.rmtree(path_of(workdir, 1, "opt/mu"))
  (problem,) = checkpoint.verify(path_of(workdir, 1))
  assert problem.array == "opt/mu/dense" and problem.what == "missing"
  with pytest.raises(DamagedError, match=r"array 'opt/mu/dense': .* missing"):
    checkpoint.restore(workdir, like())


def test_a_flipped_bit_anywhere_is_found(workdir):
  save(workdir, 1, spec=like(1, 8))
  rng = np.random.default_rng(0)
  files = [
    p for p in pathlib.Path(path_of(workdir, 1)).rglob("*") if p.is_file()
  ]
  assert len(files) > 15
  for path in files:
    content = path.read_bytes()
    for bit in rng.integers(0, 8 * len(content), 3):
      flipped = bytearray(content)
      flipped[bit // 8] ^= 1 << (bit % 8)
      path.write_bytes(flipped)
      assert checkpoint.verify(path_of(workdir, 1)), (path, bit)
      with pytest.raises(CheckpointError):
        checkpoint.restore(workdir, like())
    path.write_bytes(content)
  assert checkpoint.verify(path_of(workdir, 1)) == []


def test_a_damaged_newest_is_loud_and_never_a_fresh_start(workdir, caplog):
  save(workdir, 1, 2)
  damage_flipped(path_of(workdir, 2, "params/dense/bias/c/0"))
  with pytest.raises(DamagedError) as e:
    checkpoint.resume(workdir, like())
  assert "params/dense/bias" in str(e.value)
  assert "config.ckpt_fallback=True" in str(e.value)
  with caplog.at_level(logging.ERROR):
    found, told = checkpoint.resume(workdir, like(), fallback=True)
  assert told.step == 1 and "params/dense/bias" in caplog.text
  same(found, 1)
  os.remove(path_of(workdir, 1, "manifest.json"))
  for fallback in (True, False):
    with pytest.raises(DamagedError):
      checkpoint.resume(workdir, like(), fallback=fallback)
  shutil.rmtree(path_of(workdir, 2))
  with pytest.raises(DamagedError, match="no checkpoint: it has no manifest"):
    checkpoint.resume(workdir, like(), fallback=True)


def test_a_manifest_of_another_step_or_version_is_refused(workdir):
  save(workdir, 1)
  os.rename(path_of(workdir, 1), path_of(workdir, 3))
  with pytest.raises(DamagedError, match="of step 1, in the directory of"):
    checkpoint.restore(workdir, like())
  path = path_of(workdir, 3, "manifest.json")
  content = json.loads(pathlib.Path(path).read_text())
  del content["sha256"]
  content["version"] = 2
  content["sha256"] = manifest._digest(content)
  pathlib.Path(path).write_text(json.dumps(content))
  with pytest.raises(CheckpointError, match="format version 2"):
    checkpoint.restore(workdir, like())


# Faults 18 to 20: what is there besides, or cannot be read, or does not fit.


def test_only_proven_absence_is_a_fresh_start(workdir):
  assert checkpoint.resume(workdir, like()) is None
  os.makedirs(storage.folder(workdir))
  assert checkpoint.resume(workdir, like()) is None
  os.rmdir(storage.folder(workdir))
  pathlib.Path(storage.folder(workdir)).write_text("")
  with pytest.raises(CheckpointError, match="Not a directory"):
    checkpoint.resume(workdir, like())


def test_strays_are_ignored_with_a_warning(workdir, caplog):
  save(workdir, 5)
  folder = pathlib.Path(storage.folder(workdir))
  (folder / "00000099").mkdir()
  (folder / "00000098").mkdir()
  (folder / "00000098" / "notes.txt").write_text("mine")
  (folder / "100").mkdir()
  (folder / "00000097").write_text("a file")
  (folder / ".nfs000").write_text("")
  (folder / "backup").symlink_to("/")
  with caplog.at_level(logging.WARNING):
    _, told = checkpoint.resume(workdir, like())
  assert told.step == 5 and checkpoint.steps(workdir) == [5]
  for name in ("00000099", "00000098", "100", "00000097", ".nfs000", "backup"):
    assert f"{folder / name}: ignored" in caplog.text
    assert os.path.lexists(folder / name)
  shutil.rmtree(folder / "00000005")
  assert checkpoint.resume(workdir, like()) is None


_AS_NOBODY = """
import os, sys
from bigtrain import checkpoint, storage
from bigtrain.manifest import CheckpointError
from bigtrain.settings import ConfigError
if not os.getuid():
  os.setuid(65534)
try:
  print(eval(sys.argv[1], {"w": sys.argv[2], **globals()}))
except (CheckpointError, ConfigError) as e:
  print(f"{type(e).__name__}: {e}")
"""


@pytest.fixture
def open_workdir():
  """A workdir that another user can reach."""
  path = tempfile.mkdtemp()
  os.chmod(path, 0o755)
  yield path
  shutil.rmtree(path)


def as_nobody(expression, workdir):
  done = subprocess.run(
    [sys.executable, "-c", _AS_NOBODY, expression, workdir],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.parametrize("part", ["checkpoints", "00000003", "manifest.json"])
def test_what_may_not_be_read_is_no_fresh_start(open_workdir, part):
  save(open_workdir, 3)
  path = {
    "checkpoints": storage.folder(open_workdir),
    "00000003": path_of(open_workdir, 3),
    "manifest.json": path_of(open_workdir, 3, "manifest.json"),
  }[part]
  assert as_nobody("checkpoint.newest(w)", open_workdir) == "3\n"
  os.chmod(path, 0)
  said = as_nobody(
    "storage.read_manifest(storage.find(w))"
    if part == "manifest.json"
    else "checkpoint.newest(w)",
    open_workdir,
  )
  os.chmod(path, 0o755)
  assert said.startswith("CheckpointError"), said
  assert "Permission denied" in said and path in said


def test_a_read_only_workdir_is_refused(open_workdir):
  if not os.getuid():
    said = as_nobody("checkpoint.check_writable(w)", open_workdir)
  else:
    os.chmod(open_workdir, 0o555)
    said = as_nobody("checkpoint.check_writable(w)", open_workdir)
    os.chmod(open_workdir, 0o755)
  assert said.startswith(f"ConfigError: --workdir={open_workdir}: cannot write")
  checkpoint.check_writable(open_workdir)
  assert os.listdir(storage.folder(open_workdir)) == []
  with pytest.raises(ConfigError, match="mount the bucket"):
    checkpoint.check_writable("gs://bucket/run")


def test_every_difference_to_the_model_is_listed(workdir):
  save(workdir, 1)
  other = dict(trees.flatten_with_names(like()))
  new = other.pop("opt/seen")
  other["opt/new"] = new
  other["params/wide"] = other["opt/mu/dense"]
  other["step"] = jax.ShapeDtypeStruct((), jnp.uint32, sharding=new.sharding)
  with pytest.raises(checkpoint.MismatchError) as e:
    checkpoint.resume(workdir, trees.from_flat(other), fallback=True)
  text = str(e.value)
  for line in (
    "missing: opt/new: expected uint32[], found nothing",
    "extra: opt/seen: expected nothing, found uint32[]",
    "shape: params/wide: expected float16[3,32], found float32[8,40]",
    "dtype: step: expected uint32[], found int32[]",
  ):
    assert line in text
  last = text.splitlines()[-1]
  assert path_of(workdir, 1) in last and "1 missing, 1 shape" in last


# Fault 48: nothing outside of the workdir.


def test_links_are_not_followed(workdir, tmp_path):
  save(workdir, 1)
  outside = tmp_path / "outside"
  outside.mkdir()
  (outside / "precious").write_text("x")
  folder = storage.folder(workdir)
  link = os.path.join(folder, "00000001.tmp-ab12-0")
  os.symlink(outside, link)
  with pytest.raises(CheckpointError, match="symbolic link"):
    checkpoint.clean(workdir)
  os.remove(link)
  # A link inside of what is removed is removed, and not what it points to.
  os.mkdir(link)
  os.symlink(outside, os.path.join(link, "params"))
  checkpoint.clean(workdir)
  assert os.listdir(folder) == ["00000001"]

  for inside in ("params/dense", "params/dense/kernel", "opt/seen/c"):
    path = path_of(workdir, 1, inside)
    os.rename(path, outside / "moved")
    os.symlink(outside / "moved", path)
    with pytest.raises(DamagedError, match="symbolic link"):
      checkpoint.restore(workdir, like())
    assert "symbolic link" in str(checkpoint.verify(path_of(workdir, 1))[0])
    os.remove(path)
    os.rename(outside / "moved", path)
  assert checkpoint.verify(path_of(workdir, 1)) == []

  os.rename(path_of(workdir, 1), outside / "moved")
  os.symlink(outside / "moved", path_of(workdir, 1))
  with pytest.raises(CheckpointError, match="symbolic link"):
    checkpoint.newest(workdir)
  os.remove(path_of(workdir, 1))
  os.rename(folder, outside / "checkpoints")
  os.symlink(outside / "checkpoints", folder)
  with pytest.raises(CheckpointError, match="symbolic link"):
    checkpoint.newest(workdir)
  assert (outside / "precious").read_text() == "x"


def test_names_in_a_manifest_are_checked_too(workdir):
  save(workdir, 1)
  path = pathlib.Path(path_of(workdir, 1, "manifest.json"))
  content = json.loads(path.read_text())
  del content["sha256"]
  content["arrays"]["../../x"] = content["arrays"].pop("step")
  content["sha256"] = manifest._digest(content)
  path.write_text(json.dumps(content))
  with pytest.raises(DamagedError, match=r"array name '\.\./\.\./x'"):
    checkpoint.restore(workdir, like())


# Faults 1 to 9: a save that is killed or fails.


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """Workdirs of runs that were killed, by moment."""
  root = tmp_path_factory.mktemp("killed")
  moments = [
    *save_and_die.POINTS,
    save_and_die.IN_A_CHUNK,
    save_and_die.IN_REMOVAL,
  ]
  done = subprocess.run(
    [sys.executable, str(ROOT / "tests/save_and_die.py"), str(root), *moments],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split("\n")[:-1] == [f"{m} 9" for m in moments]
  return root


@pytest.mark.parametrize("moment", save_and_die.POINTS)
def test_killed_at(killed, moment):
  workdir = str(killed / moment)
  after = moment in ("committed", "renamed for removal")
  _check_killed(workdir, expected=30 if after else 20)


def test_killed_in_a_chunk(killed):
  workdir = str(killed / save_and_die.IN_A_CHUNK)
  (left,) = storage.listing(workdir).leftovers
  assert any("__lock" in name for name, _ in storage.files_below(left))
  _check_killed(workdir, expected=20)


def test_killed_in_removal(killed):
  _check_killed(str(killed / save_and_die.IN_REMOVAL), expected=30)


def _check_killed(workdir, expected):
  assert checkpoint.newest(workdir) == expected
  for left in storage.listing(workdir).leftovers:
    with pytest.raises(CheckpointError, match=r"unfinished|no checkpoint"):
      checkpoint.restore(left, like())
  found, told = checkpoint.resume(workdir, like(1, 8))
  assert told.step == expected and told.host_state == {"at": expected}
  same(found, expected)
  assert storage.listing(workdir).leftovers == []
  # Fault 7: another number of devices reaches the same step.
  save(workdir, 30, spec=one_device())
  same(checkpoint.restore(workdir, like(8, 1), step=30)[0], 30)
  for step in checkpoint.steps(workdir):
    assert checkpoint.verify(path_of(workdir, step)) == []
  save(workdir, 40)
  assert checkpoint.steps(workdir) == [30, 40]


@pytest.mark.parametrize("point", ["begin", "data written", "manifest written"])
def test_a_failed_save_is_raised_and_harms_nothing(workdir, monkeypatch, point):
  save(workdir, 1)

  def fail(name):
    if name == point:
      raise OSError(5, "Input/output error", "/dev/x")

  monkeypatch.setattr(checkpoint, "_point", fail)
  state = save_and_die.state(like(), 2)
  saver = checkpoint.Checkpointer(workdir)
  saver.save(2, state)
  with pytest.raises(CheckpointError, match="step 2 was not saved: /dev/x"):
    saver.wait()
  for again in (saver.check, saver.wait, lambda: saver.save(3, state)):
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
      again()
  with pytest.raises(CheckpointError, match="Input/output error"):
    saver.close()
  assert os.listdir(storage.folder(workdir)) == ["00000001"]
  same(checkpoint.restore(workdir, like())[0], 1)


def test_the_guard_has_the_last_word(workdir):
  def lost():
    raise RuntimeError("the lease is lost")

  saver = checkpoint.Checkpointer(workdir, guard=lost)
  saver.save(1, save_and_die.state(like(), 1))
  with pytest.raises(CheckpointError, match="the lease is lost"):
    saver.close()
  assert checkpoint.newest(workdir) is None


_FILL_THE_DISK = """
import sys, time
import jax.numpy as jnp
from bigtrain import checkpoint
saver = checkpoint.Checkpointer(sys.argv[1])
saver.save(1, {"x": jnp.ones((2**10, 2**8))}, block=True)
print("saved", flush=True)
if sys.argv[2] == "limit":
  import resource
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
saver.save(2, {"x": jnp.ones((2**10, 2**12))})
try:
  while True:
    saver.check()
    time.sleep(0.01)
finally:
  print("noticed", flush=True)
"""


def test_a_full_disk(tmp_path):
  # Root mounts a small disk; others limit the size of a file.
  workdir = tmp_path / "disk"
  workdir.mkdir()
  mounted = not subprocess.call(
    ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(workdir)],
    stderr=subprocess.DEVNULL,
  )
  try:
    done = subprocess.run(
      [
        sys.executable,
        "-c",
        _FILL_THE_DISK,
        str(workdir),
        "mounted" if mounted else "limit",
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.split() == ["saved", "noticed"]
    last = done.stderr.strip().splitlines()[-1]
    assert "the checkpoint of step 2 was not saved" in last
    assert ("No space left" if mounted else "File too large") in last
    assert os.listdir(storage.folder(workdir)) == ["00000001"]
    assert checkpoint.verify(path_of(str(workdir), 1)) == []
  finally:
    if mounted:
      subprocess.check_call(["umount", str(workdir)])


# Several processes.


_TOGETHER = """
import os, sys
import jax
from bigtrain import checkpoint, manifest, restore, sharding
workdir, index, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, 2, index)
import save_and_die


def report(what):
  print(what, flush=True)


like = save_and_die.spec(sharding.make_mesh(2, 4))
state = jax.tree.map(
  lambda x, v: jax.make_array_from_callback(v.shape, x.sharding, lambda i: v[i]),
  like, save_and_die.values(like, 1),
)
saver = checkpoint.Checkpointer(workdir)
saver.save(1, state, {"at": 1})
saver.wait()
assert checkpoint.newest(workdir) == 1
report("saved")

# Another layout, in which each process reads other parts.
other = save_and_die.spec(sharding.make_mesh(1, 8))
found, told = checkpoint.resume(workdir, other)
for x, v in zip(jax.tree.leaves(found), jax.tree.leaves(
    save_and_die.values(like, 1))):
  for shard in x.addressable_shards:
    assert (jax.device_get(shard.data) == v[shard.index]).all()
report(f"restored {told.step}")

# What one finds damaged, all refuse.
load = restore.load
if index == 1:
  def damaged(*args):
    raise manifest.DamagedError("array 'x' is damaged")
  restore.load = damaged
try:
  checkpoint.resume(workdir, other)
except manifest.DamagedError as e:
  report(f"refused {e}")
restore.load = load

# What one fails to write, all hear of.
if index == 1:
  def fail(name):
    if name == "data written":
      raise OSError(28, "No space left on device", "/a/chunk")
  checkpoint._point = fail
saver.save(2, state)
try:
  saver.wait()
except manifest.CheckpointError as e:
  report(f"failed {e}")
os._exit(0)
"""


def test_two_processes_save_restore_and_fail_together(workdir):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  environment = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
  }
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _TOGETHER, workdir, str(i), address],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=environment,
    )
    for i in range(2)
  ]
  try:
    outputs = [p.communicate(timeout=90) for p in processes]
  finally:
    for p in processes:
      p.kill()
  for i, (out, err) in enumerate(outputs):
    saved, restored, refused, failed = out.splitlines() or [err, "", "", ""]
    assert (saved, restored) == ("saved", "restored 1"), err
    assert refused.startswith("refused array 'x' is damaged")
    assert failed.startswith("failed the checkpoint of step 2 was not saved: ")
    assert "/a/chunk: No space left on device" in failed
    if i == 0:
      assert f"process 1 on host {socket.gethostname()}" in failed
  assert checkpoint.verify(path_of(workdir, 1)) == []
  for mesh in MESHES:
    found, told = checkpoint.restore(workdir, like(*mesh))
    same(found, 1)
  assert told.writer["processes"] == 2
  # Each process wrote only files of its own, each of them once.
  assert told.arrays["params/wide"].grid == (2, 1)
  # The remains of the failed save go at the next start.
  assert len(storage.listing(workdir).leftovers) == 1
  checkpoint.resume(workdir, like())
  assert os.listdir(storage.folder(workdir)) == ["00000001"]
