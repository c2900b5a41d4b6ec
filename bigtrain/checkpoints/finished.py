"""The end of a run, for the same command to find when it is started again.

`write` notes in the workdir which config has finished, with its results. `read`
needs neither jax's devices nor the model or the data, so the command can look
before it imports what they need.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from bigtrain import settings
from bigtrain.checkpoints import folders, integrity
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.files import paths

_FILE = "finished.json"
_ENDS_EARLY = ("eval_only", "compile_only")


def write(
  workdir: str, config: Mapping[str, Any], results: Mapping[str, Any]
) -> None:
  """Notes that a run has nothing left to do.

  Args:
    results: newest value of each metric, and "step".
  """
  if any(config.get(key) for key in _ENDS_EARLY):
    return
  path = os.path.join(workdir, _FILE)
  with contextlib.suppress(OSError, CheckpointError):
    note = json.dumps(
      {
        "config": settings.digest(config),
        "manifest": _manifest_digest(workdir, results["step"]),
        "results": {k: v for k, v in results.items() if _is_number(v)},
      }
    )
    if not paths.exists(path) or paths.read_bytes(path) != note.encode():
      with paths.replacing(path) as file:
        file.write(note)


def read(workdir: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the results of a run that has nothing left to do, else None.

  A run goes on, or reports the reason why it cannot, after any change of the
  config or damage to its newest checkpoint. Data are not compared.
  """
  if any(config.get(key) for key in _ENDS_EARLY):
    return None
  try:
    note = json.loads(paths.read_bytes(os.path.join(workdir, _FILE)))
    results = dict(note["results"])
    step = results["step"]
    same = note["config"] == settings.digest(config)
    same = same and folders.newest(workdir) == step
    same = same and note["manifest"] == _manifest_digest(workdir, step)
    if not same or integrity.verify(folders.find(workdir, step)):
      return None
  except (CheckpointError, OSError, ValueError, KeyError, TypeError):
    return None
  return results


def _manifest_digest(workdir: str, step: int) -> str:
  path = os.path.join(folders.find(workdir, step), manifest_lib.FILE)
  return hashlib.sha256(paths.read_bytes(path)).hexdigest()


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)
