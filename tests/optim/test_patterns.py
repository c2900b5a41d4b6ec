"""Lists of (regex, value): ill-formed lists, and rules without effect."""

import pytest
from optim.small_training import make

from bigtrain.config.errors import ConfigError


@pytest.mark.parametrize(
  "config, message",
  [
    (
      dict(lr_mults=[(".*/kernal", 2.0)]),
      "config.lr_mults[0]: '.*/kernal': matches no parameter. Did you mean "
      "'kernel'?",
    ),
    (
      dict(lr_mults=[("body/.*", 2.0), ("body/dense/.*", 3.0)]),
      "config.lr_mults[1]: 'body/dense/.*': earlier ones match every parameter",
    ),
    # Rules match whole names, as in config.sharding.
    (dict(lr_mults=[("head", 2.0)]), "config.lr_mults[0]: 'head': matches no"),
    (dict(lr_mults=[("(", 2.0)]), "config.lr_mults: bad regex"),
    (dict(lr_mults={"head/.*": 1}), "expected a list of (regex, multiplier)"),
    (dict(lr_mults=[("head/.*", True)]), "expected a list of (regex, mult"),
    (dict(grad_mults=[("tail/.*", 1.0)]), "config.grad_mults[0]: 'tail/.*'"),
  ],
)
def test_mistakes_in_lists_of_rules_are_explained(config, message):
  with pytest.raises(ConfigError) as e:
    make(**config)
  assert message in str(e.value)
  assert "\n" not in str(e.value)
