"""Trains variants of a config and compares them.

  python -m bigtrain.tools.sweep --config=configs/digits.py \\
      --workdir=runs/sweep --grid lr=1e-3,3e-3 --grid model.depth=2,4

Each variant is a run in its own folder of the workdir. Without --grid, the
variants come from the config file's get_sweep. The same command, run again,
skips the variants that have finished and continues the others. The table is
also in sweep.json and sweep.csv. docs/sweeps.md has the details.

Exit codes: 0; 2 for a mistake in the arguments or the config; 75 if a signal
ended the sweep after its runs have saved; 1 if a variant failed.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from bigtrain.cluster import lease, process
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.tools import arguments, exits, ranking
from bigtrain.tools.sweep import local, results, slurm, variants


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("sweep", __doc__, changes_config=True)
  parser.add_argument(
    "--config", required=True, help="FILE.py or FILE.py:arguments"
  )
  parser.add_argument("--workdir", required=True, help="folder of the sweep")
  parser.add_argument(
    "--grid",
    action="append",
    default=[],
    metavar="KEY=VALUE,VALUE",
    help="values of a config key; several grids are combined (default: "
    "get_sweep of the config file)",
  )
  parser.add_argument(
    "--jobs",
    type=int,
    help="number of runs at a time (default: 1 locally, no limit under Slurm)",
  )
  parser.add_argument(
    "--launcher",
    default="local",
    choices=["local", "slurm"],
    help="slurm: submit each variant as a job (default: %(default)s)",
  )
  parser.add_argument(
    "--sbatch",
    default="",
    help="options of sbatch with --launcher=slurm, such as '--time=60 "
    "--gpus-per-node=8'",
  )
  ranking.add_arguments(parser)
  parser.add_argument(
    "--table",
    action="store_true",
    help="print the table of a sweep; start nothing",
  )
  return parser


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args, changes = _parser().parse(argv)
  if args.jobs is not None and args.jobs < 1:
    raise ConfigError(f"--jobs={args.jobs}: expected a positive number.")
  if args.sbatch and args.launcher != "slurm":
    raise ConfigError("--sbatch: needs --launcher=slurm.")
  all_variants = variants.make(args.config, changes, args.grid)
  results.check_evaluation(args.metric, loading.load(args.config, changes))
  workdir = paths.absolute(args.workdir)
  table = results.Results(workdir, all_variants, args.metric, args.mode)
  # Logs are local files, also if the workdir is in an object store.
  logs = f"{workdir}/logs"
  if paths.is_remote(workdir):
    logs = paths.absolute("runs/logs")

  def command(entry: results.Entry) -> list[str]:
    return [
      sys.executable,
      "-m",
      "bigtrain.main",
      f"--config={args.config}",
      f"--workdir={entry.workdir}",
      *(f"--config.{change}" for change in changes),
      *entry.variant.flags,
    ]

  interrupted = False
  is_slurm = args.launcher == "slurm"
  if is_slurm or (args.table and any(e.job for e in table.entries)):
    slurm.update(table, logs)
    if not args.table:
      options = shlex.split(args.sbatch)
      slurm.submit(table, command, args.jobs, options, logs)
  elif not args.table:
    holder = lease.acquire(workdir)
    try:
      interrupted = local.run(table, command, args.jobs or 1, logs)
    finally:
      holder.release()
  print(table.table())
  # While another process runs the sweep, that one writes the files.
  if not (args.table and lease.read(workdir)):
    table.write()
    print(f"Also in {os.path.join(args.workdir, 'sweep.csv')} and sweep.json.")
  table.check_metric()
  states = {entry.state for entry in table.entries}
  if interrupted:
    return process.EXIT_PREEMPTED
  if results.FAILED in states and not args.table:
    return process.EXIT_ERROR
  if results.INTERRUPTED in states and args.launcher == "local":
    return process.EXIT_PREEMPTED
  return process.EXIT_OK
