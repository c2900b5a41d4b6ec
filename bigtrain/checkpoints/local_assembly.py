"""Puts a state together from the shards that are on the hosts of a job."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from bigtrain import trees
from bigtrain.checkpoints import local_files, restore
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.local_files import Key, Part, Saved
from bigtrain.checkpoints.manifest import DamagedError, Manifest
from bigtrain.cluster import process, transfers


class Assembly:
  """Puts the state of a step together from the processes' shards.

  All processes call `run`, also those that have no shards of this step.
  """

  def __init__(self, first: int, saved: Saved | None, like: Any):
    """Nothing is read yet.

    Args:
      saved: the shards of this process, if it has some.
    """
    self._index = jax.process_index()
    self._first = first
    self._saved = saved
    self._like = like
    self._specs = dict(trees.flatten_with_names(like))
    self._values: dict[Key, np.ndarray] = {}

  def run(self) -> tuple[Any, Manifest] | None:
    """Returns (state, manifest) on all processes, or None on all of them."""
    is_first = self._saved is not None and self._index == self._first
    text = self._saved.manifest_text if is_first and self._saved else ""
    text = process.gather(text)[self._first]
    try:
      manifest = manifest_lib.from_json(text, "the local checkpoint")
      restore.check_fits("the local checkpoint", manifest, self._specs)
    except (DamagedError, restore.MismatchError) as e:
      logging.warning("%s", e)
      return None
    needed = {
      key: devices
      for name, spec in self._specs.items()
      for key, devices in _needed(name, spec).items()
    }
    self._values = dict(self._read(manifest, needed))
    if not self._exchange(
      manifest, [k for k in needed if k not in self._values]
    ):
      return None
    state = trees.map_with_names(
      lambda name, spec: self._on_devices(name, spec), self._like
    )
    return state, manifest

  def _read(
    self, manifest: Manifest, keys: Iterable[Key]
  ) -> Iterable[tuple[Key, np.ndarray]]:
    """The shards that this process has, intact."""
    if self._saved is None:
      return ()
    return local_files.read(self._saved, manifest, keys)

  def _exchange(self, manifest: Manifest, missing: list[Key]) -> bool:
    """Gets the missing shards from other processes; whether all have theirs."""
    asked = process.gather(missing)
    wanted = {local_files.key_of(*key) for keys in asked for key in keys}
    if not wanted:
      return True
    unread = [key for key in wanted if key not in self._values]
    intact = {key for key, _ in self._read(manifest, unread)}
    intact |= wanted & self._values.keys()
    server, offer = None, []
    if self._saved is not None and intact:
      server = transfers.Server(self._saved.data)
      offer = [[key, list(self._saved.parts[key])] for key in sorted(intact)]
    try:
      offers = process.gather(
        {"address": server and server.address, "parts": offer}
      )
      sources: dict[Key, list[tuple[int, Part]]] = {}
      for index, each in enumerate(offers):
        for key, part in each["parts"]:
          part = Part(*part)
          sources.setdefault(local_files.key_of(*key), []).append((index, part))
      if wanted - sources.keys():
        return False
      error = self._fetch(manifest, missing, sources, offers)
      errors = process.gather(error)
    finally:
      if server is not None:
        server.close()
    for index, message in enumerate(errors):
      if message:
        logging.warning("Process %d: %s", index, message)
    return not any(errors)

  def _fetch(
    self,
    manifest: Manifest,
    missing: Sequence[Key],
    sources: Mapping[Key, Sequence[tuple[int, Part]]],
    offers: Sequence[Mapping[str, Any]],
  ) -> str:
    """Gets the missing shards; returns an error message, or ""."""
    by_process: dict[int, list[tuple[Key, Part]]] = {}
    for key in missing:
      # Different processes ask different ones first.
      index, part = sources[key][self._index % len(sources[key])]
      by_process.setdefault(index, []).append((key, part))
    try:
      for index, parts in by_process.items():
        targets = [local_files.empty(key, manifest) for key, _ in parts]
        transfers.fetch(
          offers[index]["address"],
          [(part.offset, part.num_bytes) for _, part in parts],
          targets,
        )
        for (key, part), value in zip(parts, targets):
          if not local_files.is_intact(key, value, part.sums, manifest):
            return f"array {key[0]!r} of process {index} is damaged."
          self._values[key] = value
    except OSError as e:
      return f"shards of process {index} cannot be received: {e}"
    if missing:
      logging.info("Received %d shards from other processes.", len(missing))
    return ""

  def _on_devices(self, name: str, spec: Any) -> jax.Array:
    shards = []
    for key, devices in _needed(name, spec).items():
      value = self._values.pop(key)
      places = [
        jax.sharding.SingleDeviceSharding(
          device, memory_kind=spec.sharding.memory_kind
        )
        for device in devices
      ]
      shards += jax.device_put([value] * len(devices), places)
    return jax.make_array_from_single_device_arrays(
      tuple(spec.shape), spec.sharding, shards, dtype=spec.dtype
    )


def _needed(name: str, spec: Any) -> dict[Key, list[Any]]:
  """{shard: devices of this process that hold it}."""
  shape = tuple(spec.shape)
  result: dict[Key, list[Any]] = {}
  indices = spec.sharding.addressable_devices_indices_map(shape)
  for device, index in indices.items():
    key = name, local_files.bounds(index, shape)
    result.setdefault(key, []).append(device)
  return result
