"""Makes image_processors.npz: pixels of transformers' image processors.

The array CONFIGS has their preprocessor_config.json, by name.

  python tests/golden/make_image_processors.py
"""

import json
import pathlib
import tempfile

import numpy as np
import transformers

FILE = pathlib.Path(__file__).with_name("image_processors.npz")
SHORT = dict(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16})
PROCESSORS = {
  "vit": ("ViTImageProcessor", dict(size={"height": 16, "width": 18})),
  "clip": ("CLIPImageProcessor", SHORT),
  "dinov2": ("BitImageProcessor", SHORT | dict(image_mean=[0.4, 0.5, 0.6])),
  "siglip": ("SiglipImageProcessor", dict(size={"height": 24, "width": 24})),
  "plain": ("ViTImageProcessor", dict(do_resize=False, do_normalize=False)),
}


def image():
  rows, columns = np.mgrid[:47, :61]
  waves = [np.sin(rows / a + columns / b) for a, b in ((3, 5), (9, 4), (2, 7))]
  noise = np.random.default_rng(0).uniform(-0.3, 0.3, (47, 61, 3))
  return np.clip((np.stack(waves, -1) + noise + 1) * 127, 0, 255).astype("u1")


def main():
  configs, pixels = {}, {}
  for name, (kind, options) in PROCESSORS.items():
    processor = getattr(transformers, kind)(**options)
    with tempfile.TemporaryDirectory() as folder:
      processor.save_pretrained(folder)
      file = next(pathlib.Path(folder).glob("*processor_config.json"))
      configs[name] = json.loads(file.read_text())
    result = processor(image(), return_tensors="np")["pixel_values"]
    pixels[name] = result[0].transpose(1, 2, 0).astype(np.float32)
  np.savez_compressed(
    FILE, CONFIGS=json.dumps(configs), image=image(), **pixels
  )


if __name__ == "__main__":
  main()
