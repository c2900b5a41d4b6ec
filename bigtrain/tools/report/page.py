"""Builds the HTML page of a report, which needs no other file or network."""

import json
import pathlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bigtrain import settings
from bigtrain.reports import console
from bigtrain.tools.ranking import Best
from bigtrain.tools.report import (
  charts,
  logged_media,
  markup,
  panels,
  predictions,
  texts,
)
from bigtrain.tools.report.panels import ACCOUNT_COLORS, ACCOUNT_NAMES, Run

# What evaluators have written: heading, and function from a run to HTML.
_OF_RUNS = (
  ("Predictions", predictions.section),
  ("Captions and texts", texts.section),
  ("Images, tables and histograms", logged_media.section),
)
_LONGEST = 40  # Characters of a config value in the table of runs.


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
  flat = settings.flatten(config).items()
  return {k: v if isinstance(v, str) else json.dumps(v) for k, v in flat}


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
  """Returns {key: value in each run, or ""} of config keys that differ."""
  flat = [flatten(run.config) for run in runs]
  keys = dict.fromkeys(key for config in flat for key in config)
  values = {key: [config.get(key, "") for config in flat] for key in keys}
  return {key: v for key, v in values.items() if len(set(v)) > 1}


def render(
  runs: Sequence[Run], metric: str, mode: str, bests: Sequence[Best | None]
) -> str:
  names = [run.name for run in runs]
  title = ", ".join(names) if len(runs) < 4 else f"{len(runs)} runs"
  shown = panels.panels(runs)
  content = json.dumps(charts.content(shown)).replace("<", "\\u003c")
  sections = [
    ("Runs", _runs(runs, metric, mode, bests)),
    ("Curves", _controls(runs) + charts.figures(shown)),
    *((heading, _of_runs(runs, section)) for heading, section in _OF_RUNS),
    ("Newest metrics", markup.by_run(names, _newest(runs))),
    ("Facts", markup.by_run(names, _facts(runs))),
    ("Time", _time(runs)),
    ("Config", _config(runs)),
    ("Code and machines", _info(runs)),
  ]
  body = "".join(f"<h2>{t}</h2>{html}" for t, html in sections if html)
  return _filled(
    "page.html",
    title=markup.text(title),
    style=_filled("page.css"),
    body=body,
    data=content,
    script=_filled("page.js"),
  )


def _filled(name: str, **values: str) -> str:
  """A file beside this one, with values in place of $name in HTML."""
  text = pathlib.Path(__file__).with_name(name).read_text()
  return string.Template(text).substitute(values) if values else text


