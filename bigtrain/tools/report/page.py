"""Builds the HTML page of a report, which needs no other file or network."""

import json
from collections.abc import Mapping, Sequence

from bigtrain.config import modules
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

# Sections about what evaluators have written: {heading: function from a run to
# HTML, which is "" if there is nothing}.
_SECTIONS = {
  "Predictions": predictions.section,
  "Captions and texts": texts.section,
  "Images, tables and histograms": logged_media.section,
}


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
  """Returns {key: value in each run, or ""} of config keys that differ."""
  configs = [markup.flat(run.config) for run in runs]
  keys = dict.fromkeys(key for config in configs for key in config)
  result = {}
  for key in keys:
    values = [config.get(key, "") for config in configs]
    if len(set(values)) > 1:
      result[key] = values
  return result


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
    sections=_sections(runs),
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


def _sections(runs: Sequence[Run]) -> dict[str, dict[int, str]]:
  """{heading: {index of a run: HTML}}."""
  result: dict[str, dict[int, str]] = {}
  for heading, section in _SECTIONS.items():
    result[heading] = {}
    for i, run in enumerate(runs):
      if html := section(run):
        result[heading][i] = html
  return result


def _time(runs: Sequence[Run]) -> dict[str, list[str]]:
  """{account: its time and share in each run} of the accounts in use."""
  result = {}
  for name in ACCOUNT_NAMES:
    cells = []
    for run in runs:
      accounts = run.accounts()
      if name in accounts:
        share = accounts[name] / sum(accounts.values())
        cells.append(f"{console.duration(accounts[name])} ({share:.1%})")
      else:
        cells.append("")
    if any(cells):
      result[name] = cells
  return result


def _facts(run: Run) -> dict[str, str]:
  """{name: text}, "" where a run does not have the fact."""
  newest = run.starts[-1] if run.starts else {}
  spent = sum(run.accounts().values())
  devices = newest.get("devices")
  flops = run.last("model_flops_per_step")
  facts = {
    "Task": modules.task_names(run.config.get("task", "")),
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
  for unit in ("tokens", "examples"):
    name = f"{unit}_per_sec"
    if run.last(name):
      values = sorted(entry[name] for entry in run.entries if name in entry)
      median = console.number(values[len(values) // 2])
      facts["Median speed"] = f"{median} {unit}/s"
      break
  return facts


def _newest(runs: Sequence[Run]) -> dict[str, list[str]]:
  """{metric: its newest value in each run}."""
  names = [*panels.results(runs), "loss"]
  for panel in panels.panels(runs):
    if panel.title.startswith("Training: "):
      names.append(panel.name)
  return _columns(
    [{n: markup.number(run.last(n)) for n in names} for run in runs]
  )


def _columns(of_runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
  """{name: text of each run}, without names that have no text."""
  names = dict.fromkeys(name for facts in of_runs for name in facts)
  lines = {n: [facts.get(n, "") for facts in of_runs] for n in names}
  return {name: values for name, values in lines.items() if any(values)}


def _bytes(run: Run) -> str:
  """Memory of the update, in which outputs reuse aliased arguments."""
  names = ("argument", "output", "temporary", "alias")
  sizes = {name: run.last(f"update_{name}_bytes") for name in names}
  if None in sizes.values():
    return ""
  total = sizes["argument"] + sizes["output"] + sizes["temporary"]
  total -= sizes["alias"]
  return f"{console.number(total / 2**20)} MiB per device"
