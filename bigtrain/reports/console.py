"""Shows a run's progress on a terminal, in a notebook or in a log file.

On a terminal a bar stays on the last line, below the log messages. A notebook
shows a bar and a table of the newest log entries. A log file gets one line for
each log entry, through absl.

Such a line shows the task's own metrics, which are all except those that
FIGURES and PREFIXES list.
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

# Names in the log entries of training steps that are not the task's metrics.
FIGURES = frozenset(
  {
    # Position in the run.
    "step",
    "epoch",
    "examples_seen",
    "progress",
    "tokens_seen",
    # The optimizer, and statistics of gradients and parameters.
    "grad_norm",
    "grad_norm_last",
    "loss_last",
    "lr",
    "param_norm",
    "stats_steps",
    "update_norm",
    # Speed and time.
    "ckpt_stall_secs",
    "ckpt_write_secs",
    "compile_secs",
    "data_wait_fraction",
    "device_hours",
    "eta_secs",
    "examples_per_sec",
    "examples_per_sec_per_device",
    "mfu",
    "model_flops_per_step",
    "restarts",
    "step_secs",
    "tokens_per_sec",
    "tokens_per_sec_per_device",
    # Memory.
    "device_peak_bytes",
    "host_rss_bytes",
    "update_alias_bytes",
    "update_argument_bytes",
    "update_output_bytes",
    "update_peak_bytes",
    "update_temporary_bytes",
  }
)
# Parts before the slash in names such as "lr/encoder" or "grad_rms/kernel". The
# metrics of evaluations and hooks have other prefixes: their own names.
PREFIXES = frozenset(
  {
    "account",
    "activation_max",
    "activation_mean",
    "activation_nonfinite",
    "activation_rms",
    "epoch",
    "examples_seen",
    "grad_norm",
    "grad_rms",
    "lr",
    "update_rms",
    "weight_max",
    "weight_rms",
    "weight_update_divided_by_weight_rms",
  }
)
# How many metrics fit into a line: more would wrap on a usual terminal.
_MAX_TRAINING_METRICS = 5
_MAX_EVALUATION_METRICS = 12
_MAX_NOTEBOOK_ENTRIES = 8
_REFRESHES_PER_SEC = 4


class Console:
  """Shows the progress of process 0; methods are thread-safe and never wait.

  With `bar=None` there is a bar in notebooks, and on terminals that can move
  the cursor.
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
    elif text != "training":  # The log entries show that.
      logging.info("%s", text)

  def evaluation_progress(self, done: int, total: int) -> None:
    if bar := self._shown_bar():
      bar.change(part=(done, total))

  def step(self, step: int) -> None:
    if bar := self._shown_bar():
      bar.change(step=step)

  def entry(self, entry: Mapping[str, Any]) -> None:
    """Shows a log entry of training, or the results of an evaluation."""
    if self._silent:
      return
    bar = self._shown_bar()
    if is_of_training(entry):
      if bar:
        bar.show(entry)
        return
      line = training_line(entry, self._total_steps)
    else:
      line = evaluation_line(entry, self._total_steps)
    if line and bar:
      bar.print(line)
    elif line:
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
  """Contents of the progress bar: phase, step, loss, speed and time left."""

  def __init__(self, total_steps: int):
    self.status = "starting"
    self.step = 0
    # Batches of the evaluation: done, total.
    self.part: tuple[int, int] | None = None
    self._total = total_steps
    self._figures: list[str] = []  # Loss and speed.
    self._eta_secs: float | None = None
    self._eta_time = 0.0  # When the estimate was made.

  def change(self, **fields: Any) -> None:
    for name, value in fields.items():
      setattr(self, name, value)

  def show(self, entry: Mapping[str, Any]) -> None:
    loss = [f"loss {number(entry['loss'])}"] if "loss" in entry else []
    self._figures = loss + _speed(entry)
    self._eta_secs = entry.get("eta_secs")
    self._eta_time = time.monotonic()
    self.step = max(self.step, entry["step"])

  def texts(self) -> list[str]:
    """The parts of the line, the most important first."""
    status = self.status
    if self.part:
      status += f" {self.part[0]}/{self.part[1]}"
    done = self.step / self._total if self._total else 1.0
    texts = [status, f"{self.step}/{self._total} {done:.0%}", *self._figures]
    if self._eta_secs is not None:
      # Counts down between two log entries.
      passed_secs = time.monotonic() - self._eta_time
      texts.append(f"{duration(max(0.0, self._eta_secs - passed_secs))} left")
    return texts


