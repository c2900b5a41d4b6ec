"""Benchmark 13: every config fits the hardware that its header names.

A header says "N accelerators with M GB" or names them, "256 TPU v5p". The
config, with the arguments of its command, is compiled for N such absent
devices: by XLA's GPU compiler for 80 GB (H100), by the TPU's for 16 GB (v5e).
The figure is the peak memory that the compiler plans. Headers with the hardware
"any" or "not known" are left out.

  python -m benchmarks.headers --only=llama_8b,siglip
"""

import os
import pathlib
import re
import sys
from typing import NamedTuple

from benchmarks import compilers, measure

_NUMBER = 13

# Words of a header: entry of bigtrain/tools/plan/hardware.py.
HARDWARE = {
  "accelerators with 80 GB": "h100",
  "accelerators with 16 GB": "tpu_v5e",
  "H100": "h100",
  "TPU v5e": "tpu_v5e",
  "TPU v5p": "tpu_v5p",
}

_HARDWARE = re.compile(rf"[^.]*?(\d[\d,]*) ({'|'.join(HARDWARE)})\b")
_CONFIG = re.compile(r"--config=configs/\w+\.py(?::(\S+))?")
_CHANGE = re.compile(r"\s--config\.(\S+=\S+)")


class Header(NamedTuple):
  """What the header of a config says.

  Attributes:
    config: file, with arguments that are no paths.
    devices: number of accelerators.
    hardware: entry of bigtrain/tools/plan/hardware.py.
    changes: changes of the config in the command.
  """

  config: str
  devices: int
  hardware: str
  changes: tuple[str, ...]


def read(path: pathlib.Path) -> Header | None:
  """Returns the header of a config; None if it needs no certain hardware.

  Args:
    path: the config file.
  """
  text = path.read_text()
  text = text[: text.index('"""', 3)]
  words = " ".join(
    text.partition("\nHardware:")[2].partition("\nResult:")[0].split()
  )
  match = _HARDWARE.match(words)
  if not match:
    return None
  command = text.partition("\nCommand:")[2].partition("\nHardware:")[0]
  given = _CONFIG.search(command)
  # Arguments such as data=FOLDER are paths.
  names = [a for a in (given[1] or "").split(",") if a and "=" not in a]
  return Header(
    ":".join([path.name, ",".join(names)] if names else [path.name]),
    int(match[1].replace(",", "")),
    HARDWARE[match[2]],
    tuple(_CHANGE.findall(command)),
  )


def main() -> None:
  """Prints the peak memory of each config."""
  args = measure.arguments(
    __doc__, only="names of configs, separated by commas"
  )
  folder = pathlib.Path(measure.ROOT) / "configs"
  all_headers = {p.stem: read(p) for p in sorted(folder.glob("*.py"))}
  headers = {name: header for name, header in all_headers.items() if header}
  names = args.only.split(",") if args.only else [*headers]
  unknown = [name for name in names if name not in headers]
  if unknown:
    sys.exit(f"--only={args.only}: expected some of {', '.join(headers)}.")
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # No search for devices.
  for name in names[:1] if args.quick else names:
    header = headers[name]
    title = f"peak memory: {name}, {header.devices} {header.hardware}"
    compiler = compilers.compiler(header.hardware)
    if reason := compilers.missing(compiler):
      measure.skip(_NUMBER, title, reason)
      continue
    row = compilers.compiled(_case(header), args.quick)
    measure.report(
      _NUMBER,
      title,
      [row["peak_bytes"] / 1e9],
      unit="GB",
      target=f"<= {row['peak_bytes'] / row['memory_fraction'] / 1e9:.0f}",
    )


def _case(header: Header) -> compilers.Case:
  """The update of a header, with made-up data if the config needs files."""
  case = compilers.Case(
    header.config, header.hardware, header.devices, None, header.changes
  )
  for other in compilers.CASES.values():
    if other.config == header.config and other.features:
      changes = (*header.changes, *other.changes)
      return case._replace(changes=changes, features=other.features)
  return case


if __name__ == "__main__":
  main()
