"""Published figures of accelerators and the networks between them.

Bandwidths are in bytes per second and in one direction. Data sheets state the
sum of both directions for NVLink and the TPUs' interconnect, and bits per
second for networks. Peaks of the matrix units are in reports/flops.py.
"""

from typing import NamedTuple

from bigtrain.reports import flops
from bigtrain.settings import ConfigError, check_choice
from bigtrain.sharding import absent
from bigtrain.tools.plan.hlo import Collective

_GIB = 2**30


class Hardware(NamedTuple):
  """An accelerator and its connections; bandwidths in bytes per second."""

  device_kind: str  # jax's name.
  memory_bytes: float
  link_bandwidth: float  # To other devices of the domain, by NVLink or ICI.
  domain: int  # Number of devices with such links: a server or a pod.
  network_bandwidth: float | None  # To other domains; None if not published.
  chips: str | None = None  # libtpu's name; None for GPUs.
  axes: int = 3  # Dimensions of the mesh or torus of links.
  matrix_units: int = 0  # Of 128 x 128; 0 for GPUs.

  @property
  def peak_flops(self) -> float:
    """FLOP/s of a device in bfloat16."""
    peak = flops.peak_flops(self.device_kind)
    assert peak is not None, self.device_kind
    return peak

  @property
  def flops_per_cycle(self) -> int:
    return self.matrix_units * 2 * 128**2

  @property
  def clock_hertz(self) -> float:
    return self.peak_flops / self.flops_per_cycle


# The documentation has the number of matrix units. Those of v6e have 256 x 256;
# with two of them its clock would be at 3.5 GHz, so four are assumed.
TABLE: dict[str, Hardware] = {
  "a100": Hardware("NVIDIA A100-SXM4-80GB", 80e9, 300e9, 8, 25e9),
  "h100": Hardware("NVIDIA H100 80GB HBM3", 80e9, 450e9, 8, 50e9),
  "h200": Hardware("NVIDIA H200", 141e9, 450e9, 8, 50e9),
  "b200": Hardware("NVIDIA B200", 180e9, 900e9, 8, 50e9),
  "tpu_v4": Hardware("TPU v4", 32 * _GIB, 300e9, 4096, None, "v4", 3, 8),
  "tpu_v5e": Hardware("TPU v5 lite", 16e9, 200e9, 256, 3.125e9, "v5e", 2, 4),
  "tpu_v5p": Hardware("TPU v5", 95 * _GIB, 600e9, 8960, 6.25e9, "v5p", 3, 8),
  "tpu_v6e": Hardware("TPU v6 lite", 32e9, 400e9, 256, 12.5e9, "v6e", 2, 16),
}

# Publications of the figures.
_TPU = "Google Cloud TPU documentation, page {} (system architecture)"
SOURCES = {
  "a100": "NVIDIA A100 80GB SXM and DGX A100 data sheets: NVLink 600 GB/s in "
  "both directions, eight HDR InfiniBand adapters of 200 Gb/s for eight GPUs",
  "h100": "NVIDIA H100 SXM and DGX H100 data sheets: NVLink 900 GB/s in both "
  "directions, eight ConnectX-7 adapters of 400 Gb/s for eight GPUs",
  "h200": "NVIDIA H200 SXM and DGX H200 data sheets: as H100, with 141 GB",
  "b200": "NVIDIA DGX B200 data sheet: 1,440 GB and NVLink 14.4 TB/s in both "
  "directions for eight GPUs, eight ConnectX-7 adapters of 400 Gb/s",
  "tpu_v4": _TPU.format("v4") + "; six links of 50 GB/s a chip: Jouppi et al. "
  "2023, arxiv.org/abs/2304.01433",
  "tpu_v5e": _TPU.format("v5e") + ": ICI 400 GB/s in both directions, data "
  "centre network 6.4 Tb/s a pod of 256",
  "tpu_v5p": _TPU.format("v5p") + ": ICI 1,200 GB/s in both directions, data "
  "centre network 50 Gb/s a chip",
  "tpu_v6e": _TPU.format("v6e") + ": ICI 800 GB/s in both directions, data "
  "centre network 25.6 Tb/s a pod of 256",
}


def known_name(name: str) -> str:
  """Returns the key in TABLE of a key, or of jax's name of a device."""
  kinds = {entry.device_kind: key for key, entry in TABLE.items()}
  return str(check_choice("--hardware", kinds.get(name, name), TABLE))


def find(name: str) -> Hardware:
  return TABLE[known_name(name)]


def topology(name: str, devices: int, compiler: str) -> str:
  """Returns the topology for sharding.absent_devices."""
  target = TABLE[name]
  if compiler == "gpu":
    if name not in absent.GPUS:
      raise ConfigError(
        f"--compiler=gpu: --hardware={name} has no description for XLA's GPU "
        f"compiler; expected one of {', '.join(absent.GPUS)}."
      )
    of_server = min(devices, target.domain)
    if devices % of_server:
      raise ConfigError(
        f"--compiler=gpu: --devices={devices}: expected whole servers of "
        f"{of_server} {name}."
      )
    return f"{name}:{devices // of_server}x{of_server}"
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
