"""The input: from a config and a step to a global batch on the devices.

Open `pipeline` first: it makes the training input and shows the path of a
batch through the other modules. `eval_input` is its counterpart for
evaluation. main, evaluators and tools import this package. It imports
preprocessing (`bigtrain.pp`), finds sources (`bigtrain.data`) by name, and
never imports a task, a model or an evaluator. Of this package, `labels` is all
that inference needs.
"""
