"""Command-line tools: `python -m bigtrain.tools.NAME --help` explains each.

Each tool is a module or a package with a `main`. The other modules:

  overview, reference                   the program `python -m bigtrain`
  checkpoint_export, checkpoint_import  commands of the tool checkpoint
  arguments, exits, ranking             shared by several tools

Tools may import everything except configs, and nothing imports a tool but
`python -m bigtrain`.
"""

import signal
import sys
import threading
from typing import Any


def _on_error(kind: type[BaseException], *error: Any) -> None:
  """Ends the tool with one line, and no traceback, if it was interrupted."""
  if kind is not KeyboardInterrupt:
    sys.__excepthook__(kind, *error)
    return
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Another may be on its way.
  print("interrupted", file=sys.stderr)
  sys.exit(130)  # As a command that a shell runs.


def _on_unraisable(error: Any) -> None:
  """Repeats Ctrl-C if it came within a callback, whose errors are ignored."""
  if error.exc_type is not KeyboardInterrupt:
    sys.__unraisablehook__(error)
    return
  # A signal to the main thread also ends what it waits for.
  thread = threading.main_thread().ident
  threading.Timer(0.1, signal.pthread_kill, (thread, signal.SIGINT)).start()


# Python sets this while it imports the program of `python -m`. Ctrl-C may come
# then, before exits.in_one_line handles it.
if sys.argv[:1] == ["-m"]:
  sys.excepthook = _on_error
  sys.unraisablehook = _on_unraisable
