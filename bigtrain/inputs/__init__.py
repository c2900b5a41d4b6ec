"""Makes the global batch of any step, from the config alone.

Open `pipeline` first: it shows how a training batch passes through the other
modules. main, evaluators and tools import this package. It imports
preprocessing (`bigtrain.pp`), finds sources (`bigtrain.data`) by name, and
never imports a task, a model or an evaluator. Inference needs only `labels` and
`named_features`.

In this package, sources hold examples, and a row is a place in the batch: row r
of step s has one example. `order` numbers the rows from the start of the run: s
* batch_size + r.
"""
