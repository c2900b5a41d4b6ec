"""Steps of a ViT, a GPT-2, a Llama and timm's models, for peer_process.py.

They follow current practice for speed: scaled_dot_product_attention, fused
AdamW, and torch.compile where it works.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import peer_process


class Block(nn.Module):
  """Attention and MLP with pre-norms, as in GPT-2 and ViTs."""

  def __init__(self, options: Any):
    super().__init__()
    width, mlp_dim = options["width"], options["mlp_dim"]
    self.heads, self.causal = options["num_heads"], "vocab_size" in options
    self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
    self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    self.up, self.down = nn.Linear(width, mlp_dim), nn.Linear(mlp_dim, width)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Maps [B, L, D] to [B, L, D]."""
    B, L, D = x.shape
    qkv = self.qkv(self.norm1(x)).view(B, L, 3, self.heads, D // self.heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
    x = x + self.out(y.transpose(1, 2).reshape(B, L, D))
    return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
  """Block with rotary positions, RMS norms, grouped queries and SwiGLU."""

  def __init__(self, options: Any):
    super().__init__()
    width, self.heads = options["width"], options["num_heads"]
    self.kv_heads, mlp_dim = options["num_kv_heads"], options["mlp_dim"]
    self.head_dim = width // self.heads
    linear = functools.partial(nn.Linear, bias=False)
    self.norm1 = nn.RMSNorm(width, eps=1e-5)
    self.norm2 = nn.RMSNorm(width, eps=1e-5)
    heads = self.heads + 2 * self.kv_heads
    self.qkv = linear(width, heads * self.head_dim)
    self.out = linear(width, width)
    self.gate_up, self.down = linear(width, 2 * mlp_dim), linear(mlp_dim, width)
    omega = 10_000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
    angle = torch.outer(torch.arange(options["length"]), omega)
    self.register_buffer("cos", torch.cos(angle), persistent=False)
    self.register_buffer("sin", torch.sin(angle), persistent=False)

  def _rope(self, x: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = (
      first * self.cos - second * self.sin,
      second * self.cos + first * self.sin,
    )
    return torch.cat(rotated, dim=-1).to(x.dtype)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Maps [B, L, D] to [B, L, D]."""
    B, L, D = x.shape
    qkv = self.qkv(self.norm1(x)).view(B, L, -1, self.head_dim).transpose(1, 2)
    sizes = (self.heads, self.kv_heads, self.kv_heads)
    q, k, v = qkv.split(sizes, dim=1)
    y = F.scaled_dot_product_attention(
      self._rope(q),
      self._rope(k),
      v,
      is_causal=True,
      enable_gqa=self.heads != self.kv_heads,
    )
    x = x + self.out(y.transpose(1, 2).reshape(B, L, D))
    gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
    return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
  """A language model or image classifier: embedding, blocks and head.

  Args:
    options: width, depth, num_heads, mlp_dim and length; vocab_size of a
      language model, or patch_size and num_classes of a ViT; num_kv_heads of a
      Llama, and tied_head if its head is its embedding.
  """

  def __init__(self, options: Any):
    super().__init__()
    width, self.vocab = options["width"], options.get("vocab_size")
    llama = "num_kv_heads" in options
    if self.vocab:
      self.embedding = nn.Embedding(self.vocab, width)
      self.head = nn.Linear(width, self.vocab, bias=False)
      if not llama or options.get("tied_head"):
        self.head.weight = self.embedding.weight
    else:
      patch = options["patch_size"]
      self.embedding = nn.Conv2d(3, width, patch, stride=patch)
      self.head = nn.Linear(width, options["num_classes"])
    nn.init.normal_(self.embedding.weight, std=0.02)
    self.position: nn.Parameter | None = None
    if not llama:
      position = torch.randn(1, options["length"], width) * 0.02
      self.position = nn.Parameter(position)
    block = LlamaBlock if llama else Block
    self.blocks = nn.ModuleList(
      [block(options) for _ in range(options["depth"])]
    )
    self.norm = nn.RMSNorm(width, eps=1e-5) if llama else nn.LayerNorm(width)

  def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the loss of tokens [B, L] or images [B, 3, H, W]."""
    x = self.embedding(x)
    if not self.vocab:
      x = x.flatten(2).transpose(1, 2)
    if self.position is not None:
      x = x + self.position
    for block in self.blocks:
      x = block(x)
    x = self.norm(x)
    logits = self.head(x if self.vocab else x.mean(1)).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Timm(nn.Module):
  """A classifier of timm.

  Args:
    options: timm, its name, and arguments of its function.
  """

  def __init__(self, options: Any):
    super().__init__()
    import no_torchvision  # noqa: F401, Before timm.
    import timm

    options = dict(options)
    self.model = timm.create_model(options.pop("timm"), **options)

  def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the loss of images [B, 3, H, W]."""
    return F.cross_entropy(self.model(x).float(), targets)


def main() -> None:
  """Builds the model of the options on the command line, and serves it."""
  options = json.loads(sys.argv[1])
  device = "cuda" if torch.cuda.is_available() else "cpu"
  torch.set_float32_matmul_precision("high")
  torch.manual_seed(0)
  kind = Timm if "timm" in options["model"] else Model
  model = kind(options["model"]).to(device)
  batch = [x.to(device) for x in _batch(options)]
  adam = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
  dtype = getattr(torch, options["dtype"])
  mixed = torch.autocast(device, dtype, enabled=dtype != torch.float32)

  def loss(*batch: torch.Tensor) -> torch.Tensor:
    with mixed:
      return model(*batch)

  def run(steps: int, loss: Any) -> tuple[float, float]:
    wait(device)
    start_secs, start_cpu_secs = time.perf_counter(), time.process_time()
    for _ in range(steps):
      adam.zero_grad()
      loss(*batch).backward()
      nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      adam.step()
    wait(device)
    cpu_secs = time.process_time() - start_cpu_secs
    secs = time.perf_counter() - start_secs
    adam.zero_grad()  # Leaves the memory to other processes of a GPU.
    return secs, cpu_secs

  number = sum(x.numel() for x in model.parameters())
  ready = {"parameters": number, "platform": platform(), "how": "compiled"}
  chosen: Any = torch.compile(loss)
  try:
    with_memory(lambda: run(1, chosen))
  except Exception as e:  # The compiler may not work on this machine.
    chosen = loss
    ready |= {"how": "eager", "why": f"{type(e).__name__}: {e}"[:300]}
  peer_process.serve(ready, lambda steps: run(steps, chosen))


def with_memory(call: Callable[[], Any]) -> None:
  """Calls a function, again while other processes use too much of a GPU.

  Several peers may start at a time. In the end this one keeps only what is in
  use.
  """
  for _ in range(20):
    try:
      call()
      break
    except RuntimeError as e:  # The compiler wraps torch's own error.
      if "out of memory" not in str(e):
        raise
      torch.cuda.empty_cache()
      time.sleep(5)
  else:
    call()
  if torch.cuda.is_available():
    torch.cuda.empty_cache()


def _batch(options: Any) -> list[torch.Tensor]:
  model, number = options["model"], options["batch_size"]
  if "vocab_size" in model:
    shape = (number, model["length"] + 1)
    tokens = torch.randint(model["vocab_size"], shape)
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
  image = torch.randn(number, 3, options["size"], options["size"])
  return [image, torch.randint(model["num_classes"], (number,))]


def platform() -> str:
  """Returns "gpu" or "cpu", as jax calls them."""
  return "gpu" if torch.cuda.is_available() else "cpu"


def wait(device: str) -> None:
  """Waits for all work of a GPU."""
  if device == "cuda":
    torch.cuda.synchronize()


if __name__ == "__main__":
  main()
