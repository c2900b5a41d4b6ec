"""The last lines that a run prints."""

import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import trees

_KEPT = {
  "metrics": "metrics.jsonl",
  "checkpoints": "checkpoints",
  "TensorBoard": "tensorboard",
}


def message(results: Mapping[str, Any], workdir: str | None) -> str:
  if results.keys() == {"step"} and workdir:  # Nothing trained or evaluated.
    path = os.path.join(workdir, "run.json")
    return f"Compiled; {path} has its memory and FLOPs."
  lines = [f"Finished at step {results['step']}."]
  shown = {k: v for k, v in results.items() if "/" in k}
  for name, value in {"loss": results.get("loss"), **shown}.items():
    hidden = name.startswith(("account/", "epoch/")) or name.endswith("/secs")
    if isinstance(value, float) and not hidden:
      lines.append(f"  {name:24} {value:.4g}")
  if workdir is None:
    return "\n".join([*lines, "  No files were kept."])
  for title, name in _KEPT.items():
    if os.path.exists(path := os.path.join(workdir, name)):
      lines.append(f"  {title:13} {path}")
  return "\n".join(lines)


def users_frames(error: Exception, config: Mapping[str, Any]) -> str:
  """The frames of an error in modules that the config names by dotted paths.

  "" if there are none.
  """
  keys = {}
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
