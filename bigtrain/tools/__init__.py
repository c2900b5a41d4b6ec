"""Command-line tools: `python -m bigtrain.tools.NAME --help` explains each.

Each tool is one module or package with a `main`. overview and reference are
`python -m bigtrain`; checkpoint_export and checkpoint_import belong to
checkpoint; arguments, exits and ranking to several tools. Tools may import
everything except configs; only `python -m bigtrain` imports them.
"""

import signal
import sys
import threading
from typing import Any


def _on_error(kind: type[BaseException], *error: Any) -> None:
  if kind is not KeyboardInterrupt:
    return sys.__excepthook__(kind, *error)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Another may be on its way.
  print("interrupted", file=sys.stderr)
  sys.exit(130)


def _on_unraisable(error: Any) -> None:
  """Repeats Ctrl-C if it came within a callback, whose errors are ignored."""
  if error.exc_type is not KeyboardInterrupt:
    return sys.__unraisablehook__(error)
  thread = threading.main_thread().ident  # A signal ends its waiting too.
  threading.Timer(0.1, signal.pthread_kill, (thread, signal.SIGINT)).start()


if sys.argv[:1] == ["-m"]:  # A tool starts: Ctrl-C may come while it imports.
  sys.excepthook, sys.unraisablehook = _on_error, _on_unraisable
