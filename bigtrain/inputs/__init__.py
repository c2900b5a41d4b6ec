"""The input: from a config and a step to a global batch on the devices.

Open `pipeline` first: it shows the path of a training batch through the other
modules. main, evaluators and tools import this package. It imports
preprocessing (`bigtrain.pp`), finds sources (`bigtrain.data`) by name, and
never imports a task, a model or an evaluator. Inference needs only `labels`.
"""
