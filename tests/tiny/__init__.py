"""A run of six steps that uses all parts of the program in about a second.

A dense net learns ten classes of random images. `config` returns the run's
config; the other functions read its results.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from support import compile_cache

from bigtrain.arrays import trees
from bigtrain.checkpoints import folders, restore
from bigtrain.reports import writers

NUM_TRAIN = 80  # Five batches: the sixth belongs to the next epoch.
NUM_VAL = 40  # The last batch is not full.

# Names in rows that differ between two runs of the same config.
_TIMES = (
  "ckpt_stall_secs",
  "ckpt_write_secs",
  "compile_secs",
  "data_wait_fraction",
  "device_hours",
  "eta_secs",
  "examples_per_sec",
  "examples_per_sec_per_device",
  "host_rss_bytes",
  "mfu",
  "restarts",
  "step_secs",
  "tokens_per_sec",
  "tokens_per_sec_per_device",
  # Facts about programs, in the first row of each process.
  "model_flops_per_step",
  "update_alias_bytes",
  "update_argument_bytes",
  "update_output_bytes",
  "update_peak_bytes",
  "update_temporary_bytes",
)


def write_data(folder: os.PathLike[str]) -> None:
  """Writes train.npz and val.npz: image, labels, id."""
  rng = np.random.default_rng(0)
  number = NUM_TRAIN + NUM_VAL
  image = rng.normal(size=(number, 8, 8, 1)).astype(np.float32)
  labels = (image.reshape(number, 64) @ rng.normal(size=(64, 10))).argmax(1)
  ids = np.arange(number, dtype=np.int32) + 1000
  for name, part in (
    ("train", slice(NUM_TRAIN)),
    ("val", slice(NUM_TRAIN, None)),
  ):
    np.savez(
      pathlib.Path(folder) / f"{name}.npz",
      image=image[part],
      labels=labels[part].astype(np.int32),
      id=ids[part],
    )


def config(
  folder: os.PathLike[str], changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns a config with rows at steps 1, 2, 4, 6 and saves at 3, 6.

  Args:
    folder: folder with the files of write_data.
    changes: {"dotted.key": value}; a value of None removes the key.
  """
  folder = pathlib.Path(folder)
  result: dict[str, Any] = dict(
    seed=0,
    total_steps=6,
    log_steps=2,
    ckpt_steps=3,
    compile_cache=str(compile_cache.FOLDER),
    tensorboard=False,
    task="classification",
    input=dict(
      data=dict(type="arrays", path=str(folder / "train.npz")), batch_size=16
    ),
    model_name="tiny.net",
    model=dict(num_classes=10),
    optimizer=dict(name="adam"),
    lr=0.01,
    schedule=dict(decay_type="cosine", warmup_steps=2),
    evals=dict(
      val=dict(
        type="classification",
        pred="logits",
        data=dict(type="arrays", path=str(folder / "val.npz")),
        log_steps=3,
      )
    ),
  )
  for key, value in (changes or {}).items():
    *parents, last = key.split(".")
    node = result
    for parent in parents:
      node = node.setdefault(parent, {})
    if value is None:
      del node[last]
    else:
      node[last] = value
  return result


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of a row that two runs of the same config share."""
  return {
    name: value
    for name, value in row.items()
    if name not in _TIMES
    and not name.startswith("account/")
    and not name.endswith("/secs")
  }


def rows(workdir: os.PathLike[str]) -> dict[int, dict[str, Any]]:
  """Returns {step: its row without times}."""
  by_step = {}
  for row in writers.read_rows(str(workdir)):
    step = row.pop("step")
    assert step not in by_step, f"two rows of step {step}"
    by_step[step] = without_times(row)
  return by_step


def checkpoint_steps(workdir: os.PathLike[str]) -> list[int]:
  """Returns the steps that have a checkpoint, ascending."""
  return folders.steps(str(workdir))


def arrays(
  workdir: os.PathLike[str], step: int | None = None
) -> dict[str, np.ndarray]:
  """Returns {name: array} of a checkpoint; the newest one by default."""
  directory = folders.find(str(workdir), step)
  manifest = folders.read_manifest(directory)
  like = {
    name: jax.ShapeDtypeStruct(array.shape, array.dtype)
    for name, array in manifest.arrays.items()
  }
  loaded = restore.load(directory, manifest, {n: n for n in like}, like)
  return {name: np.asarray(x) for name, x in loaded.items()}


def assert_same(first: Any, second: Any) -> None:
  """Asserts that names, shapes, types and bits are the same."""
  one = dict(trees.flatten_with_names(first))
  two = dict(trees.flatten_with_names(second))
  assert sorted(one) == sorted(two)
  differ = [
    name
    for name in one
    if np.asarray(one[name]).dtype != np.asarray(two[name]).dtype
    or np.asarray(one[name]).tobytes() != np.asarray(two[name]).tobytes()
  ]
  assert not differ, {name: (one[name], two[name]) for name in differ[:5]}
