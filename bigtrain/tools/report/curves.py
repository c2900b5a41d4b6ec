"""Draws the curves and the time accounts as PNG, for documents.

matplotlib is optional, so functions import it.
"""

import io
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from bigtrain.config.errors import import_package
from bigtrain.reports import console
from bigtrain.tools.report import panels
from bigtrain.tools.report.charts import FROM_ZERO
from bigtrain.tools.report.panels import ACCOUNT_COLORS, ACCOUNT_NAMES, Run

_STYLE = pathlib.Path(__file__).with_name("curves.mplstyle")
_SIZE = (5.2, 3.3)  # Inches of a panel.
# Points of a curve up to which each gets a marker, and above which the curve is
# smoothed, over a faint one that is not.
_MAX_MARKERS = 30
_MAX_UNSMOOTHED = 100
# Accounts whose colour is dark.
_DARK = ("step", "eval", "lost")


def smooth(values: Sequence[float]) -> list[float]:
  """Moving average over about 2% of a curve."""
  half = len(values) // 100
  result = []
  for i in range(len(values)):
    window = values[max(0, i - half) : i + half + 1]
    result.append(sum(window) / len(window))
  return result


def _draw(ax: Any, panel: panels.Panel) -> None:
  """Draws a panel on a pair of matplotlib's axes."""
  for s in panel.series:
    style: dict[str, Any] = dict(color=s.color, linestyle=s.line)
    if len(s.values) <= _MAX_MARKERS:
      style |= dict(marker="o", markersize=4)
    values = s.values
    if len(values) > _MAX_UNSMOOTHED:
      ax.plot(s.steps, values, color=s.color, alpha=0.25, linewidth=0.8)
      values = smooth(values)
    ax.plot(s.steps, values, label=s.label, **style)
  ax.set_title(panel.title)
  ax.set_xlabel("step")
  ax.set_ylabel(panel.unit)
  ax.xaxis.set_major_formatter(_thousands)
  finite = [v for s in panel.series for v in s.values if math.isfinite(v)]
  top = max(map(abs, finite), default=1.0)
  if panel.unit in FROM_ZERO:
    ax.set_ylim(0, 1.05 * top or 1.0)
  ax.locator_params(axis="y", nbins=6)
  if top >= 10000:
    ax.yaxis.set_major_formatter(_thousands)
  elif top < 0.01:
    ax.yaxis.set_major_formatter(lambda value, _: console.number(value))
  if any(s.label for s in panel.series):
    ax.legend(handlelength=2.2)


def _thousands(value: float, _: int = 0) -> str:
  """An axis label: 2500 as "2,500", 20000 as "20k", 3e6 as "3M"."""
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= 10 * size or (abs(value) >= size and size > 1e3):
      return f"{value / size:g}{letter}"
  return f"{value:,g}"


def _draw_time(ax: Any, runs: Sequence[Run]) -> None:
  """Draws a bar for each run, whose parts are shares of its time."""
  # From the bottom up, as matplotlib counts.
  shown = [run for run in reversed(runs) if run.accounts()]
  accounts = [run.accounts() for run in shown]
  used = [name for name in ACCOUNT_NAMES if any(name in a for a in accounts)]
  left = [0.0] * len(shown)
  for name in used:
    shares = [100 * a.get(name, 0) / sum(a.values()) for a in accounts]
    ax.barh(
      range(len(shown)),
      shares,
      left=left,
      height=0.6,
      color=ACCOUNT_COLORS[name],
      edgecolor="white",
      label=ACCOUNT_NAMES[name],
    )
    for i, share in enumerate(shares):
      if share >= 6:  # Otherwise the text is wider than the part.
        ax.text(
          left[i] + share / 2,
          i,
          f"{share:.0f}%",
          ha="center",
          va="center",
          fontsize=9,
          color="white" if name in _DARK else "black",
        )
    left = [a + b for a, b in zip(left, shares)]
  ax.set_yticks(range(len(shown)), [run.name for run in shown])
  if len(shown) == 1:
    ax.set_yticks([])
  ax.set_ylim(-0.6, len(shown) - 0.4)
  ax.set_xlim(0, 100)
  ax.set_xlabel("% of wall-clock time")
  ax.grid(visible=False)
  ax.spines["left"].set_visible(False)
  ax.set_title("Wall-clock time")
  ax.legend(
    ncols=4,
    loc="upper left",
    bbox_to_anchor=(0, -0.28 * 2.2 / (1.2 + 0.45 * len(shown))),
    handlelength=1.0,
    handleheight=1.0,
  )


def pngs(runs: Sequence[Run]) -> dict[str, bytes]:
  """Returns {name: PNG} of the panels, "time", and the overview "curves"."""
  matplotlib = import_package(
    "matplotlib", "tools.report", "'bigtrain[report]'"
  )
  images = {}
  with matplotlib.rc_context(fname=_STYLE):
    for name, figure in [*_figures(runs), ("curves", _overview(runs))]:
      content = io.BytesIO()
      figure.savefig(content, format="png", dpi=110, bbox_inches="tight")
      images[name] = content.getvalue()
  return images


def _figures(runs: Sequence[Run]) -> list[tuple[str, Any]]:
  from matplotlib.figure import Figure

  figures = []
  for panel in panels.panels(runs):
    figure = Figure(figsize=_SIZE, layout="constrained")
    _draw(figure.subplots(), panel)
    figures.append((panel.name, figure))
  num_timed = sum(bool(run.accounts()) for run in runs)
  if num_timed:
    figure = Figure(figsize=(2 * _SIZE[0], 1.2 + 0.45 * num_timed))
    _draw_time(figure.subplots(), runs)
    figures.append(("time", figure))
  return figures


def _overview(runs: Sequence[Run]) -> Any:
  """Draws up to six panels in two rows, for a README."""
  from matplotlib.figure import Figure

  shown = panels.panels(runs)
  # Speed and learning rate come last, and always have a place.
  last = [p for p in shown if p.title in ("Throughput", "Learning rate")]
  shown = [p for p in shown if p not in last][: 6 - len(last)] + last
  columns = min(3, len(shown)) or 1
  rows = math.ceil(len(shown) / columns) or 1
  size = (_SIZE[0] * columns, _SIZE[1] * rows)
  figure = Figure(figsize=size, layout="constrained")
  axes = list(figure.subplots(rows, columns, squeeze=False).flat)
  for ax, panel in zip(axes, shown):
    _draw(ax, panel)
  for ax in axes[len(shown) :]:
    ax.set_axis_off()
  return figure
