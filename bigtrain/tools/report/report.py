"""Reports one or several runs as an HTML page and as images.

  python -m bigtrain.tools.report WORKDIR [WORKDIR ...] [--out DIR]

writes DIR/report.html, a page that needs no other file and no network. If
matplotlib is installed, it also writes the curves as DIR/*.png, of which
`curves.png` is an overview for documents. By default, DIR is the folder
`report` in the workdir, or in the current folder for several workdirs. Runs may
still be in progress.
"""

import importlib.util
import os
from collections.abc import Sequence

from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.reports import log_entries, run_files
from bigtrain.tools import arguments, exits, ranking
from bigtrain.tools.report import curves, page
from bigtrain.tools.report.panels import Run


def read(workdirs: Sequence[str]) -> list[Run]:
  runs = []
  for workdir, name in zip(workdirs, short_names(workdirs)):
    metrics = log_entries.read(workdir)
    if not metrics:
      raise ConfigError(
        f"{os.path.join(workdir, log_entries.FILE_NAME)}: no log entries; "
        "expected the workdir of a run that has logged a step."
      )
    config = run_files.read_json(os.path.join(workdir, "config.json")) or {}
    info = run_files.read_json(os.path.join(workdir, "run.json")) or {}
    runs.append(Run(name, config, info, metrics, workdir))
  return runs


def short_names(paths: Sequence[str]) -> list[str]:
  """Returns the last parts of paths, as many as needed to be distinct."""
  parts = [os.path.abspath(path).strip(os.sep).split(os.sep) for path in paths]
  for n in range(1, max(map(len, parts)) + 1):
    names = ["/".join(p[-n:]) for p in parts]
    if len(set(names)) == len(names):
      return names
  raise ConfigError(
    f"workdir: expected different folders, got {', '.join(paths)}."
  )


def write(
  workdirs: Sequence[str],
  out: str,
  metric: str | None = None,
  mode: str | None = None,
) -> list[str]:
  """Writes the page and the images; returns their paths, the page first."""
  runs = read(workdirs)
  names = {name for run in runs for entry in run.entries for name in entry}
  metric, mode = ranking.choose(names, metric, mode)
  bests = [ranking.best(run.entries, metric, mode) for run in runs]
  best_first = ranking.order(bests, mode)
  runs = [runs[i] for i in best_first]
  bests = [bests[i] for i in best_first]
  paths.make_folder(out)
  files = [os.path.join(out, "report.html")]
  with paths.replacing(files[0]) as file:
    file.write(page.render(runs, metric, mode, bests))
  if importlib.util.find_spec("matplotlib") is None:
    return files
  for name, content in curves.pngs(runs).items():
    files.append(os.path.join(out, f"{name}.png"))
    with paths.replacing(files[-1], "wb") as png:
      png.write(content)
  return files


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  parser = arguments.Parser("report", __doc__)
  parser.add_argument(
    "workdir", nargs="+", help="folder of a run, finished or in progress"
  )
  parser.add_argument(
    "--out",
    help="folder for the page and the images (default: `report` in the "
    "workdir, or in the current folder for several workdirs)",
  )
  ranking.add_arguments(parser)
  args = parser.parse_args(argv)
  workdirs = [paths.absolute(workdir) for workdir in args.workdir]
  parent = workdirs[0] if len(workdirs) == 1 else ""
  out = paths.absolute(args.out or os.path.join(parent, "report"))
  page_path, *images = write(workdirs, out, args.metric, args.mode)
  if images:
    print(f"{page_path} and {len(images)} images in the same folder.")
  else:
    print(f"{page_path}. For images: pip install 'bigtrain[report]'.")
  return 0
