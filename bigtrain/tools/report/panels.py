"""Chooses the curves of one or several runs, as plain data.

Colours distinguish runs, and line styles distinguish metrics within a panel, so
a run looks the same in all panels. With a single run, colours distinguish its
metrics.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from bigtrain.reports.chrono import ACCOUNTS
from bigtrain.reports.console import FIGURES, PREFIXES

# Okabe and Ito's colours, which people with any kind of colour vision can tell
# apart (https://jfly.uni-koeln.de/color/), without yellow, which is faint on
# white.
COLORS = (
  "#0072B2",  # Blue.
  "#D55E00",  # Vermilion.
  "#009E73",  # Green.
  "#CC79A7",  # Purple.
  "#E69F00",  # Orange.
  "#56B4E9",  # Sky blue.
  "#8C8C8C",  # Grey.
)
_LINES = ("-", "--", ":", "-.")

# Prefixes of metrics of a model's experts.
_EXPERTS = ("experts", "expert_load")
_PERCENT = 100.0
_GIB = 1 / 2**30
# {metric: (title, axis label with unit, factor from the metric to that unit)}.
# Panels have this order.
_KNOWN = {
  "loss": ("Training loss", "loss", 1.0),
  "lr": ("Learning rate", "learning rate", 1.0),
  "grad_norm": ("Gradient norm", "L2 norm", 1.0),
  "examples_per_sec": ("Throughput", "examples / s", 1.0),
  "tokens_per_sec": ("Throughput", "tokens / s", 1.0),
  "mfu": ("Model FLOPs utilisation", "% of peak", _PERCENT),
  "experts_peak": ("Load of the busiest expert", "load / mean load", 1.0),
  "experts_lost": ("Not served by experts", "% of choices", _PERCENT),
  "data_wait_fraction": ("Waiting for data", "% of time", _PERCENT),
  "device_peak_bytes": ("Peak device memory", "GiB", _GIB),
  "host_rss_bytes": ("Host memory", "GiB", _GIB),
}

# Curves of single layers that still can be told apart.
_MAX_LAYERS = 12

# Names and colours of the time accounts.
ACCOUNT_NAMES = {
  "step": "steps",
  "data_wait": "waiting for data",
  "eval": "evaluation",
  "save": "saving",
  "compile": "compiling",
  "start": "start-up",
  "lost": "lost to restarts",
  "down": "between restarts",
}
ACCOUNT_COLORS = {
  "step": "#0072B2",
  "data_wait": "#E69F00",
  "eval": "#009E73",
  "save": "#CC79A7",
  "compile": "#56B4E9",
  "start": "#BBBBBB",
  "lost": "#D55E00",
  "down": "#777777",
}
assert {*ACCOUNT_NAMES} == {*ACCOUNT_COLORS} == {*ACCOUNTS}


class Run(NamedTuple):
  """A run, as read from its workdir."""

  name: str
  config: dict[str, Any]
  info: dict[str, Any]  # The content of run.json.
  entries: list[dict[str, Any]]  # Of its log.
  workdir: str = ""

  @property
  def starts(self) -> list[dict[str, Any]]:
    return self.info.get("starts") or []

  def last(self, name: str) -> Any:
    """The newest value of a metric, or None."""
    for entry in reversed(self.entries):
      if name in entry:
        return entry[name]
    return None

  def accounts(self) -> dict[str, float]:
    """{account: seconds}, without accounts of no time."""
    accounts = {name: self.last(f"account/{name}_secs") for name in ACCOUNTS}
    return {name: secs for name, secs in accounts.items() if secs}


class Series(NamedTuple):
  """One curve of a panel."""

  label: str
  color: str
  line: str  # matplotlib's line style.
  steps: list[int]
  values: list[float]  # In the unit of the panel.
  run: int  # Index of the run.


class Panel(NamedTuple):
  """One pair of axes; `unit` labels its y axis."""

  name: str
  title: str
  unit: str
  series: list[Series]


def results(runs: Sequence[Run]) -> list[str]:
  """The metrics of evaluations, such as "val/acc"."""
  evals = {name for run in runs for name in run.config.get("evals") or {}}
  result = []
  for name in _names(runs):
    prefix, slash, _ = name.partition("/")
    if not slash or prefix in (*PREFIXES, *_EXPERTS):
      continue
    if not evals or prefix in evals:
      result.append(name)
  return result


def panels(runs: Sequence[Run]) -> list[Panel]:
  """All panels: the loss, evaluations, metrics of the task, and the others."""
  names = _names(runs)
  plain = {n for n in names if "/" not in n} - (FIGURES - set(_KNOWN))
  if "tokens_per_sec" in plain:
    plain -= {"examples_per_sec"}
  all_panels = []
  if "loss" in plain:
    all_panels.append(_panel(runs, "loss", ["loss"]))
  by_metric: dict[str, list[str]] = {}
  for name in results(runs):  # A panel for each metric, with all evaluations.
    if not name.endswith(("/secs", "/num_examples")):
      by_metric.setdefault(name.split("/", 1)[1], []).append(name)
  for metric, members in by_metric.items():
    title = f"Evaluation: {members[0] if len(members) == 1 else metric}"
    all_panels.append(_panel(runs, f"eval_{metric}", members, title, metric))
  # Metrics of the task, then _KNOWN in its order.
  for name in filter(plain.__contains__, names):
    if name not in _KNOWN:
      title = f"Training: {name}"
      all_panels.append(_panel(runs, name, [name], title, name))
  for name in _KNOWN:
    members = [name] if name in plain else []
    if name == "lr":  # One per group of parameters.
      members += [n for n in names if n.startswith("lr/")]
    elif name == "experts_peak":
      members = _peaks(runs, names)
    elif name == "experts_lost":
      lost = ("experts/dropped", "experts/left_behind")
      members = [n for n in names if n in lost and _ever(runs, n)]
    if name != "loss":
      all_panels.append(_panel(runs, name, members))
  return [panel for panel in all_panels if panel.series]


def _peaks(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
  """Loads of busiest experts: by layer, or of all layers if these are many."""
  layers = [n for n in names if re.fullmatch(r"experts/peak_(\w+_)?\d+", n)]
  if len(runs) == 1 and len(layers) <= _MAX_LAYERS:
    return layers
  return [name for name in names if name == "experts/peak_max"]


def _ever(runs: Sequence[Run], name: str) -> bool:
  """Whether a metric is ever other than zero."""
  return any(entry.get(name) for run in runs for entry in run.entries)


def _names(runs: Sequence[Run]) -> list[str]:
  """Names of all metrics that are numbers, in the order of the log."""
  names: dict[str, None] = {}
  for run in runs:
    for entry in run.entries:
      for name, value in entry.items():
        if isinstance(value, int | float):
          names[name] = None
  return list(names)


def _panel(
  runs: Sequence[Run],
  name: str,
  members: Sequence[str],
  title: str = "",
  unit: str = "",
) -> Panel:
  """The panel of some metrics; _KNOWN has titles and units of common ones."""
  known_title, known_unit, factor = _KNOWN.get(name, ("", "", 1.0))
  several_runs = len(runs) > 1
  series = []
  for i, run in enumerate(runs):
    for j, member in enumerate(members):
      points = [
        (entry["step"], entry[member])
        for entry in run.entries
        if member in entry
      ]
      if not points:
        continue
      words = []
      if several_runs:
        words.append(run.name)
      if len(members) > 1:
        words.append(member)
      if several_runs:
        hue, line = i, j
      else:
        hue, line = j, j // len(COLORS)
      series.append(
        Series(
          label=" ".join(words),
          color=COLORS[hue % len(COLORS)],
          line=_LINES[line % len(_LINES)],
          steps=[step for step, _ in points],
          values=[value * factor for _, value in points],
          run=i,
        )
      )
  name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
  return Panel(name, title or known_title, unit or known_unit, series)
