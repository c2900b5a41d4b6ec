"""The `Predictor`: a trained model, with methods to classify, caption or chat.

`bigtrain.load` makes one. Which methods a model has depends on the names of its
task's predict functions (`Predictor.can`). All methods work in the same way:
they preprocess pictures or texts into features, `run` a predict function on
batches of features, and turn the resulting arrays into dicts. `run` can also
call the predict functions of a user's own task.

Legend: B batch, C classes, E embedding, L length.
"""

import collections
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain import sharding
from bigtrain.arrays.types import Batch, PaddedIds, Params, Variables
from bigtrain.config import modules, settings
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
)
from bigtrain.inference import ops, picture_prompts, preprocessing, saved
from bigtrain.inputs import labels
from bigtrain.inputs.named_features import Features
from bigtrain.objective import building, task_functions, task_sum
from bigtrain.pp import registry
from bigtrain.text import decoding, tokenizers

# Predict functions that embed an image; the first one that a task has is used.
_EMBED_IMAGE = ("image", "enc_rep", "pre_logits")
# Token sequences are padded to a power of two, at least this one, so that few
# programs compile. A smaller one would compile more programs for short texts.
_SHORTEST_LENGTH = 16


class Predictor:
  """A trained model with its parameters, preprocessing and tokenizer.

  `batch_size` is the largest number of examples processed at a time, on all
  devices together. It is rounded up to a multiple of the number of devices that
  split a batch.
  """

  def __init__(
    self,
    checkpoint: saved.Saved,
    variables: Variables,
    mesh: jax.sharding.Mesh,
    given: ops.Overrides,
    batch_size: int,
  ):
    self._saved, self._given = checkpoint, given
    self.mesh, self.variables = mesh, variables
    self.config, self.step = checkpoint.config, checkpoint.step
    if given.tokenizer is not None:
      data = checkpoint.data
      self.config = ops.with_tokenizer(self.config, data, given.tokenizer)
    config = settings.Config(self.config)
    self.task = building.task(config)
    _, self.model = building.model(config)
    self._fns = self.task.predict_fns(self.model)
    self._compiled: dict[str, Callable[..., Any]] = {}
    check_number("batch_size", batch_size, least=1, whole=True)
    self._ways = sharding.batch_ways(mesh)
    self.batch_size = -(-batch_size // self._ways) * self._ways
    first, *_ = task_sum.entries(self.task, config)
    self._loss_kind = first.part.kwargs("loss").get("kind", "")
    # An encoder-decoder reads "inputs" and writes "targets".
    sizes = task_functions.vocab_sizes(self.task, self.model)
    self._is_seq2seq = "inputs" in sizes
    # The feature that holds the tokens of a text.
    padded = [name for name, x in sizes.items() if isinstance(x, PaddedIds)]
    self._text_feature = "labels"
    if self._is_seq2seq:
      self._text_feature = "inputs"
    elif padded:
      self._text_feature = padded[0]

  def __repr__(self) -> str:
    task, can = modules.task_names(self.config["task"]), ", ".join(self.can)
    return f"<Predictor {task}, step {self.step}; can {can}>"

  @property
  def params(self) -> Params:
    return self.variables["params"]

  def with_adapter(self, path: str | os.PathLike[str]) -> "Predictor":
    """The same model with other adapters; both share the arrays of the base."""
    checkpoint, variables = saved.with_adapter(
      self._saved, self.variables, os.fspath(path), self.mesh
    )
    return Predictor(
      checkpoint, variables, self.mesh, self._given, self.batch_size
    )

  @functools.cached_property
  def class_names(self) -> list[str] | None:
    if self._given.class_names is not None:
      return labels.read(self._given.class_names, "class_names")
    return self._saved.data.get("class_names", {}).get("labels")

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer | None:
    return ops.tokenizer(self._saved, self._given.tokenizer)

  @functools.cached_property
  def pictures(self) -> preprocessing.Pictures:
    preds = [n for n in ("caption", "logits", *_EMBED_IMAGE) if n in self._fns]
    chain = ops.find(
      self.config,
      "image",
      preds,
      given=self._given.pp,
      evaluation=self._given.evaluation,
    )
    return preprocessing.Pictures(chain, self._saved.data)

  @functools.cached_property
  def texts(self) -> preprocessing.Texts | None:
    """The preprocessing of texts; None if the data were only tokenized."""
    if self._saved.is_published and self._given.pp_text is None:
      return None
    preds = ("embed", "score", "caption", "logits", "text")
    chain = ops.find_text(
      self.config, self._text_feature, preds, self._given.pp_text
    )
    if registry.tokenizer(chain.needs.ops) is None:
      return None
    return preprocessing.Texts(chain)

  @property
  def can(self) -> list[str]:
    """Names of the methods that the model's task supports."""
    fns = {*self._fns}
    # Published encoders have no classes.
    has_head = getattr(self.model, "num_classes", 1) is not None
    possible = {
      "caption": "caption" in fns,
      "generate": "generate" in fns,
      "score": {"generate", "score"} <= fns,
      "embed_texts": "text" in fns,
      "embed_images": bool(fns & {*_EMBED_IMAGE}),
      "classify": "logits" in fns and "generate" not in fns and has_head,
      "zero_shot": {"image", "text"} <= fns or {"score", "caption"} <= fns,
    }
    return [name for name, yes in possible.items() if yes]

  @property
  def preds(self) -> list[str]:
    return [*self._fns]

  def _require(self, method: str) -> None:
    if method not in self.can:
      raise ConfigError(
        f"{method}: a model of the task {self.config.get('task')!r} cannot do "
        f"this; it can {', '.join(self.can) or 'only run(...)'}."
      )

  @property
  def default_method(self) -> str:
    can = self.can
    order = ["caption", "generate", "classify", "embed_images", "embed_texts"]
    if "embed_texts" in can:
      # A model of images and texts embeds them, even if it can also classify.
      order.insert(2, "embed_images")
    for name in order:
      if name in can:
        return name
    raise ConfigError(
      f"predict: the predict functions of the task {self.config.get('task')!r} "
      f"have no common name ({', '.join(self._fns)}); call run(name, features)."
    )

  def predict(self, inputs: Any, **options: Any) -> Any:
    """Predicts what the model was trained to predict, with `default_method`.

    The input is a picture or a text, or a list of them. A picture is a path,
    the bytes of a file, an array [H, W, C] or [H, W], or a PIL image. Returns a
    dict, or a list of them: {"label", "index", "score", "top"}, {"caption"},
    {"embedding"} or {"text"}.
    """
    return getattr(self, self.default_method)(inputs, **options)

  def _map(
    self, inputs: Any, is_one: bool, call: Callable[[Sequence[Any]], list[Any]]
  ) -> Any:
    """Calls a function of batches on a single input, or on a list of inputs."""
    if is_one:
      return call([inputs])[0]
    items = list(inputs)
    results = []
    for start in range(0, len(items), self.batch_size):
      results += call(items[start : start + self.batch_size])
    return results

  def classify(self, pictures: Any, top_k: int = 5) -> Any:
    """Returns the most likely class of each picture, or of each text.

    Each result is {"label": name, "index": class number, "score": probability,
    "top": the `top_k` best classes, as dicts of this kind}. The probabilities
    add up to 1, unless the model was trained with the loss sigmoid_xent.
    """
    self._require("classify")

    def call(items: Sequence[Any]) -> list[Any]:
      if self._text_feature == "tokens":
        features = {"tokens": self._tokens(items)}
      else:
        features = self.pictures(items)
      logits_BC = self.run("logits", features)
      num_classes = logits_BC.shape[-1]
      names = self.class_names or [str(i) for i in range(num_classes)]
      if len(names) != num_classes:
        raise ConfigError(
          f"class_names: expected {num_classes} names, one for each class of "
          f"the model, got {len(names)}."
        )
      scores_BC = _probabilities(logits_BC, self._loss_kind)
      return _ranked(scores_BC, names, top_k)

    return self._map(pictures, _is_one(pictures), call)

  def caption(self, pictures: Any, **options: Any) -> Any:
    """Returns {"caption": text} for each picture.

    The options are passed to the predict function. Their defaults are the
    `pred_kw` of the run's evaluation that uses this function.
    """
    self._require("caption")
    tokenizer = self.need_tokenizer()
    options = {
      "eos_id": tokenizer.eos_id,
      **ops.pred_kw(self.config, "caption", self._given.evaluation),
      **options,
    }

    def call(items: Sequence[Any]) -> list[Any]:
      rows_BL = self.run("caption", self.pictures(items), **options)
      return [{"caption": tokenizer.decode(row)} for row in rows_BL]

    return self._map(pictures, _is_one(pictures), call)

  def embed_images(self, pictures: Any) -> Any:
    """Returns {"embedding": float32 [E]} for each picture."""
    self._require("embed_images")
    name = next(name for name in _EMBED_IMAGE if name in self._fns)
    return self._embed(name, pictures, self.pictures)

  def embed_texts(self, texts: Any) -> Any:
    """Returns {"embedding": float32 [E]} for each text."""
    self._require("embed_texts")

    def features(items: Sequence[str]) -> dict[str, np.ndarray]:
      return {self._text_feature: self._tokens(items)}

    return self._embed("text", texts, features)

  def _embed(
    self,
    pred: str,
    inputs: Any,
    features: Callable[[Sequence[Any]], dict[str, np.ndarray]],
  ) -> Any:
    def call(items: Sequence[Any]) -> list[Any]:
      rows_BE = self.run(pred, features(items))
      return [{"embedding": row} for row in np.asarray(rows_BE, np.float32)]

    return self._map(inputs, _is_one(inputs), call)

  def _tokens(self, texts: Sequence[str]) -> np.ndarray:
    if self.texts is None:
      raise ConfigError(
        "bigtrain.load: the run has no op tokenize; give pp_text=..., such as "
        "\"tokenize(model='c4.model',max_len=64)\"."
      )
    return self.texts(texts)

  def zero_shot(
    self,
    pictures: Any,
    class_names: Sequence[str] | str | None = None,
    prompts: Sequence[str] = ("{}",),
    top_k: int = 5,
  ) -> Any:
    """Returns which of the given names fit each picture best, like `classify`.

    `class_names` may also be the path of a file with one name per line; by
    default the names are those of an evaluation of the run. `prompts` are texts
    with a {} for the name; a captioner uses the first one.
    """
    self._require("zero_shot")
    if class_names is None:
      class_names = ops.evaluated_names(self.config)
    names = labels.read(class_names, "class_names")
    texts_by_prompt = [labels.fill(p, names, "prompts") for p in prompts]
    scores_of: Callable[[dict[str, np.ndarray]], np.ndarray]
    if "score" in self._fns:  # A captioner: how likely is each name?
      fixed = {"class_tokens": self._tokens(texts_by_prompt[0])}

      def scores_of(features: dict[str, np.ndarray]) -> np.ndarray:
        scores_BC = self.run("score", features, fixed=fixed)
        return _probabilities(scores_BC, "softmax")

    else:  # Image and text towers: how similar are the embeddings?
      class_CE = self._class_embeddings(texts_by_prompt)
      scores_of = functools.partial(self._pair_scores, class_CE=class_CE)

    def call(items: Sequence[Any]) -> list[Any]:
      return _ranked(scores_of(self.pictures(items)), names, top_k)

    return self._map(pictures, _is_one(pictures), call)

  def _class_embeddings(
    self, texts_by_prompt: Sequence[Sequence[str]]
  ) -> np.ndarray:
    """For each class, the mean over its prompts, scaled to length 1."""
    by_prompt = []
    for texts in texts_by_prompt:
      by_prompt.append([x["embedding"] for x in self.embed_texts(list(texts))])
    class_CE = np.stack(by_prompt).mean(0)
    norm_C1 = np.linalg.norm(class_CE, axis=-1, keepdims=True)
    return class_CE / (norm_C1 + 1e-8)

  def _pair_scores(
    self, features: dict[str, np.ndarray], class_CE: np.ndarray
  ) -> np.ndarray:
    """Probabilities [B, C], with the learned scale and bias of the loss."""
    image_BE = self.run("image", features)
    logits_BC = image_BE.astype(np.float64) @ class_CE.T.astype(np.float64)
    if "t" in self.params:
      logits_BC *= np.exp(float(self.params["t"][0]))
    if "b" in self.params:
      logits_BC += float(self.params["b"][0])
    # "sigmoid" is the default of the task.
    return _probabilities(logits_BC, self._loss_kind or "sigmoid")

  def generate(self, texts: Any, scores: bool = False, **options: Any) -> Any:
    """Returns {"text": continuation or answer} for each text.

    For a model that reads pictures a text may also be dict(text=...,
    images=[...]), or dict(messages=..., images=[...]) for a conversation.
    With `scores=True` it also has the values of `score`, for the text up to its
    end token. The options are passed to the predict function: for example
    max_new=100 (max_len for a sequence-to-sequence model), temperature=0.8 and
    seed=1. A published model's folder has defaults; otherwise decoding is
    greedy.
    """
    self._require("generate")
    tokenizer = self.need_tokenizer()
    options = {"eos_id": tokenizer.eos_id, **self._saved.generation, **options}
    if self._is_seq2seq and options["eos_id"] is None:
      del options["eos_id"]
    # A prompt may end in the token 0, the default padding.
    parameters = inspect.signature(self._fns["generate"]).parameters
    if not self._is_seq2seq and "pad_id" in parameters:
      options = {"pad_id": -1, **options}
    end_ids = decoding.eos_ids(options.get("eos_id", tokenizer.eos_id))

    def call(items: Sequence[Any]) -> list[Any]:
      prompts = [self._prompt(text) for text in items]
      batch = self._prompt_batch(prompts, options)
      batch |= self._picture_features(items)
      new_BL = self.run("generate", batch, **options)
      ends = [_num_before_end(ids, end_ids) for ids in new_BL]
      results: list[dict[str, Any]] = [
        {"text": tokenizer.decode(ids[:end])} for ids, end in zip(new_BL, ends)
      ]
      if scores:
        # With the end token, which is an answer's last token.
        answers = [ids[: end + 1] for ids, end in zip(new_BL, ends)]
        scored = self.score_ids(list(zip(prompts, answers)))
        results = [{**text, **score} for text, score in zip(results, scored)]
      return results

    is_ids = isinstance(next(iter(texts), None), int | np.integer)
    is_one = is_ids or isinstance(texts, str | Mapping)
    return self._map(texts, is_one, call)

  @functools.cached_property
  def _picture_prompts(self) -> picture_prompts.PicturePrompts:
    return picture_prompts.PicturePrompts(self._saved, self.need_tokenizer())

  def _picture_features(self, items: Sequence[Any]) -> dict[str, np.ndarray]:
    """The features of prompts' pictures; none if no prompt has any."""
    prompts = [item if isinstance(item, Mapping) else {} for item in items]
    if not any(map(picture_prompts.images_of, prompts)):
      return {}
    return self._picture_prompts.features(prompts)

  def _prompt_batch(
    self, prompts: Sequence[np.ndarray], options: Mapping[str, Any]
  ) -> dict[str, np.ndarray]:
    longest = max(len(ids) for ids in prompts)
    length = self._prompt_length(longest, options)
    ids_BL = np.full((len(prompts), length), options.get("pad_id", 0), np.int32)
    for row, ids in zip(ids_BL, prompts):
      row[: len(ids)] = ids
    batch: dict[str, np.ndarray] = {
      "inputs" if self._is_seq2seq else "tokens": ids_BL
    }
    if self._saved.data.get("prompts", {}).get("prefix"):
      batch["prefix"] = np.zeros(len(prompts), np.int32)
    return batch

  def chat(
    self, messages: Any, *, template: str | None = None, **options: Any
  ) -> Any:
    """Returns {"text": answer} for each conversation.

    A conversation is a list of {"role": "user", "content": "..."}. `template`
    names another chat template, as in `text.chat.get`; the options are passed
    to `generate`.
    """
    tokenizer = self.need_tokenizer()
    ids_of = functools.partial(
      self._saved.ids_of_chat, tokenizer, template=template
    )
    if isinstance(messages[0], Mapping):
      return self.generate(ids_of(messages), **options)
    return self.generate([ids_of(each) for each in messages], **options)

  def score(self, prompts: Sequence[str], answers: Sequence[str]) -> list[Any]:
    """Returns how likely each answer is after its prompt.

    Returns:
      For each pair {"log_likelihood": nats, "tokens": number of tokens in the
      answer, "greedy": whether greedy decoding would give exactly these}. The
      answer of an encoder-decoder ends with the end token, as its targets do.
    """
    self._require("score")
    pairs = []
    for prompt, answer in zip(prompts, answers, strict=True):
      ids = self._prompt(prompt)
      if self._is_seq2seq:
        codec = self.need_tokenizer()
        end = [] if codec.eos_id is None else [codec.eos_id]
        pairs.append((ids, np.append(codec.encode(answer), end)))
      else:  # Encoded together, since tokens can depend on their neighbours.
        pairs.append((ids, self._prompt(prompt + answer)[len(ids) :]))
    return self.score_ids(pairs)

  def score_ids(
    self, pairs: Sequence[tuple[Any, Any]], max_length: int | None = None
  ) -> list[dict[str, Any]]:
    """Like `score`, for pairs of token ids.

    If a pair is longer than `max_length`, only its end is used.
    """
    max_length = max_length or getattr(self.model, "max_len", None)
    examples = [self._scored_example(*pair, max_length) for pair in pairs]
    # Examples that are padded to the same length make a batch.
    by_length = collections.defaultdict(list)
    for i, example in enumerate(examples):
      length = _padded_length(max(map(len, example.values())))
      by_length[min(length, max_length or length)].append(i)
    results: list[dict[str, Any]] = [{}] * len(pairs)
    for length, indices in by_length.items():
      members = [examples[i] for i in indices]
      batch = {}
      for name in members[0]:
        rows = [np.pad(x[name], (0, length - len(x[name]))) for x in members]
        dtype = np.float32 if name == "loss_mask" else np.int32
        batch[name] = np.stack(rows).astype(dtype)
      if self._saved.data.get("prompts", {}).get("prefix"):
        # The prefix ends with the last token before the answer.
        ends = [np.argmax(x["loss_mask"]) + 1 for x in members]
        batch["prefix"] = np.asarray(ends, np.int32)
      scores = self.run("score", batch)
      for row, i in enumerate(indices):
        results[i] = {name: x[row].tolist() for name, x in scores.items()}
    return results

  def _scored_example(
    self, context: Any, answer: Any, max_length: int | None
  ) -> dict[str, np.ndarray]:
    """The features of one pair, each [L] without padding."""
    ids = np.asarray([*context, *answer], np.int32)
    if self._is_seq2seq:
      return {"inputs": ids[: len(context)], "targets": np.asarray(answer)}
    if max_length:
      ids = ids[-max_length - 1 :]
    is_answer = np.arange(1, len(ids)) >= len(ids) - len(answer)
    return {"tokens": ids[:-1], "targets": ids[1:], "loss_mask": is_answer}

  def _prompt(self, text: Any) -> np.ndarray:
    """Token ids of a text, or the ids themselves."""
    tokenizer = self.need_tokenizer()
    if isinstance(text, Mapping):
      ids = self._picture_prompts.ids(text)
    elif not isinstance(text, str):
      ids = np.asarray(text, np.int32)
    elif self._is_seq2seq and self.texts is not None:
      ids = np.trim_zeros(self.texts([text])[0], "b")
    else:
      ids = tokenizer.encode(text)
      adds_bos = self._saved.adds_bos(tokenizer)
      if self._is_seq2seq and tokenizer.eos_id is not None:
        ids = np.append(ids, tokenizer.eos_id)
      elif tokenizer.bos_id is not None and (adds_bos or not len(ids)):
        ids = np.insert(ids, 0, tokenizer.bos_id)
    if not len(ids):
      raise ConfigError("generate: expected a text, got an empty one.")
    return ids

  def _prompt_length(self, longest: int, options: Mapping[str, Any]) -> int:
    """The length to pad prompts to, which leaves room for the new tokens."""
    length = _padded_length(longest)
    max_len = getattr(self.model, "max_len", None)
    if max_len is None or self._is_seq2seq:
      return length
    max_new = options.get("max_new", 64)
    if longest + max_new > max_len:
      raise ConfigError(
        f"generate: a text of {longest} tokens and max_new={max_new} are more "
        f"than the model's max_len={max_len}; bigtrain.tools.generate "
        "continues beyond it."
      )
    return min(length, max_len - max_new)

  def need_tokenizer(self) -> tokenizers.Tokenizer:
    if self.tokenizer is None:
      raise ConfigError(
        "bigtrain.load: the run names no tokenizer: give tokenizer=PATH."
      )
    return self.tokenizer

  def run(
    self,
    pred: str,
    features: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any] | None = None,
    **options: Any,
  ) -> Any:
    """Calls a predict function of the task on any number of examples.

    Args:
      pred: name of the predict function.
      features: arrays [B, ...] by name, already preprocessed.
      fixed: features that all examples share, without an axis B.
      **options: options of the predict function.

    Returns:
      The function's results for all examples: a tree of arrays [B, ...].
    """
    fn = self._compile(pred, options)
    arrays = {name: np.asarray(x) for name, x in features.items()}
    total = len(next(iter(arrays.values())))
    results = []
    for start in range(0, total, self.batch_size):
      stop = min(start + self.batch_size, total)
      rows = {name: x[start:stop] for name, x in arrays.items()}
      batch = self._on_devices(rows, stop - start) | dict(fixed or {})
      with jax.set_mesh(self.mesh):
        outputs = jax.device_get(fn(self.variables, batch))
      # Without the padding.
      results.append(jax.tree.map(lambda x, n=stop - start: x[:n], outputs))
    return jax.tree.map(lambda *x: np.concatenate(x), *results)

  def _compile(self, pred: str, options: dict[str, Any]) -> Callable[..., Any]:
    fn = self._fns[check_choice("run: pred", pred, self._fns)]
    check_kwargs(fn, options, pred, ("variables", "batch"))
    key = f"{pred} {sorted(options.items())!r}"
    if key not in self._compiled:

      def of_features(variables: Variables, batch: Batch) -> Any:
        return fn(variables, Features(batch, "run"), **options)

      self._compiled[key] = jax.jit(
        of_features, out_shardings=sharding.replicated(self.mesh)
      )
    return self._compiled[key]

  def _on_devices(
    self, rows: Mapping[str, np.ndarray], number: int
  ) -> dict[str, Any]:
    """Splits a batch over the devices, padded with copies of the last example.

    The number of examples per device is a power of two, so that only a few
    programs are compiled.
    """
    per_device = -(-number // self._ways)
    size = self._ways * (1 << (per_device - 1).bit_length())
    size = min(size, self.batch_size)
    index = np.minimum(np.arange(size), number - 1)
    batch = {name: x[index] for name, x in rows.items()}
    batch["_mask"] = (np.arange(size) < number).astype(np.float32)
    return jax.device_put(batch, sharding.batch(self.mesh))


def _is_one(inputs: Any) -> bool:
  """Whether this is one picture or text, and not a list of them."""
  if isinstance(inputs, np.ndarray):
    return inputs.ndim < 4
  return not isinstance(inputs, list | tuple) and (
    isinstance(inputs, str | bytes | bytearray | os.PathLike)
    or hasattr(inputs, "__array__")
    or not hasattr(inputs, "__iter__")
  )


def _padded_length(length: int) -> int:
  """The next power of two."""
  return max(_SHORTEST_LENGTH, 1 << (length - 1).bit_length())


def _num_before_end(ids_L: np.ndarray, end_ids: Sequence[int]) -> int:
  """Number of tokens before the first end token."""
  ends = np.flatnonzero(np.isin(ids_L, end_ids))
  return int(ends[0]) if ends.size else len(ids_L)


def _ranked(
  scores_BC: np.ndarray, names: Sequence[str], top_k: int
) -> list[dict[str, Any]]:
  check_number("top_k", top_k, least=1, whole=True)
  results = []
  for scores_C in scores_BC:
    best = np.argsort(-scores_C, kind="stable")[:top_k]
    top = [
      {"label": names[i], "index": int(i), "score": float(scores_C[i])}
      for i in best
    ]
    results.append({**top[0], "top": top})
  return results


def _probabilities(logits_BC: np.ndarray, kind: str) -> np.ndarray:
  """Float64 [B, C]. Losses named "sigmoid..." judge each class by itself."""
  logits_BC = logits_BC.astype(np.float64)
  if kind.startswith("sigmoid"):
    return 1 / (1 + np.exp(-logits_BC))
  shifted = np.exp(logits_BC - logits_BC.max(axis=-1, keepdims=True))
  return shifted / shifted.sum(axis=-1, keepdims=True)
