"""Writes losses.json: the first steps of digits:runlocal, on one device.

  JAX_PLATFORMS=cpu python -m tests.golden.make_losses

Only after a change that was meant to change the numbers: of a default, of the
order of the data, of initialisation, of the config. Say so in the commit.
"""

import json
import pathlib
import tempfile
from typing import Any

from bigtrain import main, settings, writers

FILE = pathlib.Path(__file__).with_name("losses.json")


def make(workdir: str, **changes: Any) -> dict[str, list[float]]:
  """Losses and norms of the gradients of the first five steps.

  Args:
    workdir: a new folder.
    **changes: to keys of the config.
  """
  config = settings.load("configs/digits.py:runlocal")
  config |= dict(total_steps=5, log_steps=1, evals={}, tensorboard=False)
  main.train(config | changes, workdir)
  rows = writers.read_rows(workdir)
  return {name: [row[name] for row in rows] for name in ("loss", "grad_norm")}


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    FILE.write_text(json.dumps(make(folder), indent=2) + "\n")
