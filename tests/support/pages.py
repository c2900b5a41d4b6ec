"""The code blocks of documentation pages, and their commands in real processes.

A page's block without a language is typed into a shell, `python` blocks run in
a process of their own, and `text` blocks are output.
"""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from support import compile_cache, processes


class Block(NamedTuple):
  """A code block: its language ("" for a shell) and its text."""

  language: str
  text: str


def blocks(page, language=None):
  """The blocks of a page such as "docs/predict.md", in order."""
  text = (processes.ROOT / page).read_text()
  found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
  return [Block(*f) for f in found if language in (None, f[0])]


def type_shell(text, folder, flags="", devices=1):
  """Types a block into a shell; returns a CompletedProcess with text.

  Args:
    text: the block.
    folder: working folder; gets a link to configs/.
    flags: more flags of its command, such as a smaller size.
    devices: number of simulated devices.
  """
  text = f"{text.rstrip()} {flags}"
  return _run(["bash", "-c", text], folder, devices)


def run_python(text, folder, devices=1):
  """Runs a block as a program; returns a CompletedProcess with text."""
  return _run([sys.executable, "-c", text], folder, devices)


def _run(command, folder, devices):
  configs = pathlib.Path(folder) / "configs"
  if not configs.exists():
    configs.symlink_to(processes.ROOT / "configs")
  python = os.path.dirname(sys.executable)
  env = processes.environment(
    devices,
    PATH=os.pathsep.join((python, os.environ["PATH"])),
    XDG_CACHE_HOME=str(compile_cache.FOLDER),
  )
  return subprocess.run(
    command,
    cwd=folder,
    env=env,
    capture_output=True,
    text=True,
    timeout=processes.LIMIT_SECS,
    check=False,
  )


def ran(ended):
  """Returns the standard output of a command that succeeded."""
  assert ended.returncode == 0, f"{ended.args}\n{ended.stderr}"
  return ended.stdout
