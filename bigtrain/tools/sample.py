"""Draws samples from a trained generator, as files.

  python -m bigtrain.tools.sample --workdir=runs/jit --num_samples=50
  python -m bigtrain.tools.sample --workdir=runs/jit --weights=ema \\
      --guidance=2 --steps=100 --seed=1 --output=samples

The output folder gets samples/sample-<step>/000000.png and so on, and a sheet
of all of them. Sample i has the class i modulo the number of classes. Options
that are not given are those of the run's evaluation of samples, if it has one.

Exit codes: 0; 2 for a mistake in the arguments; 1 otherwise.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.files import paths
from bigtrain.reports import run_files
from bigtrain.tools import arguments, evaluate, exits

_NAME = "sample"
_OPTIONS = ("sampler", "steps", "guidance", "seed")  # Of the predict function.


def sample(
  workdir: str,
  *,
  num_samples: int = 50,
  columns: int = 10,
  zoom: int = 1,
  step: int | None = None,
  weights: str | None = None,
  output: str = "",
  changes: Sequence[str] = (),
  **options: Any,
) -> dict[str, Any]:
  """Writes samples to files; returns the step and the path of the sheet."""
  workdir = paths.absolute(workdir)
  entry: dict[str, Any] = dict(
    type="samples",
    pred="samples",
    pred_kw=dict(options),
    num_samples=num_samples,
    columns=columns,
    zoom=zoom,
    files=True,
    weights=weights or "params",
  )
  evals = run_files.read_config(workdir, "--workdir=").get("evals") or {}
  for other in evals.values():
    if other.get("pred") == "samples":
      entry["pred_kw"] = {**other.get("pred_kw", {}), **options}
      entry["weights"] = weights or other.get("weights", "params")
      break
  output = paths.absolute(output or os.path.join(workdir, "evaluate"))
  return evaluate.evaluate(workdir, step, changes, output, evals={_NAME: entry})


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("sample", __doc__, changes_config=True)
  parser.add_argument("--workdir", required=True, help="folder of the run")
  parser.add_argument(
    "--num_samples", type=int, default=50, help="(default: %(default)s)"
  )
  parser.add_argument(
    "--columns",
    type=int,
    default=10,
    help="samples in a row of the sheet (default: %(default)s)",
  )
  parser.add_argument(
    "--zoom",
    type=int,
    default=1,
    help="rows and columns of a pixel in the sheet (default: %(default)s)",
  )
  parser.add_argument(
    "--step", type=int, help="step of the checkpoint (default: the newest)"
  )
  parser.add_argument("--weights", help='"params" or "ema"')
  parser.add_argument("--sampler", help='"euler" or "heun"')
  parser.add_argument("--steps", type=int, help="steps of the sampler")
  parser.add_argument("--guidance", type=float, help="scale of the guidance")
  parser.add_argument("--seed", type=int, help="seed of the noise")
  parser.add_argument(
    "--output",
    default="",
    help="folder for the files (default: evaluate in the workdir)",
  )
  return parser


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args, changes = _parser().parse(argv)
  process.join_job(settings.Config({}))
  values = vars(args)
  given = {name: values.pop(name) for name in _OPTIONS}
  options = {name: x for name, x in given.items() if x is not None}
  results = sample(values.pop("workdir"), changes=changes, **values, **options)
  if jax.process_index() == 0:
    print(settings.to_json(results), flush=True)
  return process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
