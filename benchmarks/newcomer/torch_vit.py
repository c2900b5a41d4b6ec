"""The model and the data of the two programs in PyTorch."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


class Block(nn.Module):
  def __init__(self):
    super().__init__()
    self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
    self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
    self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

  def forward(self, x):
    n = self.norms[0](x)
    x = x + self.attention(n, n, n, need_weights=False)[0]
    return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
  def __init__(self):
    super().__init__()
    self.patches = nn.Conv2d(1, 64, 2, stride=2)
    self.positions = nn.Parameter(torch.randn(16, 64) * 0.02)
    self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(64))
    self.head = nn.Linear(64, 10)

  def forward(self, image):
    x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
    return self.head(self.blocks(x).mean(1))


def data():
  x, y = load_digits(return_X_y=True)
  x = torch.tensor(x.reshape(-1, 1, 8, 8) / 8 - 1, dtype=torch.float32)
  order = np.random.default_rng(0).permutation(len(x))
  y = torch.tensor(y)
  return (x[order[360:]], y[order[360:]]), (x[order[:360]], y[order[:360]])
