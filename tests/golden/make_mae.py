"""Makes mae.npz: loss and gradients of transformers' ViTMAEForPreTraining.

It has the inputs, "loss" and "pixels", the parameters by their names in
transformers, and their gradients as "gradient of NAME".

  python tests/golden/make_mae.py
"""

import pathlib

import make_published
import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "mae.npz"
SIZES = dict(
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
  decoder_hidden_size=12,
  decoder_intermediate_size=20,
  decoder_num_hidden_layers=1,
  decoder_num_attention_heads=3,
  image_size=16,
  patch_size=4,
  mask_ratio=0.75,
  norm_pix_loss=True,
)


def main():
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  config = transformers.ViTMAEConfig(**SIZES, attn_implementation="eager")
  model = transformers.ViTMAEForPreTraining(config).double().eval()
  make_published.with_noise(model, rng)
  with torch.no_grad():
    for x in model.parameters():  # So that float32 has the same numbers.
      x.copy_(x.float())
  image = rng.normal(size=(3, 3, 16, 16)).astype(np.float32)
  noise = rng.uniform(size=(3, 16)).astype(np.float32)
  result = model(
    pixel_values=torch.from_numpy(image).double(),
    noise=torch.from_numpy(noise),
  )
  result.loss.backward()
  arrays = {
    "image": image.transpose(0, 2, 3, 1),
    "noise": noise,
    "loss": result.loss.detach().numpy(),
    "pixels": result.logits.detach().numpy(),
  }
  for name, parameter in model.named_parameters():
    arrays[name] = parameter.detach().numpy().astype(np.float32)
    if parameter.grad is not None:
      arrays[f"gradient of {name}"] = parameter.grad.numpy()
  np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
  main()
