"""Makes coca.npz: logits, embeddings, loss and gradients of Modalities' CoCa.

  PYTHONPATH=modalities/src python tests/golden/make_coca.py

PYTHONPATH needs a checkout of github.com/Modalities/modalities, and what its
models import; commit bf0e6d32 made the file. Modalities does not pad texts, so
each one is read alone, its class token where a padded text has it. The norm and
the projections of the embeddings, which it lacks, are torch's, and the weights
of the loss are the paper's. tests/models/test_coca.py draws the same `inputs`.
"""

import pathlib
import zlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
NEEDS = ("modalities", "einops", "torch")
V, L, N, D, H, F, DEPTH = 11, 6, 3, 8, 2, 12, 2
IMAGE_SIZE, PATCH_SIZE, EPSILON = 8, 4, 1e-6
LENGTHS = (6, 4, 1)  # Of the texts, in tokens.


def inputs() -> tuple[np.ndarray, np.ndarray]:
  """Images and texts, padded with 0."""
  rng = np.random.RandomState(0)
  shape = (len(LENGTHS), IMAGE_SIZE, IMAGE_SIZE, 3)
  image = rng.uniform(-1, 1, shape).astype(np.float32)
  text = rng.randint(1, V, (len(LENGTHS), L))
  return image, np.where(np.arange(L) < np.array(LENGTHS)[:, None], text, 0)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """A parameter by our name; Modalities has no biases after the decoder."""
  rng = np.random.RandomState(zlib.crc32(name.encode()))
  without = name in ("decoder/LayerNorm/bias", "decoder/LogitsDense/bias")
  value = rng.normal(size=shape) * 0.4 * (not without)
  return (value + name.endswith("scale")).astype(np.float32)


