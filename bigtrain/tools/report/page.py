"""Builds the HTML page of a report, which needs no other file or network."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.reports import console
from bigtrain.tools.report import panels
from bigtrain.tools.report.panels import ACCOUNT_NAMES, COLORS, Run


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
  """Returns {"model.width": "64", ...} of nested dicts.

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
  """Returns {key: value in each run, or ""} of config keys that differ."""
  flat = [flatten(run.config) for run in runs]
  keys = dict.fromkeys(key for config in flat for key in config)
  values = {key: [config.get(key, "") for config in flat] for key in keys}
  return {key: v for key, v in values.items() if len(set(v)) > 1}


def render(runs: Sequence[Run], images: Mapping[str, str]) -> str:
  """Returns the HTML page.

  Args:
    runs: runs to report.
    images: {name: SVG element}, see `curves.svgs`.
  """
  title = ", ".join(run.name for run in runs)
  titles = {panel.name: panel.title for panel in panels.panels(runs)}
  figures = "".join(
    f'<figure aria-label="{_text(titles[name])}">{svg}</figure>'
    for name, svg in images.items()
    if name != "time"
  )
  sections = [
    ("Final metrics", _table(runs, _final(runs))),
    ("Curves", f'<div class="grid">{figures}</div>'),
    ("Time", _time(runs, images)),
    ("Config", _config(runs)),
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
  """A table with one column of text per run."""
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
  """Lines of the first table, without those that are empty for all runs."""

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
      "Fraction of the schedule": _percent(run.last("progress")),
      "Examples seen": _count(run.last("examples_seen")),
      "Tokens seen": _count(run.last("tokens_seen")),
      "Devices": f"{devices} x {newest.get('device_kind')}" if devices else "",
      "Wall-clock time": console.duration(sum(accounts.values()))
      if accounts
      else "",
      "Device hours": _number(run.last("device_hours")),
      "Restarts": _count(run.last("restarts") or 0),
      "Model GFLOPs per step": _number(_scaled(flops, 1e-9)),
      "Memory of the step": _bytes(run),
    }
    if name:
      values = sorted(r[name] for r in run.rows if name in r)
      median = console.number(values[len(values) // 2])
      facts["Median speed"] = f"{median} {name.removesuffix('_per_sec')}/s"
    return facts

  return _columns([of(run) for run in runs])


def _final(runs: Sequence[Run]) -> dict[str, list[str]]:
  """Newest value of every metric of training and evaluations."""
  names = [*panels.results(runs), "loss"]
  names += [
    panel.name
    for panel in panels.panels(runs)
    if panel.title.startswith("Training: ")
  ]
  return _columns([{n: _number(run.last(n)) for n in names} for run in runs])


def _columns(of_runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
  """Returns {name: value of each run}, without names that are all empty."""
  names = dict.fromkeys(name for facts in of_runs for name in facts)
  lines = {n: [facts.get(n, "") for facts in of_runs] for n in names}
  return {name: values for name, values in lines.items() if any(values)}


def _time(runs: Sequence[Run], images: Mapping[str, str]) -> str:
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
    return "<p>No time accounts in the rows.</p>"
  figure = f'<figure class="narrow">{images["time"]}</figure>'
  return figure + _table(runs, lines)


def _config(runs: Sequence[Run]) -> str:
  parts = []
  if len(runs) > 1:
    changed = differences(runs)
    parts.append(
      _table(runs, changed) if changed else "<p>The configs are equal.</p>"
    )
  parts += [
    _details(f"Config of {run.name}", flatten(run.config)) for run in runs
  ]
  return "".join(parts)


def _info(runs: Sequence[Run]) -> str:
  parts = []
  for run in runs:
    starts = run.info.get("starts") or []
    for i, start in enumerate(starts):
      count = f" (start {i + 1} of {len(starts)})" if len(starts) > 1 else ""
      parts.append(_details(run.name + count, flatten(start)))
  return "".join(parts) or "<p>No run.json.</p>"


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
  """Memory of the compiled update on a device, as text."""
  parts = [
    run.last(f"update_{name}_bytes")
    for name in ("argument", "output", "temporary", "alias")
  ]
  if None in parts:
    return ""
  *sizes, aliased = parts
  return f"{console.number((sum(sizes) - aliased) / 2**20)} MiB per device"


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
