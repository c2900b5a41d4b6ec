"""Calls the predict functions of a task on any number of examples."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bigtrain import parts, settings, sharding


class Runner:
  """Compiles predict functions and calls them, batch by batch.

  Attributes:
    batch_size: largest number of examples at a time, a multiple of the number
      of devices.
  """

  def __init__(
    self,
    fns: Mapping[str, Callable[..., Any]],
    variables: Mapping[str, Any],
    mesh: jax.sharding.Mesh,
    batch_size: int,
  ):
    settings.check_number("batch_size", batch_size, least=1, whole=True)
    self._fns = fns
    self._ways = sharding.batch_ways(mesh)
    self.batch_size = -(-batch_size // self._ways) * self._ways
    self._variables, self._mesh = variables, mesh
    self._compiled: dict[str, Callable[..., Any]] = {}

  def __call__(
    self,
    pred: str,
    features: Mapping[str, Any],
    fixed: Mapping[str, Any] | None = None,
    **options: Any,
  ) -> Any:
    """See Predictor.run."""
    fn = self._compile(pred, options)
    arrays = {name: np.asarray(x) for name, x in features.items()}
    total = len(next(iter(arrays.values())))
    results = []
    for start in range(0, total, self.batch_size):
      rows = {n: x[start : start + self.batch_size] for n, x in arrays.items()}
      number = min(self.batch_size, total - start)
      batch = self._on_devices(rows, number) | dict(fixed or {})
      with jax.set_mesh(self._mesh):
        outputs = jax.device_get(fn(self._variables, batch))
      results.append(jax.tree.map(lambda x, n=number: x[:n], outputs))
    return jax.tree.map(lambda *x: np.concatenate(x), *results)

  def _compile(
    self, pred: str, options: Mapping[str, Any]
  ) -> Callable[..., Any]:
    if pred not in self._fns:
      hint = settings.did_you_mean(pred, self._fns)
      raise settings.ConfigError(
        f"run: the task has no predict function {pred!r}.{hint}"
      )
    fn = self._fns[pred]
    settings.check_kwargs(fn, options, pred, ("variables", "batch"))
    key = f"{pred} {sorted(options.items())!r}"
    if key not in self._compiled:

      def of_features(variables: Any, batch: Any) -> Any:
        return fn(variables, parts.Features(batch, "run"), **options)

      self._compiled[key] = jax.jit(
        of_features, out_shardings=sharding.replicated(self._mesh)
      )
    return self._compiled[key]

  def _on_devices(
    self, rows: Mapping[str, np.ndarray], number: int
  ) -> dict[str, Any]:
    """Splits a batch over the devices, padded with copies of its last row.

    The size per device is a power of two, so that few programs compile.
    """
    per_device = -(-number // self._ways)
    size = self._ways * (1 << (per_device - 1).bit_length())
    size = min(size, self.batch_size)
    index = np.minimum(np.arange(size), number - 1)
    batch = {name: x[index] for name, x in rows.items()}
    batch["_mask"] = (np.arange(size) < number).astype(np.float32)
    return jax.device_put(batch, sharding.batch(self._mesh))
