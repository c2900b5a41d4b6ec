"""Shows progress: a bar on a terminal and in a notebook, else plain lines.

The bar stays on the last line, below messages. A log file gets one line per
row, through absl.
"""

import atexit
import html
import importlib
import logging as python_logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from bigtrain.config import settings

_NAMES = settings.read_table(__file__, "names.toml")
# Names in a training row that are not the task's metrics.
FIGURES = frozenset(_NAMES["figures"].split())
# First parts of names of training that have several.
PREFIXES = frozenset(_NAMES["prefixes"].split())
_MAX_METRICS = 5  # Shown of a training row.
_MAX_RESULTS = 12  # Shown of an evaluation row.
_MAX_ROWS = 8  # Shown in a notebook.
_REFRESHES_PER_SEC = 4


class Console:
  """Shows progress of process 0; methods are thread-safe and never wait.

  A `bar` of None shows one in a notebook, and if standard error is a terminal
  that can move its cursor.
  """

  def __init__(
    self, total_steps: int, *, process_index: int = 0, bar: bool | None = None
  ):
    self._total_steps = total_steps
    self._silent = process_index != 0
    if bar is None:
      terminal = os.environ.get("TERM", "dumb") != "dumb"
      bar = (sys.stderr.isatty() and terminal) or in_notebook()
    self._wants_bar = bar
    self._bar: _Bar | _Table | None = None
    self._lock = threading.Lock()
    self._closed = False
    self._status = ""

  def status(self, text: str) -> None:
    if self._silent or text == self._status:
      return
    self._status = text
    if bar := self._shown_bar():
      bar.change(status=text, part=None)
    elif text != "training":  # The rows show that.
      logging.info("%s", text)

  def evaluation_progress(self, done: int, total: int) -> None:
    if bar := self._shown_bar():
      bar.change(part=(done, total))

  def step(self, step: int) -> None:
    if bar := self._shown_bar():
      bar.change(step=step)

  def row(self, row: Mapping[str, Any]) -> None:
    if self._silent:
      return
    bar, is_training = self._shown_bar(), is_training_row(row)
    line_of = training_line if is_training else evaluation_line
    if bar and is_training:
      bar.take(row)
    elif line := line_of(row, self._total_steps):
      if bar:
        bar.print(line)
      else:
        logging.info("%s", line)

  def close(self) -> None:
    with self._lock:
      self._closed = True
      if self._bar:
        self._bar.stop()
        self._bar = None

  def _shown_bar(self) -> "_Bar | _Table | None":
    if not self._wants_bar or self._silent:
      return None
    with self._lock:
      if self._bar is None and not self._closed:
        try:
          kind = _Table if in_notebook() else _Bar
          self._bar = kind(self._total_steps)
        except Exception as e:  # A terminal that rich does not support.
          self._wants_bar = False
          logging.error("No progress bar: %s: %s", type(e).__name__, e)
      return self._bar


class _Progress:
  def __init__(self, total_steps: int):
    self.status = "starting"
    self.step = 0
    self.part: tuple[int, int] | None = None  # Batches: done, total.
    self._total = total_steps
    self._figures: list[str] = []
    self._eta_secs: float | None = None
    self._row_time = 0.0

  def change(self, **fields: Any) -> None:
    for name, value in fields.items():
      setattr(self, name, value)

  def take(self, row: Mapping[str, Any]) -> None:
    figures = [f"loss {number(row['loss'])}"] if "loss" in row else []
    self._figures = figures + _speed(row)
    self._eta_secs = row.get("eta_secs")
    self._row_time = time.monotonic()
    self.step = max(self.step, row["step"])

  def texts(self) -> list[str]:
    """What to show, the most important first."""
    status = self.status
    if self.part:
      status += f" {self.part[0]}/{self.part[1]}"
    done = self.step / self._total if self._total else 1.0
    texts = [status, f"{self.step}/{self._total} {done:.0%}", *self._figures]
    if self._eta_secs is not None:
      passed = time.monotonic() - self._row_time
      texts.append(f"{duration(max(0.0, self._eta_secs - passed))} left")
    return texts


class _Bar(_Progress):
  def __init__(self, total_steps: int):
    import rich.console
    import rich.live

    super().__init__(total_steps)
    self._console = rich.console.Console(file=sys.stderr, force_terminal=True)
    self._live = rich.live.Live(
      console=self._console,
      get_renderable=self._draw,
      refresh_per_second=_REFRESHES_PER_SEC,
      # Output to a file or a pipe must not go to the terminal.
      redirect_stdout=sys.stdout.isatty(),
    )
    self._live.start()
    # rich hides the cursor; a killed process could not show it again.
    self._console.show_cursor(True)
    atexit.register(self.stop)
    # Handlers keep the stream they were created with, not rich's sys.stderr.
    self._streams = [
      (handler, handler.setStream(sys.stderr))
      for handler in _terminal_handlers()
    ]

  def stop(self) -> None:
    atexit.unregister(self.stop)
    for handler, stream in self._streams:
      handler.setStream(stream)
    self._live.stop()

  def print(self, line: str) -> None:
    self._console.print(line, markup=False, highlight=False)

  def _draw(self) -> Any:
    import rich.progress_bar
    import rich.table
    import rich.text

    texts = self.texts()  # Narrow terminals drop the last ones.
    width = self._console.width - 1
    while len(texts) > 1 and sum(len(t) + 2 for t in texts) + 12 > width:
      texts.pop()
    bar_width = width - sum(len(t) + 2 for t in texts)
    grid = rich.table.Table.grid(padding=(0, 2))
    cells: list[Any] = [rich.text.Text(t, no_wrap=True) for t in texts]
    cells[0].stylize("bold cyan")
    if bar_width >= 10:
      total, shown_width = max(self._total, 1), min(40, bar_width)
      bar = rich.progress_bar.ProgressBar(total, self.step, width=shown_width)
      cells.insert(1, bar)
    grid.add_row(*cells)
    return grid


