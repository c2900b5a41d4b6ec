"""finished.json, a note that a run has nothing left to do.

With it, starting a finished run again prints its results within seconds: the
program neither compiles nor loads the state.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from bigtrain.checkpoints import folders, integrity
from bigtrain.checkpoints.manifest import MANIFEST_FILE, CheckpointError
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.files import paths

_FILE = "finished.json"


def write(
  workdir: str,
  config: Mapping[str, Any],
  fingerprints: Mapping[str, str],
  results: Mapping[str, Any],
  reason: str = "",
) -> None:
  """Writes the note; process 0 calls it.

  Args:
    workdir: the run's folder.
    config, fingerprints: the run's config, and those of its input files.
    results: newest value of each metric, and "step".
    reason: why the run ended before its last step, if it did.
  """
  with contextlib.suppress(OSError, CheckpointError):
    note = {
      "config": _identity(config, fingerprints),
      "manifest": _manifest_digest(workdir, results["step"]),
      "results": {
        name: value
        for name, value in results.items()
        if isinstance(value, int | float) and math.isfinite(value)
      },
      "reason": reason,
    }
    with paths.replacing(os.path.join(workdir, _FILE)) as file:
      json.dump(note, file)


def read(
  workdir: str, config: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> dict[str, Any] | None:
  """Returns the results of a run that has nothing left to do, else None.

  It is also None if the config has changed or the newest checkpoint is damaged.
  All processes get the same result.
  """
  note = None
  if jax.process_index() == 0:
    note = _read(workdir, _identity(config, fingerprints))
  note = process.broadcast(note)
  if note is None:
    return None
  logging.info(
    "Step %d of this workdir is the last%s: nothing is left to do.",
    note["results"]["step"],
    f" ({note['reason']})" if note["reason"] else "",
  )
  return note["results"]


def _read(workdir: str, identity: str) -> dict[str, Any] | None:
  # A note that cannot be read is the same as none: the run starts as usual.
  invalid = (CheckpointError, OSError, ValueError, KeyError, TypeError)
  with contextlib.suppress(*invalid):
    note = json.loads(paths.read_bytes(os.path.join(workdir, _FILE)))
    step = note["results"]["step"]
    same = note["config"] == identity and folders.newest(workdir) == step
    same = same and note["manifest"] == _manifest_digest(workdir, step)
    if same and not integrity.verify(folders.find(workdir, step)):
      return {"reason": note["reason"], "results": note["results"]}
  return None


def _identity(
  config: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> str:
  return settings.digest({"config": config, "fingerprints": fingerprints})


def _manifest_digest(workdir: str, step: int) -> str:
  path = os.path.join(folders.find(workdir, step), MANIFEST_FILE)
  return hashlib.sha256(paths.read_bytes(path)).hexdigest()
