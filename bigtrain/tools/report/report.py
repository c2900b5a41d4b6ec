"""Makes a page about one or many runs.

  python -m bigtrain.tools.report WORKDIR [WORKDIR ...] [--out DIR]

writes DIR/report.html, which needs no other file and no network, and its
pictures as DIR/*.png; `curves.png` is an overview for a document. DIR is the
folder `report` in the only workdir, or else here. Runs that are still going
on can be reported too. It needs matplotlib, which the extra `report` installs.
"""

import argparse
import html
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigtrain import settings
from bigtrain.files import paths
from bigtrain.reports import console, rows
from bigtrain.tools.report import curves, panels
from bigtrain.tools.report.panels import ACCOUNT_NAMES, COLORS, Run


def read(workdirs: Sequence[str]) -> list[Run]:
  """The runs of some workdirs, with the shortest names that differ.

  Raises:
    ConfigError: a workdir has no rows.
  """
  found = []
  for workdir, name in zip(workdirs, short_names(workdirs)):
    metrics = rows.read_rows(workdir)
    if not metrics:
      raise settings.ConfigError(
        f"{os.path.join(workdir, rows.FILE_NAME)}: no rows; a workdir of a "
        "run that has logged a step was expected."
      )
    config, info = (
      _read_json(os.path.join(workdir, n)) for n in ("config.json", "run.json")
    )
    found.append(Run(name, config, info, metrics))
  return found


def short_names(paths: Sequence[str]) -> list[str]:
  """Names of folders, as many of their last parts as tell them apart.

  >>> short_names(["runs/a/seed0", "runs/b/seed0/"])
  ['a/seed0', 'b/seed0']
  """
  parts = [os.path.abspath(path).strip(os.sep).split(os.sep) for path in paths]
  for n in range(1, max(map(len, parts)) + 1):
    names = ["/".join(p[-n:]) for p in parts]
    if len(set(names)) == len(names):
      return names
  raise settings.ConfigError(f"workdirs: {', '.join(paths)}: one is twice.")


def _read_json(path: str) -> dict[str, Any]:
  """A file's content; empty for a workdir that lacks it."""
  try:
    return json.loads(paths.read_bytes(path))
  except FileNotFoundError:
    return {}


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
  """{"model.width": "64", ...} of nested dicts.

  >>> flatten({"model": {"width": 64}, "pp": "a|b"})
  {'model.width': '64', 'pp': 'a|b'}
  """
  if isinstance(config, Mapping) and (config or not prefix):
    return {
      name: value
      for key, sub in config.items()
      for name, value in flatten(sub, f"{prefix}.{key}".lstrip(".")).items()
    }
  return {prefix: config if isinstance(config, str) else json.dumps(config)}


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
  """Config keys whose values differ, with the value of each run or ""."""
  flat = [flatten(run.config) for run in runs]
  keys = dict.fromkeys(key for config in flat for key in config)
  values = {key: [config.get(key, "") for config in flat] for key in keys}
  return {key: v for key, v in values.items() if len(set(v)) > 1}


def page(runs: Sequence[Run], pictures: Mapping[str, str]) -> str:
  """The HTML page.

  Args:
    runs: what to report.
    pictures: SVG elements by name, see `curves.svgs`.
  """
  title = ", ".join(run.name for run in runs)
  titles = {panel.name: panel.title for panel in panels.panels(runs)}
  figures = "".join(
    f'<figure aria-label="{_text(titles[name])}">{svg}</figure>'
    for name, svg in pictures.items()
    if name != "time"
  )
  sections = [
    ("Final numbers", _table(runs, _final(runs))),
    ("Curves", f'<div class="grid">{figures}</div>'),
    ("Time", _time(runs, pictures)),
    ("Configuration", _config(runs)),
    ("Code and machines", _info(runs)),
  ]
  body = "".join(f"<h2>{t}</h2>{content}" for t, content in sections)
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{_text(title)}</title><style>{_CSS}</style></head>"
    f"<body><h1>{_text(title)}</h1>{_table(runs, _facts(runs))}{body}"
    "</body></html>\n"
  )


def _text(value: Any) -> str:
  return html.escape(str(value))


