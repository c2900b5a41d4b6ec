"""Every test sees eight simulated devices: code that needs one is wrong."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
flags = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in flags:
  flags += " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = flags.strip()
# TensorFlow and absl are chatty at start-up; a failing test should not be.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
