"""A VQ-VAE of masks with random weights, in the layout of vae-oid.npz."""

import numpy as np

WIDTH, CODE = 128, 8  # Of the layers, and of a code.


def arrays(encoder_width=16):
  """The same on every processor: whole numbers, divided by powers of two."""
  rng = np.random.default_rng(0)

  def draw(*shape, fan_in):
    values = rng.integers(-512, 513, shape).astype(np.float32) / 512
    power = 2.0 ** np.round(np.log2(1.5 / np.sqrt(fan_in)))
    return values * np.float32(power)

  result = {"_vq_vae._embedding": draw(128, CODE, fan_in=1)}

  def conv(name, inputs, outputs, size, transposed=False):
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    fan_in = inputs * size**2 / (4 if transposed else 1)
    result[f"{name}.weight"] = draw(*shape, size, size, fan_in=fan_in)
    result[f"{name}.bias"] = draw(outputs, fan_in=16)

  def block(name, width):
    conv(f"{name}.net.0", width, width, 3)
    conv(f"{name}.net.2", width, width, 3)
    conv(f"{name}.net.4", width, width, 1)

  widths = (1, *[encoder_width] * 4)
  for i, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
    conv(f"encoder.{2 * i}", inputs, outputs, 4)
  block("encoder.8", encoder_width)
  block("encoder.9", encoder_width)
  conv("encoder.10", encoder_width, CODE, 1)
  conv("decoder.0", CODE, WIDTH, 1)
  block("decoder.2", WIDTH)
  block("decoder.3", WIDTH)
  widths = (WIDTH, 128, 64, 32, 16)
  for i, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
    conv(f"decoder.{4 + 2 * i}", inputs, outputs, 4, transposed=True)
  conv("decoder.12", 16, 1, 1)
  return result


def masks():
  """(masks, their boxes): discs and bars, bool [height, width]."""
  found = []
  for seed, size in enumerate([(90, 120), (200, 133), (64, 64), (40, 31)]):
    rows, columns = np.ogrid[: size[0], : size[1]]
    center = np.array(size) * (0.4 + 0.05 * seed)
    radius = min(size) * 0.3
    disc = (rows - center[0]) ** 2 + (columns - center[1]) ** 2 < radius**2
    bar = (rows + 2 * columns) % (20 + seed) < 9
    mask = disc & (bar if seed % 2 else True)
    inside = np.argwhere(mask)
    first, last = inside.min(0) / size, (inside.max(0) + 1) / size
    found.append((mask, (*first.tolist(), *last.tolist())))
  return found
