"""Makes resnet.npz: expected outputs of models/resnet.py, in plain numpy.

  python tests/golden/make_resnet.py

The computation is in float64 and shares no code with the model. Run it again
only after an intended change of the model, and explain the change in the
commit.
"""

import pathlib

import numpy as np

FILE = pathlib.Path(__file__).with_name("resnet.npz")

NUM_CLASSES = 3
CHANNELS = 2  # width=1/32
NUM_BLOCKS = (2, 2, 2, 2)  # depth=26
IMAGE_SHAPE = (4, 40, 33, 3)


def make() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns (inputs, outputs).

  Inputs are "v<version>/params/<name>", ".../batch_stats/<name>" and
  ".../image"; outputs ".../eval/logits", ".../train/logits" and, after the
  update, ".../train/batch_stats/<name>". The file has only the outputs:
  RandomState draws the same inputs in every version of numpy.
  """
  inputs, outputs = {}, {}
  for version in (1, 2):
    net = Net(np.random.RandomState(version))
    image = net.rng.uniform(-1, 1, IMAGE_SHAPE)
    for mode in ("eval", "train"):
      logits = net.forward(image, version, train=mode == "train")
      outputs[f"v{version}/{mode}/logits"] = logits
    # The first norm, and the last, which depends on all others.
    for name in [*net.new_stats][:2] + [*net.new_stats][-2:]:
      key = f"v{version}/train/batch_stats/{name}"
      outputs[key] = net.new_stats[name]
    inputs[f"v{version}/image"] = image
    for collection in ("params", "batch_stats"):
      values = net.params if collection == "params" else net.stats
      for name, value in values.items():
        inputs[f"v{version}/{collection}/{name}"] = value
  as_float32 = lambda arrays: {n: np.float32(a) for n, a in arrays.items()}
  return as_float32(inputs), as_float32(outputs)


class Net:
  """Layers that draw their parameters on first use."""

  def __init__(self, rng: np.random.RandomState):
    self.rng = rng
    self.params: dict[str, np.ndarray] = {}
    self.stats: dict[str, np.ndarray] = {}
    self.new_stats: dict[str, np.ndarray] = {}

  def draw(self, where, name, shape, mean, deviation):
    if name not in where:
      where[name] = self.rng.normal(mean, deviation, shape)
    return where[name]

  def conv(self, name, x, channels, size=1, stride=1):
    fan_in = size * size * x.shape[-1]
    shape = (size, size, x.shape[-1], channels)
    kernel = self.draw(
      self.params, f"{name}/kernel", shape, 0, (2 / fan_in) ** 0.5
    )
    pad = size // 2
    x = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    rows = (x.shape[1] - size) // stride + 1
    columns = (x.shape[2] - size) // stride + 1
    y = np.zeros((x.shape[0], rows, columns, channels))
    for r in range(rows):
      for c in range(columns):
        top, left = r * stride, c * stride
        window = x[:, top : top + size, left : left + size]
        y[:, r, c] = np.tensordot(window, kernel, 3)
    return y

  def norm(self, name, x, train):
    shape = x.shape[-1:]
    scale = self.draw(self.params, f"{name}/scale", shape, 1, 0.2)
    bias = self.draw(self.params, f"{name}/bias", shape, 0, 0.2)
    mean = self.draw(self.stats, f"{name}/mean", shape, 0, 0.2)
    var = self.draw(self.stats, f"{name}/var", shape, 1.5, 0.1)
    if train:
      old_mean, old_var = mean, var
      mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
      self.new_stats[f"{name}/mean"] = 0.9 * old_mean + 0.1 * mean
      self.new_stats[f"{name}/var"] = 0.9 * old_var + 0.1 * var
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias

  def forward(self, x, version, train):
    """Returns logits of images (batch, height, width, 3)."""
    x = self.conv("conv_root", x, CHANNELS, size=7, stride=2)
    if version == 1:
      x = relu(self.norm("bn_root", x, train))
    x = max_pool(x)
    block = self.block_v1 if version == 1 else self.block_v2
    for stage, num_blocks in enumerate(NUM_BLOCKS):
      for i in range(num_blocks):
        stride = 2 if stage > 0 and i == 0 else 1
        name = f"stage{stage + 1}_block{i + 1}"
        x = block(name, x, CHANNELS * 2**stage, stride, train)
    if version == 2:
      x = relu(self.norm("bn_final", x, train))
    x = x.mean((1, 2))
    shape = (x.shape[-1], NUM_CLASSES)
    kernel = self.draw(self.params, "head/kernel", shape, 0, 0.5)
    return x @ kernel + self.draw(self.params, "head/bias", shape[1:], 0, 0.5)

  def block_v1(self, name, x, channels, stride, train):
    y = self.conv(f"{name}/conv1", x, channels)
    y = relu(self.norm(f"{name}/bn1", y, train))
    y = self.conv(f"{name}/conv2", y, channels, size=3, stride=stride)
    y = relu(self.norm(f"{name}/bn2", y, train))
    y = self.conv(f"{name}/conv3", y, 4 * channels)
    y = self.norm(f"{name}/bn3", y, train)
    if y.shape != x.shape:
      x = self.conv(f"{name}/conv_proj", x, 4 * channels, stride=stride)
      x = self.norm(f"{name}/bn_proj", x, train)
    return relu(x + y)

  def block_v2(self, name, x, channels, stride, train):
    y = relu(self.norm(f"{name}/bn1", x, train))
    if stride != 1 or x.shape[-1] != 4 * channels:
      x = self.conv(f"{name}/conv_proj", y, 4 * channels, stride=stride)
    y = self.conv(f"{name}/conv1", y, channels)
    y = relu(self.norm(f"{name}/bn2", y, train))
    y = self.conv(f"{name}/conv2", y, channels, size=3, stride=stride)
    y = relu(self.norm(f"{name}/bn3", y, train))
    return x + self.conv(f"{name}/conv3", y, 4 * channels)


def relu(x):
  return np.maximum(x, 0)


def max_pool(x):
  """Returns the maxima of 3x3 windows with stride 2 and padding 1."""
  border = [(0, 0), (1, 1), (1, 1), (0, 0)]
  x = np.pad(x, border, constant_values=-np.inf)
  rows, columns = (x.shape[1] - 1) // 2, (x.shape[2] - 1) // 2
  y = np.zeros((x.shape[0], rows, columns, x.shape[3]))
  for r in range(rows):
    for c in range(columns):
      window = x[:, 2 * r : 2 * r + 3, 2 * c : 2 * c + 3]
      y[:, r, c] = window.max((1, 2))
  return y


if __name__ == "__main__":
  np.savez_compressed(FILE, **make()[1])
  print(f"{FILE}: {FILE.stat().st_size:,} bytes")
