"""The last lines that a run prints."""

import os
from collections.abc import Mapping
from typing import Any


def message(results: Mapping[str, Any], workdir: str | None) -> str:
  """`workdir` is None if no files were kept."""
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
  lines += [
    f"  metrics       {os.path.join(workdir, 'metrics.jsonl')}",
    f"  checkpoints   {os.path.join(workdir, 'checkpoints')}",
    f"  TensorBoard   {os.path.join(workdir, 'tensorboard')}",
  ]
  return "\n".join(lines)
