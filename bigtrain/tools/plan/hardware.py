"""Published figures of accelerators and the networks between them.

Bandwidths are in bytes per second and in one direction. Data sheets state the
sum of both directions for NVLink and the TPUs' interconnect, and bits per
second for networks. Peaks of the matrix units are in reports/flops.py.
"""

from typing import NamedTuple

from bigtrain.reports import flops
from bigtrain.settings import ConfigError, did_you_mean
from bigtrain.sharding import absent
from bigtrain.tools.plan.collectives import Collective

_GIB = 2**30


class Hardware(NamedTuple):
  """An accelerator and its connections.

  Attributes:
    device_kind: jax's name of the device, for flops.peak_flops.
    memory_bytes: memory of a device.
    link_bandwidth: bandwidth from a device to the others of its domain (NVLink
      or ICI), in bytes per second.
    domain: number of devices connected by such links: a server or a pod.
    network_bandwidth: bandwidth from a device to other domains, in bytes per
      second; None if not published.
    source: publication of the figures.
    chips: libtpu's name of the device; None for GPUs.
    axes: number of dimensions of the mesh or torus of links.
    flops_per_cycle: FLOPs of the matrix units in a cycle; None for GPUs.
  """

  device_kind: str
  memory_bytes: float
  link_bandwidth: float
  domain: int
  network_bandwidth: float | None
  source: str
  chips: str | None = None
  axes: int = 3
  flops_per_cycle: int | None = None

  @property
  def peak_flops(self) -> float:
    """Peak FLOP/s of a device in bfloat16."""
    peak = flops.peak_flops(self.device_kind)
    assert peak is not None, self.device_kind
    return peak

  @property
  def clock_hertz(self) -> float:
    """Cycles per second of a TPU, from its peak."""
    assert self.flops_per_cycle is not None, self.device_kind
    return self.peak_flops / self.flops_per_cycle


# FLOPs of a matrix unit of 128 x 128 in a cycle; the documentation has the
# number of units. Those of v6e have 256 x 256; with two of them its clock would
# be at 3.5 GHz, so four are assumed.
_MXU = 2 * 128**2

_TPU = "Google Cloud TPU documentation, page {} (system architecture)"

TABLE: dict[str, Hardware] = {
  "a100": Hardware(
    *("NVIDIA A100-SXM4-80GB", 80e9, 300e9, 8, 25e9),
    "NVIDIA A100 80GB SXM and DGX A100 data sheets: NVLink 600 GB/s in both "
    "directions, eight HDR InfiniBand adapters of 200 Gb/s for eight GPUs",
  ),
  "h100": Hardware(
    *("NVIDIA H100 80GB HBM3", 80e9, 450e9, 8, 50e9),
    "NVIDIA H100 SXM and DGX H100 data sheets: NVLink 900 GB/s in both "
    "directions, eight ConnectX-7 adapters of 400 Gb/s for eight GPUs",
  ),
  "h200": Hardware(
    *("NVIDIA H200", 141e9, 450e9, 8, 50e9),
    "NVIDIA H200 SXM and DGX H200 data sheets: as H100, with 141 GB",
  ),
  "b200": Hardware(
    *("NVIDIA B200", 180e9, 900e9, 8, 50e9),
    "NVIDIA DGX B200 data sheet: 1,440 GB and NVLink 14.4 TB/s in both "
    "directions for eight GPUs, eight ConnectX-7 adapters of 400 Gb/s",
  ),
  "tpu_v4": Hardware(
    *("TPU v4", 32 * _GIB, 6 * 50e9, 4096, None),
    _TPU.format("v4") + "; six links of 50 GB/s a chip: Jouppi et al. 2023, "
    "arxiv.org/abs/2304.01433",
    *("v4", 3, 8 * _MXU),
  ),
  "tpu_v5e": Hardware(
    *("TPU v5 lite", 16e9, 400e9 / 2, 256, 25e9 / 8),
    _TPU.format("v5e") + ": ICI 400 GB/s in both directions, data centre "
    "network 6.4 Tb/s a pod of 256",
    *("v5e", 2, 4 * _MXU),
  ),
  "tpu_v5p": Hardware(
    *("TPU v5", 95 * _GIB, 1200e9 / 2, 8960, 50e9 / 8),
    _TPU.format("v5p") + ": ICI 1,200 GB/s in both directions, data centre "
    "network 50 Gb/s a chip",
    *("v5p", 3, 8 * _MXU),
  ),
  "tpu_v6e": Hardware(
    *("TPU v6 lite", 32e9, 800e9 / 2, 256, 100e9 / 8),
    _TPU.format("v6e") + ": ICI 800 GB/s in both directions, data centre "
    "network 25.6 Tb/s a pod of 256",
    *("v6e", 2, 4 * 4 * _MXU),
  ),
}


