"""Published figures of accelerators and the networks between them.

The figures are in hardware.toml; peaks of the matrix units are in
reports/flops.py. Bandwidths are in bytes per second and in one direction. (Data
sheets state the sum of both directions for NVLink and the TPUs' interconnect,
and bits per second for networks.)

`seconds` is the time of a collective. `topology` is the description of the
hardware that its compiler needs.
"""

import math
import pathlib
import tomllib
from typing import NamedTuple

from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.reports import flops
from bigtrain.sharding import absent
from bigtrain.tools.plan.collectives import Collective


class Hardware(NamedTuple):
  """An accelerator and its connections; bandwidths in bytes per second."""

  device_kind: str  # jax's name.
  memory_bytes: float
  link_bandwidth: float  # To other devices of the domain, by NVLink or ICI.
  domain: int  # Number of devices with such links: a server or a pod.
  source: str  # Publication of the figures.
  network_bandwidth: float | None = None  # To other domains; None: unpublished.
  # For TPUs: libtpu's name, the dimensions of the torus of links, and the
  # number of matrix units of 128 x 128.
  chips: str | None = None
  axes: int = 3
  matrix_units: int = 0

  @property
  def peak_flops(self) -> float:
    """FLOP/s of a device in bfloat16."""
    peak = flops.peak_flops(self.device_kind)
    assert peak is not None, self.device_kind
    return peak

  @property
  def flops_per_cycle(self) -> int:
    """FLOPs of a TPU in a cycle: each cell multiplies and adds."""
    return self.matrix_units * 2 * 128**2

  @property
  def clock_hertz(self) -> float:
    return self.peak_flops / self.flops_per_cycle


_FILE = pathlib.Path(__file__).with_name("hardware.toml")
# Hardware by the names of --hardware.
TABLE = {
  name: Hardware(**fields)
  for name, fields in tomllib.loads(_FILE.read_text()).items()
}


def known_name(name: str) -> str:
  """Returns the key in TABLE of a key, or of jax's name of a device."""
  kinds = {entry.device_kind: key for key, entry in TABLE.items()}
  return str(check_choice("--hardware", kinds.get(name, name), TABLE))


def find(name: str) -> Hardware:
  return TABLE[known_name(name)]


def topology(name: str, devices: int, compiler: str) -> str:
  """Returns the topology for sharding.absent_devices, such as "v5p:2x2x4"."""
  if compiler == "gpu":
    return _servers(name, devices)
  return _slice(name, devices)


def _servers(name: str, devices: int) -> str:
  if name not in absent.GPUS:
    raise ConfigError(
      f"--compiler=gpu: --hardware={name} has no description for XLA's GPU "
      f"compiler; expected one of {', '.join(absent.GPUS)}."
    )
  per_server = min(devices, TABLE[name].domain)
  if devices % per_server:
    raise ConfigError(
      f"--compiler=gpu: --devices={devices}: expected whole servers of "
      f"{per_server} {name}."
    )
  return f"{name}:{devices // per_server}x{per_server}"


def _slice(name: str, devices: int) -> str:
  target = TABLE[name]
  if target.chips is None:
    raise ConfigError(
      f"--compiler=tpu: --hardware={name} is not a TPU; expected one of "
      f"{', '.join(n for n, h in TABLE.items() if h.chips)}."
    )
  if devices > target.domain or devices & (devices - 1):
    raise ConfigError(
      f"--compiler=tpu: --devices={devices}: expected a power of two up to "
      f"{target.domain}, one slice of {name}."
    )
  # As close as possible to a cube or a square, which has the shortest ways.
  sizes = [1] * target.axes
  while math.prod(sizes) < devices:
    sizes[sizes.index(min(sizes))] *= 2
  return f"{target.chips}:{'x'.join(map(str, sorted(sizes)))}"


class Seconds(NamedTuple):
  """Time of a collective in the links of a domain, and between domains."""

  link_secs: float
  network_secs: float

  @property
  def secs(self) -> float:
    return max(self.link_secs, self.network_secs)


def seconds(collective: Collective, hardware: Hardware) -> Seconds:
  """Time of a collective at the published bandwidth of every link.

  A ring over n devices in domains of m passes S = bytes * (n - 1) / n through
  each device (twice that for an all-reduce), in S / link_bandwidth. At the
  border of a domain, S passes over the network adapters of its m devices
  together, in S / (m * network_bandwidth).

  In an all-to-all, each device sends to each other one. On a TPU a byte uses as
  many links as lie on its way, and elsewhere each device's bytes for other
  domains pass over its own network adapter.
  """
  sent = collective.sent_bytes
  # Members of the group in one domain.
  if 0 < collective.span <= hardware.domain:
    members = collective.group_size
  else:
    neighbours = collective.inner or collective.group_size
    members = max(1, min(neighbours, hardware.domain // collective.stride))
  link_secs = sent / hardware.link_bandwidth if members > 1 else 0.0
  is_exchange = collective.kind == "all-to-all"
  if is_exchange and hardware.chips is not None:
    link_secs *= _mean_hops(members, hardware.axes)
  if members == collective.group_size:
    return Seconds(link_secs, network_secs=0.0)
  if hardware.network_bandwidth is None:
    raise ConfigError(
      f"--hardware: the bandwidth between more than {hardware.domain} devices "
      f"of {hardware.device_kind} is not published."
    )
  if is_exchange:
    size = collective.group_size
    sent *= members * (size - members) / (size - 1)
  network_secs = sent / (members * hardware.network_bandwidth)
  return Seconds(link_secs, network_secs)


def _mean_hops(devices: int, axes: int) -> float:
  """Links between two devices of a torus, about, and at least 1.

  >>> _mean_hops(8, 3), _mean_hops(64, 3), _mean_hops(256, 2)
  (1.5, 3.0, 8.0)
  """
  # In a ring of s devices the mean distance is s / 4.
  side = devices ** (1 / axes)
  return max(1.0, round(axes * side / 4, 2))