class _Bar(_Progress):
  """The last line of a terminal."""

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

    width = self._console.width - 1
    texts = self.texts()
    text_width = sum(len(t) + 2 for t in texts)  # With the space between them.
    # A narrow terminal leaves out the last ones, in favour of a short bar.
    while len(texts) > 1 and text_width + 12 > width:
      text_width -= len(texts.pop()) + 2
    bar_width = width - text_width
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
  """A bar and a table of the newest log entries, below a notebook's cell."""

  def __init__(self, total_steps: int):
    super().__init__(total_steps)
    self._entries: list[Mapping[str, Any]] = []
    self._draw_time = time.monotonic()
    display = importlib.import_module("IPython.display").display
    self._handle = display(self, display_id=True)

  def change(self, **fields: Any) -> None:
    super().change(**fields)
    passed_secs = time.monotonic() - self._draw_time
    if "status" in fields or passed_secs > 1 / _REFRESHES_PER_SEC:
      self._draw()

  def show(self, entry: Mapping[str, Any]) -> None:
    super().show(entry)
    self._entries = [*self._entries, entry][-_MAX_NOTEBOOK_ENTRIES:]
    self._draw()

  def print(self, line: str) -> None:
    print(line, flush=True)

  def stop(self) -> None:
    self._eta_secs = None
    self.status = "finished" if self.step >= self._total else "ended"
    self._draw()

  def _draw(self) -> None:
    self._draw_time = time.monotonic()
    self._handle.update(self)

  def __repr__(self) -> str:
    lines = [training_line(entry, self._total) for entry in self._entries]
    return "\n".join([*lines, "  ".join(self.texts())])

  def _repr_html_(self) -> str:
    """The HTML that Jupyter and Colab show."""
    table = [self._cells(entry) for entry in self._entries]
    # All columns in the order in which they first occur.
    names = list(dict.fromkeys(name for cells in table for name in cells))
    lines = [names] if names else []
    lines += [[cells.get(name, "") for name in names] for cells in table]
    body = ""
    for line in lines:
      columns = "".join(f"<td>{html.escape(text)}</td>" for text in line)
      body += f"<tr>{columns}</tr>"
    texts = html.escape(" | ".join(self.texts()))
    return (
      f'<progress value="{self.step}" max="{max(self._total, 1)}"></progress> '
      f"{texts}<table>{body}</table>"
    )

  def _cells(self, entry: Mapping[str, Any]) -> dict[str, str]:
    cells = {"step": f"{entry['step']:,}"}
    for name in metric_names(entry):
      cells[name] = number(entry[name])
    if "lr" in entry:
      cells["lr"] = number(entry["lr"])
    return cells


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


def is_of_training(entry: Mapping[str, Any]) -> bool:
  """Whether an entry is of a training step, and not of an evaluation."""
  return "loss" in entry or "examples_seen" in entry


def training_line(entry: Mapping[str, Any], total_steps: int) -> str:
  """Formats training metrics: "step 100/1200 (8.3%) loss 1.234 lr 1e-3"."""
  words = [_position(entry["step"], total_steps)]
  words += [f"{name} {number(entry[name])}" for name in metric_names(entry)]
  if "lr" in entry:
    words.append(f"lr {number(entry['lr'])}")
  words += _speed(entry)
  if "mfu" in entry:
    words.append(f"mfu {entry['mfu']:.1%}")
  if "eta_secs" in entry:
    words.append(f"eta {duration(entry['eta_secs'])}")
  return " ".join(words)


def metric_names(entry: Mapping[str, Any]) -> list[str]:
  """Names of the task's metrics to show, the loss first."""
  names = [
    name
    for name, value in entry.items()
    if name not in FIGURES and "/" not in name and _is_number(value)
  ]
  names.sort(key=lambda name: name != "loss")
  return names[:_MAX_TRAINING_METRICS]


def evaluation_line(entry: Mapping[str, Any], total_steps: int) -> str:
  """Formats the results of evaluations; "" if there are none."""
  results = [
    f"{name} {number(value)}"
    for name, value in entry.items()
    if "/" in name and not name.startswith("account/") and _is_number(value)
  ]
  if not results:
    return ""
  num_more = len(results) - _MAX_EVALUATION_METRICS
  if num_more > 0:
    results = [*results[:_MAX_EVALUATION_METRICS], f"and {num_more} more"]
  return " ".join([_position(entry["step"], total_steps), *results])


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


def _position(step: int, total_steps: int) -> str:
  share = f" ({step / total_steps:.1%})" if total_steps else ""
  return f"step {step}/{total_steps}{share}"


def _speed(entry: Mapping[str, Any]) -> list[str]:
  for unit in ("tokens", "examples"):
    if f"{unit}_per_sec" in entry:
      return [f"{number(entry[f'{unit}_per_sec'])} {unit}/s"]
  return []


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
