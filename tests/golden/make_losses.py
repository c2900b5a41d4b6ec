"""Makes losses*.json: the first steps of tiny configs, on one device.

  JAX_PLATFORMS=cpu python -m tests.golden.make_losses

Run it only after an intended change of the numbers: a default, the order of the
data, initialisation, or the config. Explain the change in the commit.
"""

import json
import pathlib
import tempfile
from typing import Any

from bigtrain import main
from bigtrain.config import loading
from bigtrain.reports import writers

FILE = pathlib.Path(__file__).with_name("losses.json")
FILES = {
  "digits": FILE,
  "digits_captions": FILE.with_name("losses_digits_captions.json"),
  "digits_siglip": FILE.with_name("losses_digits_siglip.json"),
}


def make(
  workdir: str, name: str = "digits", **changes: Any
) -> dict[str, list[float]]:
  """Returns losses and gradient norms of the first five steps.

  Args:
    workdir: a new folder.
    name: name of the config, which is loaded with its argument runlocal.
    **changes: values of config keys to change.
  """
  config = loading.load(f"configs/{name}.py:runlocal")
  config |= dict(total_steps=5, log_steps=1, evals={}, tensorboard=False)
  main.train(config | changes, workdir)
  rows = writers.read_rows(workdir)
  return {name: [row[name] for row in rows] for name in ("loss", "grad_norm")}


if __name__ == "__main__":
  for name, file in FILES.items():
    with tempfile.TemporaryDirectory() as folder:
      file.write_text(json.dumps(make(folder, name), indent=2) + "\n")
