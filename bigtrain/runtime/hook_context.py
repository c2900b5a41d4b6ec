"""What a hook sees of the run, and what it can ask for.

A hook receives a `Context` as the argument `context` of its `__init__`:

  class Hook:
    def __init__(self, every, *, context):
      self._every, self._context = every, context

    def after_step(self, step):
      if step % self._every == 0:
        self._context.request_evaluation("val")

hooks.py calls the hooks and carries out what they ask for.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from bigtrain import settings
from bigtrain.settings import ConfigError
from bigtrain.step import guard

# What to do about a state that is corrupt.
POLICIES = ("stop", "rollback")
_MOST_ROLLBACKS = 3


class Corrupt(RuntimeError):
  """The hardware computed, moved or kept wrong bits."""


class End(NamedTuple):
  """How training ended; argument of a hook's `after_train`.

  Attributes:
    how: "finished"; "stopped" by a hook, as a success; "preempted" by a signal;
      "rolled_back" to a checkpoint, from which training starts again; "failed".
    reason: one line; "" if the run finished.
    error: the exception that ended training, or None.
  """

  how: str
  reason: str = ""
  error: BaseException | None = None


class Stop(NamedTuple):
  """A decision to end the run.

  Attributes:
    reason: reason for the log.
    failure: whether the run has failed.
  """

  reason: str
  failure: bool


class Run:
  """The run that hooks see, the same object for all of them.

  Attributes:
    workdir: folder of the run.
    config: the whole config, as a plain dict.
    mesh: device mesh.
    predict_fns: the task's predict functions by name.
    evaluations: names of the evaluations.
    step: number of updates that made `state`.
    state: train state.
    saved_step: step of the newest checkpoint of this run, or None.
    values: see `Context.values`.
    in_row: whether hooks see a row at present.
    scalars: scalars for the next row.
  """

  def __init__(
    self,
    workdir: str,
    config: Mapping[str, Any],
    mesh: Any = None,
    predict_fns: Mapping[str, Any] | None = None,
    evaluations: Iterable[Any] = (),
  ):
    self.workdir = workdir
    self.config = config
    self.mesh = mesh
    self.predict_fns = predict_fns or {}
    self.evaluations = [evaluation.name for evaluation in evaluations]
    self.step = 0
    self.state: Any = None
    self.saved_step: int | None = None
    self.values: dict[str, float] | None = None
    self.scalars: dict[str, Any] = {}
    self.stop: Stop | None = None
    self.save = False
    self.asked_evaluations: set[str] = set()
    self.in_row = False

  def take_asked(self) -> list[Any]:
    """Returns what hooks ask for, as JSON, and forgets it."""
    asked = [self.stop, self.save, sorted(self.asked_evaluations)]
    self.stop, self.save, self.asked_evaluations = None, False, set()
    return asked


class Context:
  """What a hook sees of the run, and what it can ask for.

  A hook receives it as the argument `context` of its `__init__`. The state and
  the requests exist once the run has started, so use them only in the other
  methods.

  Attributes:
    name: name of the hook in config.hooks.
    path: location of the hook in the config, for error messages.
    asks: whether the hook may ask for something outside of `after_row`.
  """

  def __init__(self, name: str, run: Run):
    self.name = name
    self.path = f"config.hooks.{name}"
    self.asks = False
    self._run = run

  @property
  def workdir(self) -> str:
    """Folder of the run."""
    return self._run.workdir

  @property
  def config(self) -> Mapping[str, Any]:
    """The whole config, as a plain dict."""
    return self._run.config

  @property
  def mesh(self) -> Any:
    """Device mesh of the run."""
    return self._run.mesh

  @property
  def predict_fns(self) -> Mapping[str, Any]:
    """The task's functions of (variables, batch, **options), by name."""
    return self._run.predict_fns

  @property
  def step(self) -> int:
    """Number of updates that made `state`."""
    return self._run.step

  @property
  def state(self) -> Any:
    """Train state, arrays on the devices that may not be computed yet.

    The next update overwrites them: copy what must outlive the call.
    """
    return self._run.state

  def variables(self, weights: str = "params") -> dict[str, Any]:
    """The first argument of predict functions.

    Args:
      weights: "params", or "ema" if the run averages its parameters.
    """
    state = self._run.state
    return {"params": state[weights], **state.get("mutable", {})}

  @property
  def values(self) -> dict[str, float]:
    """The step's metrics, for `after_step` of hooks that `needs_values`.

    They have the names of a row: "loss_last" is the loss of this step, "loss"
    the mean over the steps since the last row.
    """
    if self._run.values is None:
      raise RuntimeError(
        f"{self.path}: `values` exist in after_step only, and the hook's class "
        "must declare needs_values = True."
      )
    return self._run.values

  def add_scalars(self, scalars: Mapping[str, Any]) -> None:
    """Adds `<name of the hook>/<name>` to the next row of training.

    Args:
      scalars: numbers, strings, or arrays of one number by name. Arrays on the
        device are fetched when the row is written, without a wait here; they
        must not be part of the state. The newest value of a name counts.

    Raises:
      ConfigError: an evaluation has the name of the hook.
    """
    if self.name in self._run.evaluations:
      raise ConfigError(
        f"{self.path}: an evaluation has the same name, and its metrics begin "
        f"with '{self.name}/' too: rename the hook."
      )
    self._run.scalars |= {f"{self.name}/{k}": v for k, v in scalars.items()}

  def request_save(self) -> None:
    """Asks for a checkpoint of the present state."""
    self._check_asks()
    self._run.save = True

  def request_evaluation(self, *names: str) -> None:
    """Asks for evaluations of the present state.

    Args:
      *names: names in config.evals; all evaluations by default.

    Raises:
      ConfigError: there is no such evaluation.
    """
    self._check_asks()
    for name in names:
      if name not in self._run.evaluations:
        hint = settings.did_you_mean(name, self._run.evaluations)
        raise ConfigError(
          f"{self.path}: there is no evaluation {name!r}.{hint}"
        )
    self._run.asked_evaluations |= set(names or self._run.evaluations)

  def stop(self, reason: str, *, failure: bool = False) -> None:
    """Asks to end the run, after a checkpoint unless it failed.

    Args:
      failure: whether the run has failed; by default it has succeeded. A
        failure wins over a success, else the first one counts.
    """
    self._check_asks()
    if self._run.stop is None or (failure and not self._run.stop.failure):
      self._run.stop = Stop(f"hook {self.name!r}: {reason}", failure)

  def check_policy(self, policy: str) -> str:
    """Returns the option `policy` of a hook that calls `reject_state`.

    Raises:
      ConfigError: it is not one of POLICIES.
    """
    if policy not in POLICIES:
      hint = settings.did_you_mean(policy, POLICIES)
      raise ConfigError(f"{self.path}.policy: no policy {policy!r}.{hint}")
    return policy

  def reject_state(self, reason: str, policy: str) -> NoReturn:
    """Ends the run now, because its state is wrong; nothing more is saved.

    All processes call this at the same step.

    Args:
      policy: "rollback" to return to the newest checkpoint and compute the
        steps again, at most three times; "stop" to fail, as without a
        checkpoint.
    """
    error = Corrupt(f"hook {self.name!r}: {reason}")
    saved = self._run.saved_step
    if policy == "rollback" and saved is not None:
      raise guard.Rollback(error, saved, saved, _MOST_ROLLBACKS)
    raise error

  def _check_asks(self) -> None:
    if not self.asks and not self._run.in_row:
      raise RuntimeError(
        f"{self.path}: to ask for something outside of after_row, the class of "
        "the hook must declare asks = True."
      )
