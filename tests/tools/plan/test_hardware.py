"""The table of hardware."""

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.tools.plan import collectives, hardware


def test_names_of_tpu_slices():
  assert hardware.topology("tpu_v5p", 8, "tpu") == "v5p:2x2x2"
  assert hardware.topology("tpu_v5p", 256, "tpu") == "v5p:4x8x8"
  assert hardware.topology("tpu_v6e", 128, "tpu") == "v6e:8x16"
  for number in (512, 12):
    with pytest.raises(ConfigError, match="power of two up to 256"):
      hardware.topology("tpu_v6e", number, "tpu")


def test_names_of_gpu_servers():
  assert hardware.topology("h100", 4, "gpu") == "h100:1x4"
  assert hardware.topology("h100", 64, "gpu") == "h100:8x8"
  with pytest.raises(ConfigError, match="whole servers of 8 h100"):
    hardware.topology("h100", 12, "gpu")
  with pytest.raises(ConfigError, match="=a100 has no .* expected one of h"):
    hardware.topology("a100", 8, "gpu")


def test_every_device_has_a_peak():
  for name, one in hardware.TABLE.items():
    assert one.peak_flops > 1e14, name
    assert hardware.find(one.device_kind) is one and one.source


@pytest.mark.parametrize(
  ("name", "devices", "secs"),
  [
    # 600 GB/s, and three links on the way from a chip to another.
    ("tpu_v5p", 64, 3 * 63e9 / 600e9),
    ("h100", 8, 56e9 / 450e9),
    # 56 of 64 parts leave the server, each over its GPU's adapter.
    ("h100", 64, 56e9 / 50e9),
  ],
)
def test_seconds_of_an_all_to_all(name, devices, secs):
  one = collectives.Collective(
    "all-to-all", devices, 1, runs=1, nbytes=64 * 10**9
  )
  assert hardware.seconds(one, hardware.find(name)).secs == pytest.approx(secs)