def pairs() -> dict[str, tuple[str, tuple[int, ...], str]]:
  """{Modalities' name: (ours, our shape, how their layouts differ)}."""
  result = {}

  def norm(theirs: str, ours: str, bias: bool) -> None:
    result[f"{theirs}.weight"] = f"{ours}/scale", (D,), "same"
    if bias:
      result[f"{theirs}.bias"] = f"{ours}/bias", (D,), "same"

  def attention(theirs: str, ours: str, bias: bool) -> None:
    for name, part in (("wq", "query"), ("wk", "key"), ("wv", "value")):
      kernel = f"{ours}/{part}/kernel"
      result[f"{theirs}.{name}.weight"] = kernel, (D, H, D // H), "in"
      if bias:
        name = f"{theirs}.{name}.bias"
        result[name] = f"{ours}/{part}/bias", (H, D // H), "flat"
    kernel = f"{ours}/out/kernel"
    result[f"{theirs}.c_proj.weight"] = kernel, (H, D // H, D), "out"
    if bias:
      result[f"{theirs}.c_proj.bias"] = f"{ours}/out/bias", (D,), "same"

  def mlp(theirs: str, ours: str, bias: bool) -> None:
    for i, (rows, columns) in enumerate(((D, F), (F, D))):
      name = f"{ours}/Dense_{i}/kernel"
      result[f"{theirs}.fc{i + 1}.weight"] = name, (rows, columns), "in"
      if bias:
        name = f"{ours}/Dense_{i}/bias"
        result[f"{theirs}.fc{i + 1}.bias"] = name, (columns,), "same"

  image = "vision_encoder"
  p, patches = PATCH_SIZE, (IMAGE_SIZE // PATCH_SIZE) ** 2
  name = f"{image}.embedding_fn.conv"
  result[f"{name}.weight"] = "encoder/embedding/kernel", (p, p, 3, D), "conv"
  result[f"{name}.bias"] = "encoder/embedding/bias", (D,), "same"
  name = f"{image}.positional_embedding_fn.weight"
  result[name] = "encoder/pos_embedding", (1, patches, D), "row"
  for i in range(DEPTH):
    theirs = f"{image}.blocks.{i}"
    ours = f"encoder/Transformer/encoderblock_{i}"
    norm(f"{theirs}.norm1", f"{ours}/LayerNorm_0", True)
    name = f"{ours}/MultiHeadDotProductAttention_0"
    attention(f"{theirs}.attention", name, True)
    norm(f"{theirs}.norm2", f"{ours}/LayerNorm_1", True)
    mlp(f"{theirs}.mlp", f"{ours}/MlpBlock_0", True)
  norm("attn_pool.ln_1", "encoder/Transformer/encoder_norm", True)
  result["vision_queries"] = "caption_pool/probe", (1, N + 1, D), "row"
  name = "caption_pool/MultiHeadDotProductAttention_0"
  attention("attn_pool.attn", name, True)
  norm("attn_pool.ln_2", "caption_pool/LayerNorm_0", True)

  name, text = "text/EmbedTargets/embedding", "text_decoder.transformer"
  result[f"{text}.wte.weight"] = name, (V, D), "same"
  result[f"{text}.wpe.weight"] = "pos_embedding_decoder", (1, L + 1, D), "row"
  result["text_decoder.cls_token"] = "cls", (1, 1, D), "same"
  both = "multimodal_decoder.transformer"
  for i in range(DEPTH):
    theirs, ours = f"{text}.h.{i}", f"text/EncDecBlock{i}"
    norm(f"{theirs}.ln_1", f"{ours}/LayerNorm1", False)
    attention(f"{theirs}.attn", f"{ours}/SelfAttn", False)
    norm(f"{theirs}.ln_2", f"{ours}/LayerNorm3", False)
    mlp(f"{theirs}.mlp", f"{ours}/MLP", False)
    theirs, ours = f"{both}.h.{i}", f"decoder/EncDecBlock{i}"
    norm(f"{theirs}.ln_1", f"{ours}/LayerNorm1", False)
    attention(f"{theirs}.attn", f"{ours}/SelfAttn", False)
    norm(f"{theirs}.ln_3", f"{ours}/LayerNorm2", False)
    attention(f"{theirs}.cross_attn", f"{ours}/CrossAttn", False)
    norm(f"{theirs}.ln_4", f"{ours}/LayerNorm3", False)
    mlp(f"{theirs}.mlp_2", f"{ours}/MLP", False)
  norm(f"{both}.ln_f", "decoder/LayerNorm", False)
  name = "multimodal_decoder.lm_head.weight"
  result[name] = "decoder/LogitsDense/kernel", (D, V), "in"
  return result


OF_EMBEDDINGS = {
  "text_norm/scale": (D,),
  "text_norm/bias": (D,),
  "text_head/kernel": (D, D),
  "image_head/kernel": (D, D),
  "t": (1,),
}


def write(golden: pathlib.Path = GOLDEN) -> None:
  import torch
  from modalities.loss_functions import CLMCrossEntropyLoss, nce_loss

  shapes = {ours: shape for ours, shape, _ in pairs().values()} | OF_EMBEDDINGS
  params = {
    name: torch.tensor(draw(name, shape), requires_grad=True)
    for name, shape in shapes.items()
  }
  layouts = {
    "same": lambda x: x,
    "row": lambda x: x[0],
    "flat": lambda x: x.flatten(),
    "in": lambda x: x.flatten(1).T,
    "out": lambda x: x.flatten(0, 1).T,
    "conv": lambda x: x.permute(3, 2, 0, 1),
  }
  theirs = {n: layouts[k](params[o]) for n, (o, _, k) in pairs().items()}
  model, (image, text) = _model(), inputs()
  logits, targets, image_z, text_z = [], [], [], []
  for i, length in enumerate(LENGTHS):
    before = [0, *text[i, : min(length, L - 1)]]
    name = "text_decoder.transformer.wpe.weight"
    own = {**theirs, name: theirs[name][[*range(len(before)), L]]}
    pixels = torch.tensor(image[i]).permute(2, 0, 1)[None]
    batch = dict(images=pixels, input_ids=torch.tensor(np.array([before])))
    out = torch.func.functional_call(model, own, (batch,))
    logits.append(out["logits"][0, :length])
    targets.append(torch.tensor(text[i, :length]))
    norm = params["text_norm/scale"], params["text_norm/bias"]
    cls = torch.nn.functional.layer_norm(out["text"][0], (D,), *norm, EPSILON)
    unit = torch.nn.functional.normalize
    text_z.append(unit(cls @ params["text_head/kernel"]))
    image_z.append(unit(out["image"][0] @ params["image_head/kernel"]))
  image_z, text_z = torch.cat(image_z), torch.cat(text_z)
  xent = CLMCrossEntropyLoss("", "")(torch.cat(logits), torch.cat(targets))
  temperature = torch.exp(-params["t"])
  # That of both directions at once has no gradient there.
  directions = (image_z, text_z), (text_z, image_z)
  nce = sum(nce_loss(*z, "cpu", True, temperature) for z in directions) / 2
  loss = 2.0 * xent + 1.0 * nce
  loss.backward()
  arrays = dict(image=image_z, text=text_z, loss=loss, logits=torch.cat(logits))
  # In one array, which takes half the space.
  arrays["gradients"] = torch.cat(
    [params[name].grad.flatten() for name in sorted(params)]
  )
  arrays = {name: x.detach().numpy() for name, x in arrays.items()}
  np.savez_compressed(golden / "coca.npz", **arrays)


def _model():
  import torch
  from modalities.models.coca import coca_model
  from modalities.models.vision_transformer import vision_transformer_model
  from modalities.nn.attention import AttentionConfig

  attention = AttentionConfig(attention_engine_type="default_attention")
  image = dict(sample_key="images", prediction_key="patches", n_classes=None)
  image |= dict(img_size=IMAGE_SIZE, patch_size=PATCH_SIZE, n_layer=DEPTH)
  image |= dict(patch_stride=PATCH_SIZE, n_head=H, n_embd=D)
  image |= dict(add_cls_token=False, attention_config=attention)
  text = dict(sample_key="input_ids", prediction_key="logits", vocab_size=V)
  text |= dict(n_layer_text=DEPTH, n_layer_multimodal_text=DEPTH, n_head=H)
  text |= dict(n_embd=D, ffn_hidden=F, dropout=0.0, bias=False, block_size=L)
  text |= dict(activation="gelu", epsilon=EPSILON, attention_config=attention)
  model = coca_model.CoCa(
    prediction_key="logits",
    vision_cls_prediction_key="image",
    text_cls_prediction_key="text",
    vision_embd_prediction_key="patches",
    text_embd_prediction_key="states",
    n_vision_queries=N,
    n_pool_head=H,
    bias_attn_pool=True,
    epsilon_attn_pool=EPSILON,
    vision_encoder_config=vision_transformer_model.VisionTransformerConfig(
      **image
    ),
    text_decoder_config=coca_model.TextDecoderConfig(**text),
  )
  # Its config has no size of these MLPs.
  make = vision_transformer_model.VisionTransformer
  model.vision_encoder = make(ffn_hidden=F, **image)
  for module in model.modules():
    if isinstance(module, torch.nn.LayerNorm):
      module.eps = EPSILON
  # The paper's embedding and output layer are two.
  text = model.text_decoder.transformer
  text.wte.weight = torch.nn.Parameter(text.wte.weight.detach().clone())
  return model


if __name__ == "__main__":
  write()
