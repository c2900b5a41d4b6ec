"""The last lines that a run prints."""

import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import trees

# What the last lines point to, if the workdir has it.
_FILES = {
  "metrics": "metrics.jsonl",
  "checkpoints": "checkpoints",
  "TensorBoard": "tensorboard",
}


def message(results: Mapping[str, Any], workdir: str | None) -> str:
  if results.keys() == {"step"} and workdir:  # Nothing trained or evaluated.
    path = os.path.join(workdir, "run.json")
    return f"Compiled; {path} has its memory and FLOPs."
  lines = [f"Finished at step {results['step']}."]
  # The loss, and the results of evaluations.
  shown = {"loss": results.get("loss")}
  shown |= {name: value for name, value in results.items() if "/" in name}
  for name, value in shown.items():
    hidden = name.startswith(("account/", "epoch/")) or name.endswith("/secs")
    if isinstance(value, float) and not hidden:
      lines.append(f"  {name:24} {value:.4g}")
  if workdir is None:
    return "\n".join([*lines, "  No files were kept."])
  for title, name in _FILES.items():
    path = os.path.join(workdir, name)
    if os.path.exists(path):
      lines.append(f"  {title:13} {path}")
  return "\n".join(lines)


def users_frames(error: Exception, config: Mapping[str, Any]) -> str:
  """The part of an error's traceback that is in the user's own modules.

  These are the modules that the config names by dotted paths. Returns "" if the
  error has no frame in them.
  """
  keys = {}  # {file of a module: the config key that names it}.
  for name, value in trees.flatten_with_names(dict(config)):
    module = sys.modules.get(value) if isinstance(value, str) else None
    if module and not value.startswith("bigtrain."):
      keys[getattr(module, "__file__", None)] = name.replace("/", ".")
  frames = traceback.extract_tb(error.__traceback__)
  own = [frame for frame in frames if frame.filename in keys]
  if not own:
    return ""
  names = sorted({f"config.{keys[frame.filename]}" for frame in own})
  listed = "".join(traceback.format_list(own))
  return f"Error in your own code ({', '.join(names)}):\n{listed}\n"
