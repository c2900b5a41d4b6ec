"""Rows of a batch that several processes have in common.

If an example is split over processes, as with `tensor`, each of them has its
row. Only one of them may call a judge or a tool: a second call would double the
cost, and might return something else. So a row belongs to the first process
that has it, and this process sends the results to the others.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bigtrain.inputs.transfer import Placement


class SharedRows:
  """Which process owns which rows.

  Attributes:
    own: whether each of this process's rows belongs to it, bool [rows].
  """

  def __init__(self, placement: Placement):
    owners: dict[int, int] = {}  # {row: process}
    shape = (placement.batch_size,)
    devices: Any = placement.sharding.devices_indices_map(shape)
    holders = set[tuple[int, int, int]]()
    for device, (rows,) in devices.items():
      start, stop, _ = rows.indices(placement.batch_size)
      holders.add((start, stop, device.process_index))
      for row in range(start, stop):
        first = owners.get(row, device.process_index)
        owners[row] = min(first, device.process_index)
    self._rows = placement.rows
    self._owner = np.asarray([owners[row] for row in self._rows.tolist()])
    self.own = self._owner == jax.process_index()
    # All processes know the same answer, and take part in each exchange.
    self._exists = len(holders) > len({h[:2] for h in holders})

  def exchange(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays [rows, ...] with the values of each row's owner."""
    if not self._exists:
      return dict(arrays)
    gathered = multihost_utils.process_allgather(
      {"rows": self._rows.astype(np.int32), **arrays}
    )
    rows_PR = gathered.pop("rows")
    # Where each row is among its owner's.
    places = [
      int(np.flatnonzero(rows_PR[owner] == row)[0])
      for owner, row in zip(self._owner, self._rows)
    ]
    return {name: x[self._owner, places] for name, x in gathered.items()}
