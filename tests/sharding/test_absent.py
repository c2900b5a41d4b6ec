"""Devices that are absent: their names, and what jax is told about them."""

import os

import jax
import pytest
from jax.experimental import topologies

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.sharding import absent


@pytest.fixture
def asked(monkeypatch):
  """The options of jax's description of a topology."""
  options = {}

  class Described:
    devices = jax.devices()[:2]

  def describe(**given):
    options.update(given)
    return Described

  monkeypatch.setattr(topologies, "get_topology_desc", describe)
  return options


@pytest.mark.parametrize(
  "topology, part",
  [("v5e:4x4", None), ("v5p:2x2x1", None), ("v5e:1x1", [1, 1, 1])],
)
def test_absent_tpus_may_be_a_part_of_a_host(
  topology, part, asked, monkeypatch
):
  # libtpu's variables stay out of the other tests.
  monkeypatch.setattr(os, "environ", {})
  with sharding.absent_devices(topology):
    assert sharding.from_config(Config({"mesh": {}})).size == 2
  assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
  assert asked["topology_name"] == topology
  assert asked.get("chips_per_host_bounds") == part


@pytest.mark.parametrize(
  "topology, wrap",
  [
    ("v5p:4x4x8", (True, True, True)),
    ("v5p:2x4x4", (False, False, False)),
    ("v5e:8x16", (False, True, False)),
    ("v5e:4x4", (False, False, False)),
  ],
)
def test_links_close_the_torus_of_large_slices(
  topology, wrap, asked, monkeypatch
):
  monkeypatch.setattr(os, "environ", {})
  absent.devices(topology)
  assert asked["wrap"] == wrap


def test_absent_gpus_are_in_servers(asked, monkeypatch, traces_cudnn):
  monkeypatch.setattr(absent, "_has_cuda_plugin", lambda: True)
  with sharding.absent_devices("h100:4x8"):
    assert sharding.from_config(Config({"mesh": {}})).size == 2
  # jax's order: slices x hosts x devices.
  assert (asked["platform"], asked["topology"]) == ("cuda", "4x1x8")
  assert 'name: "NVIDIA H100 80GB HBM3"' in asked["target_config"]


def test_a_missing_compiler_is_a_line_with_what_to_install(monkeypatch):
  monkeypatch.setattr(absent, "_has_cuda_plugin", lambda: False)
  with pytest.raises(ConfigError, match=r"'h100:1x8': .*EXTRAS=cuda"):
    absent.devices("h100:1x8")
  with pytest.raises(ConfigError, match=r"libtpu .*'h100:8x8'"):
    absent.devices("h900:1x8")


def test_jax_is_told_what_an_absent_gpu_can_do(traces_cudnn):
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  text = """dnn_version_info { major: 9 minor: 10 patch: 2 }
    cuda_compute_capability { major: 8 minor: 6 }"""
  absent.tell_cudnn(text)
  assert cudnn.check_cudnn_version() == 91002
  assert cudnn.check_compute_capability("8.0")
  assert not cudnn.check_compute_capability("9.0")
  assert cudnn.is_cuda_compute_capability_equal("8.6")
  assert not cudnn.is_cuda_compute_capability_equal("8.0")
