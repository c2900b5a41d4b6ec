"""Makes autoencoder/: a small AutoencoderKL of diffusers, and its outputs.

The folder is as diffusers saves it; outputs.npz has "image", and in float64
"mean" and "std" of its latents, and "decoded", the image of the mean.

  python tests/golden/make_autoencoder.py

It needs diffusers 0.42.1 beside torch: pip install --no-deps diffusers.
"""

import pathlib

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

OUT = pathlib.Path(__file__).parent / "autoencoder"
SIZES = dict(
  block_out_channels=(8, 12),
  down_block_types=("DownEncoderBlock2D",) * 2,
  up_block_types=("UpDecoderBlock2D",) * 2,
  layers_per_block=1,
  norm_num_groups=4,
  latent_channels=4,
  sample_size=8,
  scaling_factor=0.5,
  shift_factor=0.1,
)


def main():
  torch.manual_seed(0)
  model = AutoencoderKL(**SIZES).eval()
  with torch.no_grad():
    for x in model.parameters():  # Nothing stays at 0 or 1.
      x.add_(0.1 * torch.randn(x.shape))
  model.save_pretrained(OUT)
  rng = np.random.default_rng(0)
  image = rng.uniform(-1, 1, (2, 3, 8, 12)).astype(np.float32)
  model = model.double()
  with torch.no_grad():
    latents = model.encode(torch.from_numpy(image).double()).latent_dist
    decoded = model.decode(latents.mean).sample
  last = lambda x: x.numpy().transpose(0, 2, 3, 1)
  np.savez_compressed(
    OUT / "outputs.npz",
    image=image.transpose(0, 2, 3, 1),
    mean=last(latents.mean),
    std=last(latents.std),
    decoded=last(decoded),
  )


if __name__ == "__main__":
  main()