class _Table(_Progress):
  """A progress bar and the newest rows, in the output of a notebook's cell."""

  def __init__(self, total_steps: int):
    super().__init__(total_steps)
    self._rows: list[Mapping[str, Any]] = []
    self._drawn = time.monotonic()
    display = importlib.import_module("IPython.display").display
    self._handle = display(self, display_id=True)

  def change(self, **fields: Any) -> None:
    super().change(**fields)
    passed = time.monotonic() - self._drawn
    if "status" in fields or passed > 1 / _REFRESHES_PER_SEC:
      self._draw()

  def take(self, row: Mapping[str, Any]) -> None:
    super().take(row)
    self._rows = [*self._rows, row][-_MAX_ROWS:]
    self._draw()

  def print(self, line: str) -> None:
    print(line, flush=True)

  def stop(self) -> None:
    self._eta_secs = None
    self.status = "finished" if self.step >= self._total else "ended"
    self._draw()

  def _draw(self) -> None:
    self._drawn = time.monotonic()
    self._handle.update(self)

  def __repr__(self) -> str:
    lines = [training_line(row, self._total) for row in self._rows]
    return "\n".join([*lines, "  ".join(self.texts())])

  def _repr_html_(self) -> str:
    rows = [
      {"step": f"{row['step']:,}"}
      | {name: number(row[name]) for name in metric_names(row)}
      | ({"lr": number(row["lr"])} if "lr" in row else {})
      for row in self._rows
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    body = "".join(
      f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>"
      for line in lines
      if line
    )
    texts = html.escape(" | ".join(self.texts()))
    return (
      f'<progress value="{self.step}" max="{max(self._total, 1)}"></progress> '
      f"{texts}<table>{body}</table>"
    )


def in_notebook() -> bool:
  ipython = sys.modules.get("IPython")
  shell = ipython.get_ipython() if ipython else None
  return hasattr(shell, "kernel")


def _terminal_handlers() -> list[Any]:
  handlers = {
    *python_logging.root.handlers,
    *logging.get_absl_logger().handlers,
    # absl's own handler delegates to this one, which holds the stream.
    logging.get_absl_handler().python_handler,
  } - {logging.get_absl_handler()}
  streams = (sys.__stderr__, sys.__stdout__)
  return [h for h in handlers if getattr(h, "stream", None) in streams]


def is_training_row(row: Mapping[str, Any]) -> bool:
  return "loss" in row or "examples_seen" in row


def training_line(row: Mapping[str, Any], total_steps: int) -> str:
  """Formats a row of training: "step 100/1200 (8.3%) loss 1.234 lr 1e-3"."""
  words = [_at(row["step"], total_steps)]
  words += [f"{name} {number(row[name])}" for name in metric_names(row)]
  if "lr" in row:
    words.append(f"lr {number(row['lr'])}")
  words += _speed(row)
  if "mfu" in row:
    words.append(f"mfu {row['mfu']:.1%}")
  if "eta_secs" in row:
    words.append(f"eta {duration(row['eta_secs'])}")
  return " ".join(words)


def metric_names(row: Mapping[str, Any]) -> list[str]:
  names = [
    name
    for name, value in row.items()
    if name not in FIGURES and "/" not in name and _is_number(value)
  ]
  return sorted(names, key=lambda name: name != "loss")[:_MAX_METRICS]


def evaluation_line(row: Mapping[str, Any], total_steps: int) -> str:
  results = [
    f"{name} {number(value)}"
    for name, value in row.items()
    if "/" in name and not name.startswith("account/") and _is_number(value)
  ]
  if len(results) > _MAX_RESULTS:
    results[_MAX_RESULTS:] = [f"and {len(results) - _MAX_RESULTS} more"]
  return " ".join([_at(row["step"], total_steps), *results]) if results else ""


def number(value: float) -> str:
  """Formats a number with four significant digits, as short as possible."""
  if isinstance(value, int) or not math.isfinite(value):
    return f"{value:,}"
  if abs(value) >= 1000:
    return f"{value:,.0f}"
  if abs(value) >= 0.01 or not value:
    return f"{value:.4g}"
  mantissa, exponent = f"{value:.3e}".split("e")
  return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(secs: float) -> str:
  """Formats seconds: "7s", "1m20s", "1h02m" or "1d03h"."""
  secs = round(secs)
  if secs < 60:
    return f"{secs}s"
  if secs < 3600:
    return f"{secs // 60}m{secs % 60:02}s"
  if secs < 86400:
    return f"{secs // 3600}h{secs // 60 % 60:02}m"
  return f"{secs // 86400}d{secs // 3600 % 24:02}h"


def _at(step: int, total_steps: int) -> str:
  share = f" ({step / total_steps:.1%})" if total_steps else ""
  return f"step {step}/{total_steps}{share}"


def _speed(row: Mapping[str, Any]) -> list[str]:
  for unit in ("tokens", "examples"):
    if f"{unit}_per_sec" in row:
      return [f"{number(row[f'{unit}_per_sec'])} {unit}/s"]
  return []


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