def _runs(
  runs: Sequence[Run], metric: str, mode: str, bests: Sequence[Best | None]
) -> str:
  changed = differences(runs) if len(runs) > 1 else {}
  head = ["Run", metric, "at step", "Steps", "Training loss", *changed]
  rows = []
  for i, (run, best) in enumerate(zip(runs, bests)):
    wins = i == 0 and len(bests) > 1 and best is not None
    star = ' <span class="star" title="best">★</span>' if wins else ""
    cells = [
      f'<label><input type="checkbox" class="switch" value="{i}" checked>'
      f"{markup.dot(i)}{markup.text(run.name)}{star}</label>",
      markup.text(console.number(best.value)) if best else "&ndash;",
      f"{best.step:,}" if best else "",
      _number(run.last("step"), ",.0f"),
      markup.text(_number(run.last("loss"))),
      *(_short(values[i]) for values in changed.values()),
    ]
    kind = ' class="best"' if wins else ""
    rows.append(f"<tr{kind}>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
  heads = "".join(f"<th>{markup.text(name)}</th>" for name in head)
  which = "largest" if mode == "max" else "smallest"
  note = f"{markup.text(metric)} is the {which} value of the run."
  if len(runs) > 1:
    note = (
      f"Sorted by the {which} {markup.text(metric)} of each run. ★ marks the "
      "best run; the other columns are the config keys that differ."
    )
  return (
    f'<p class="note">{note}</p><div class="wide"><table class="runs"><thead>'
    f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
  )


def _short(value: str) -> str:
  """A cell with the beginning of a value; hovering shows all of it."""
  if len(value) <= _LONGEST:
    return markup.text(value) or "&ndash;"
  start = markup.text(value[: _LONGEST - 1])
  return f'<span title="{markup.text(value)}">{start}…</span>'


def _controls(runs: Sequence[Run]) -> str:
  """The inputs that change all charts, see page.js."""
  both = '<button id="all">all runs</button><button id="none">no run</button>'
  return _filled("controls.html", runs=both if len(runs) > 1 else "")


def _of_runs(runs: Sequence[Run], section: Callable[[Run], str]) -> str:
  return "".join(
    f'<div class="of-run-{i}"><h3>{markup.dot(i)}{markup.text(run.name)}</h3>'
    f"{html}</div>"
    for i, run in enumerate(runs)
    if (html := section(run))
  )


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:

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
      "Fraction of the schedule": _number(run.last("progress"), ".1%"),
      "Examples seen": _number(run.last("examples_seen"), ",.0f"),
      "Tokens seen": _number(run.last("tokens_seen"), ",.0f"),
      "Devices": f"{devices} x {newest.get('device_kind')}" if devices else "",
      "Wall-clock time": console.duration(sum(accounts.values()))
      if accounts
      else "",
      "Device hours": _number(run.last("device_hours")),
      "Restarts": _number(run.last("restarts") or 0, ",.0f"),
      "Model GFLOPs per step": _number(flops and flops * 1e-9),
      "Memory of the step": _bytes(run),
    }
    if name:
      values = sorted(r[name] for r in run.rows if name in r)
      median = console.number(values[len(values) // 2])
      facts["Median speed"] = f"{median} {name.removesuffix('_per_sec')}/s"
    return facts

  return _columns([of(run) for run in runs])


def _newest(runs: Sequence[Run]) -> dict[str, list[str]]:
  names = [*panels.results(runs), "loss"]
  for panel in panels.panels(runs):
    if panel.title.startswith("Training: "):
      names.append(panel.name)
  return _columns([{n: _number(run.last(n)) for n in names} for run in runs])


def _columns(of_runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
  names = dict.fromkeys(name for facts in of_runs for name in facts)
  lines = {n: [facts.get(n, "") for facts in of_runs] for n in names}
  return {name: values for name, values in lines.items() if any(values)}


def _time(runs: Sequence[Run]) -> str:
  accounts = [run.accounts() for run in runs]
  used = [n for n in ACCOUNT_NAMES if any(n in of_run for of_run in accounts)]
  if not used:
    return "<p>No time accounts in the rows.</p>"
  lines = {
    ACCOUNT_NAMES[name]: [
      f"{console.duration(a[name])} ({a[name] / sum(a.values()):.1%})"
      if name in a
      else ""
      for a in accounts
    ]
    for name in used
  }
  bars = []
  for i, (run, of_run) in enumerate(zip(runs, accounts)):
    parts = ""
    for name, secs in of_run.items():
      share = secs / sum(of_run.values())
      ink = "#fff" if name in ("step", "eval", "lost", "down") else "#000"
      parts += (
        f'<span style="width:{share:.2%};background:{ACCOUNT_COLORS[name]};'
        f'color:{ink}" title="{ACCOUNT_NAMES[name]} {share:.1%}">'
        f"{f'{share:.0%}' if share >= 0.05 else ''}</span>"
      )
    if parts:
      head = markup.dot(i) + markup.text(run.name) if len(runs) > 1 else ""
      bar = f'<div class="bar">{parts}</div>'
      bars.append(f'<div class="of-run-{i}">{head}{bar}</div>')
  legend = "".join(
    f'<span><span class="dot" style="background:{ACCOUNT_COLORS[name]}">'
    f"</span>{ACCOUNT_NAMES[name]}</span>"
    for name in used
  )
  bars.append(f'<div class="legend">{legend}</div>')
  return "".join(bars) + markup.by_run([run.name for run in runs], lines)


def _config(runs: Sequence[Run]) -> str:
  parts = [
    markup.details(f"Config of {run.name}", flatten(run.config)) for run in runs
  ]
  if changed := differences(runs):
    parts.insert(0, markup.by_run([run.name for run in runs], changed))
  elif len(runs) > 1:
    parts.insert(0, "<p>The configs are equal.</p>")
  return "".join(parts)


def _info(runs: Sequence[Run]) -> str:
  parts = []
  for run in runs:
    starts = run.info.get("starts") or []
    for i, start in enumerate(starts):
      count = f" (start {i + 1} of {len(starts)})" if len(starts) > 1 else ""
      parts.append(markup.details(run.name + count, flatten(start)))
  return "".join(parts) or "<p>No run.json.</p>"


def _number(value: float | None, spec: str = "") -> str:
  if value is None:
    return ""
  return format(value, spec) if spec else console.number(value)


def _bytes(run: Run) -> str:
  names = ("argument", "output", "temporary", "alias")
  *sizes, aliased = (run.last(f"update_{name}_bytes") for name in names)
  if None in (*sizes, aliased):
    return ""
  return f"{console.number((sum(sizes) - aliased) / 2**20)} MiB per device"
