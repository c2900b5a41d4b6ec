"""Builds the HTML page of a report, which needs no other file or network."""

import json
from collections.abc import Mapping, Sequence

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
_OF_RUNS = {
  "Predictions": predictions.section,
  "Captions and texts": texts.section,
  "Images, tables and histograms": logged_media.section,
}


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
  """Returns {key: value in each run, or ""} of config keys that differ."""
  flat = [markup.flat(run.config) for run in runs]
  keys = dict.fromkeys(key for config in flat for key in config)
  values = {key: [config.get(key, "") for config in flat] for key in keys}
  return {key: v for key, v in values.items() if len(set(v)) > 1}


def render(
  runs: Sequence[Run], metric: str, mode: str, bests: Sequence[Best | None]
) -> str:
  names = [run.name for run in runs]
  shown = panels.panels(runs)
  time = _time(runs)
  return markup.render(
    "page.jinja",
    title=", ".join(names) if len(runs) < 4 else f"{len(runs)} runs",
    runs=runs,
    metric=metric,
    which="largest" if mode == "max" else "smallest",
    bests=bests,
    changed=differences(runs),
    panels=shown,
    dashes=charts.DASHES,
    sections={
      heading: {i: html for i, run in enumerate(runs) if (html := of(run))}
      for heading, of in _OF_RUNS.items()
    },
    newest=_newest(runs),
    facts=_columns([_facts(run) for run in runs]),
    time=time,
    time_lines={ACCOUNT_NAMES[n]: texts for n, texts in time.items()},
    account_names=ACCOUNT_NAMES,
    account_colors=ACCOUNT_COLORS,
    style=markup.read("page.css"),
    data=json.dumps(charts.content(shown)).replace("<", "\\u003c"),
    script=markup.read("page.js"),
  )


def _time(runs: Sequence[Run]) -> dict[str, list[str]]:
  """{account: its time and share in each run} of those that are used."""
  texts: dict[str, list[str]] = {}
  for name in ACCOUNT_NAMES:
    for run in runs:
      accounts = run.accounts()
      share = accounts.get(name, 0.0) / (sum(accounts.values()) or 1.0)
      spent = console.duration(accounts.get(name, 0.0))
      text = f"{spent} ({share:.1%})" if name in accounts else ""
      texts.setdefault(name, []).append(text)
  return {name: of_runs for name, of_runs in texts.items() if any(of_runs)}


def _facts(run: Run) -> dict[str, str]:
  newest = run.starts[-1] if run.starts else {}
  spent = sum(run.accounts().values())
  devices = newest.get("devices")
  flops = run.last("model_flops_per_step")
  speed = [f"{w}_per_sec" for w in ("tokens", "examples")]
  name = next((s for s in speed if run.last(s)), None)
  facts = {
    "Task": run.config.get("task", ""),
    "Model": run.config.get("model_name", ""),
    "Steps": f"{run.last('step'):,}",
    "Fraction of the schedule": markup.number(run.last("progress"), ".1%"),
    "Examples seen": markup.number(run.last("examples_seen"), ",.0f"),
    "Tokens seen": markup.number(run.last("tokens_seen"), ",.0f"),
    "Devices": f"{devices} x {newest.get('device_kind')}" if devices else "",
    "Wall-clock time": console.duration(spent) if spent else "",
    "Device hours": markup.number(run.last("device_hours")),
    "Restarts": markup.number(run.last("restarts") or 0, ",.0f"),
    "Model GFLOPs per step": markup.number(flops and flops * 1e-9),
    "Memory of the step": _bytes(run),
  }
  if name:
    values = sorted(r[name] for r in run.rows if name in r)
    median = console.number(values[len(values) // 2])
    facts["Median speed"] = f"{median} {name.removesuffix('_per_sec')}/s"
  return facts


def _newest(runs: Sequence[Run]) -> dict[str, list[str]]:
  names = [*panels.results(runs), "loss"]
  for panel in panels.panels(runs):
    if panel.title.startswith("Training: "):
      names.append(panel.name)
  return _columns(
    [{n: markup.number(run.last(n)) for n in names} for run in runs]
  )


def _columns(of_runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
  names = dict.fromkeys(name for facts in of_runs for name in facts)
  lines = {n: [facts.get(n, "") for facts in of_runs] for n in names}
  return {name: values for name, values in lines.items() if any(values)}


def _bytes(run: Run) -> str:
  names = ("argument", "output", "temporary", "alias")
  *sizes, aliased = (run.last(f"update_{name}_bytes") for name in names)
  if None in (*sizes, aliased):
    return ""
  return f"{console.number((sum(sizes) - aliased) / 2**20)} MiB per device"