def find(name: str) -> Hardware:
  """Returns an entry of TABLE.

  Raises:
    ConfigError: unknown name.
  """
  if name not in TABLE:
    hint = did_you_mean(name, TABLE)
    raise ConfigError(f"--hardware={name}: unknown.{hint}")
  return TABLE[name]


def topology(name: str, devices: int, compiler: str = "tpu") -> str:
  """Returns the name of absent devices for config.compile_only.

  Args:
    compiler: "tpu", for a slice such as "v5p:4x4x4", or "gpu", for servers of
      GPUs such as "h100:8x8".

  Raises:
    ConfigError: the compiler has no such hardware, or not of that size.
  """
  target = find(name)
  if compiler == "gpu":
    return _servers(name, target, devices)
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
  sizes = [1] * target.axes
  while devices > 1:  # As close as possible to a cube or a square.
    sizes[sizes.index(min(sizes))] *= 2
    devices //= 2
  return f"{target.chips}:{'x'.join(map(str, sorted(sizes)))}"


def _servers(name: str, target: Hardware, devices: int) -> str:
  """The name of GPUs in servers."""
  if name not in absent.GPUS:
    raise ConfigError(
      f"--compiler=gpu: --hardware={name} has no description for XLA's GPU "
      f"compiler; expected one of {', '.join(absent.GPUS)}."
    )
  of_server = min(devices, target.domain)
  if devices % of_server:
    raise ConfigError(
      f"--compiler=gpu: --devices={devices}: expected whole servers of "
      f"{target.domain} {name}."
    )
  return f"{name}:{devices // of_server}x{of_server}"


class Seconds(NamedTuple):
  """Time of a collective.

  Attributes:
    link_secs: time of the links within a domain.
    network_secs: time of the network between domains.
  """

  link_secs: float
  network_secs: float

  @property
  def secs(self) -> float:
    """The slower one: both transfer at the same time."""
    return max(self.link_secs, self.network_secs)


def seconds(collective: Collective, hardware: Hardware) -> Seconds:
  """Time of a collective at the published bandwidth of every link.

  A ring over n devices in domains of m passes S = bytes * (n - 1) / n through
  each device (twice that for an all-reduce). At the border of a domain, S
  passes over the network adapters of its m devices together. So

    within a domain     S / link_bandwidth
    between domains     S / (m * network_bandwidth)

  Args:
    collective: bytes, group size and stride.

  Raises:
    ConfigError: the group leaves a domain, and the bandwidth between domains
      is not published.
  """
  sent = collective.sent_bytes
  near = collective.inner or collective.group_size
  members = max(1, min(near, hardware.domain // collective.stride))
  if 0 < collective.span <= hardware.domain:
    members = collective.group_size
  link_secs = sent / hardware.link_bandwidth if members > 1 else 0.0
  if members == collective.group_size:
    return Seconds(link_secs, 0.0)
  if hardware.network_bandwidth is None:
    raise ConfigError(
      f"--hardware: the bandwidth between more than {hardware.domain} devices "
      f"of {hardware.device_kind} is not published."
    )
  return Seconds(link_secs, sent / (members * hardware.network_bandwidth))