def _table(runs: Sequence[Run], lines: Mapping[str, Sequence[str]]) -> str:
  """A table with a column for each run; its values are text."""
  head = "".join(
    f'<th><span class="dot" style="background:{COLORS[i % len(COLORS)]}">'
    f"</span>{_text(run.name)}</th>"
    for i, run in enumerate(runs)
  )
  body = "".join(
    f"<tr><th>{_text(name)}</th>"
    + "".join(f"<td>{_text(v) or '&ndash;'}</td>" for v in values)
    + "</tr>"
    for name, values in lines.items()
  )
  return (
    '<div class="wide"><table><thead><tr><th></th>'
    f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
  )


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
  """The lines of the first table that any run has something to say to."""

  def of(run: Run) -> dict[str, str]:
    newest = (run.info.get("starts") or [{}])[-1]
    accounts = run.accounts()
    devices = newest.get("devices")
    flops = run.last("model_flops_per_step")
    speed = [f"{w}_per_sec" for w in ("tokens", "examples")]
    name = next((s for s in speed if run.last(s)), None)
    facts = {
      "Task": run.config.get("task", ""),
      "Model": run.config.get("model_name", ""),
      "Steps": f"{run.last('step'):,}",
      "Of the schedule": _percent(run.last("progress")),
      "Examples seen": _count(run.last("examples_seen")),
      "Tokens seen": _count(run.last("tokens_seen")),
      "Devices": f"{devices} x {newest.get('device_kind')}" if devices else "",
      "Wall-clock time": console.duration(sum(accounts.values()))
      if accounts
      else "",
      "Device hours": _number(run.last("device_hours")),
      "Restarts": _count(run.last("restarts") or 0),
      "Model GFLOPs of a step": _number(_scaled(flops, 1e-9)),
      "Memory of the step": _bytes(run),
    }
    if name:
      values = sorted(r[name] for r in run.rows if name in r)
      median = console.number(values[len(values) // 2])
      facts["Median speed"] = f"{median} {name.removesuffix('_per_sec')}/s"
    return facts

  return _columns([of(run) for run in runs])


def _final(runs: Sequence[Run]) -> dict[str, list[str]]:
  """The newest value of every metric of training and of evaluations."""
  names = [*panels.results(runs), "loss"]
  names += [
    panel.name
    for panel in panels.panels(runs)
    if panel.title.startswith("Training: ")
  ]
  return _columns([{n: _number(run.last(n)) for n in names} for run in runs])


def _columns(of_runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
  """{line: [a value for each run]} without lines that all leave empty."""
  names = dict.fromkeys(name for facts in of_runs for name in facts)
  lines = {n: [facts.get(n, "") for facts in of_runs] for n in names}
  return {name: values for name, values in lines.items() if any(values)}


def _time(runs: Sequence[Run], pictures: Mapping[str, str]) -> str:
  lines = {}
  for account, name in ACCOUNT_NAMES.items():
    secs = [run.accounts().get(account) for run in runs]
    if any(secs):
      lines[name] = [
        f"{console.duration(s)} ({s / sum(run.accounts().values()):.1%})"
        if s
        else ""
        for s, run in zip(secs, runs)
      ]
  if not lines:
    return "<p>The rows have no time accounts.</p>"
  figure = f'<figure class="narrow">{pictures["time"]}</figure>'
  return figure + _table(runs, lines)


def _config(runs: Sequence[Run]) -> str:
  parts = []
  if len(runs) > 1:
    changed = differences(runs)
    parts.append(
      _table(runs, changed)
      if changed
      else "<p>The configurations are the same.</p>"
    )
  parts += [_details(f"All of {run.name}", flatten(run.config)) for run in runs]
  return "".join(parts)


def _info(runs: Sequence[Run]) -> str:
  parts = []
  for run in runs:
    starts = run.info.get("starts") or []
    for i, start in enumerate(starts):
      count = f" (start {i + 1} of {len(starts)})" if len(starts) > 1 else ""
      parts.append(_details(run.name + count, flatten(start)))
  return "".join(parts) or "<p>There is no run.json.</p>"


def _details(title: str, lines: Mapping[str, str]) -> str:
  body = "".join(
    f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in lines.items()
  )
  return (
    f"<details><summary>{_text(title)}</summary>"
    f'<div class="wide"><table class="keys">{body}</table></div></details>'
  )


def _number(value: float | None) -> str:
  return "" if value is None else console.number(value)


def _count(value: float | None) -> str:
  return "" if value is None else f"{value:,.0f}"


def _scaled(value: float | None, factor: float) -> float | None:
  return None if value is None else value * factor


def _bytes(run: Run) -> str:
  """What the compiled update takes of a device, as text."""
  parts = [
    run.last(f"update_{name}_bytes")
    for name in ("argument", "output", "temporary", "alias")
  ]
  if None in parts:
    return ""
  *whole, shared = parts
  return f"{console.number((sum(whole) - shared) / 2**20)} MiB a device"


def _percent(value: float | None) -> str:
  return "" if value is None else f"{value:.1%}"


_CSS = """
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif;
  color: #222; background: #fff; max-width: 1280px; margin: 0 auto;
  padding: 1.5rem 2rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem; padding-bottom: .25rem;
  border-bottom: 1px solid #ddd; }
.grid { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); }
figure { margin: 0; padding: .6rem; border: 1px solid #e6e6e6;
  border-radius: 6px; }
figure svg { display: block; width: 100%; height: auto; }
.narrow { max-width: 860px; }
figure + .wide { margin-top: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.6rem .3rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #eee; }
thead th { border-bottom: 1px solid #bbb; white-space: nowrap; }
tbody th { font-weight: normal; color: #555; white-space: nowrap; }
td { overflow-wrap: anywhere; }
.keys { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
.dot { display: inline-block; width: .7em; height: .7em; margin-right: .45em;
  border-radius: 50%; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: #0072B2; }
"""


def write(workdirs: Sequence[str], out: str) -> list[str]:
  """Writes the page and the pictures; returns their paths, the page first."""
  runs = read(workdirs)
  paths.make_folder(out)
  written = [os.path.join(out, "report.html")]
  with paths.replacing(written[0]) as file:
    file.write(page(runs, curves.svgs(runs)))
  for name, content in curves.pngs(runs).items():
    written.append(os.path.join(out, f"{name}.png"))
    with paths.replacing(written[-1], "wb") as png:
      png.write(content)
  return written


def main(arguments: Iterable[str] | None = None) -> int:
  """The command; returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m bigtrain.tools.report",
    description="Makes a page with the curves, the final numbers and the time "
    "accounts of one or many runs, and what their configs differ in.",
  )
  parser.add_argument("workdir", nargs="+", help="folder of a run")
  parser.add_argument("--out", help="folder for the page and its pictures")
  args = parser.parse_args(None if arguments is None else list(arguments))
  try:
    workdirs = [paths.absolute(workdir) for workdir in args.workdir]
    only = workdirs[0] if len(workdirs) == 1 else ""
    out = paths.absolute(args.out or os.path.join(only, "report"))
    written = write(workdirs, out)
  except settings.ConfigError as e:
    print(e, file=sys.stderr)
    return 2
  except OSError as e:
    print(f"error: {e}", file=sys.stderr)
    return 1
  print(f"{written[0]} and {len(written) - 1} pictures beside it.")
  return 0
