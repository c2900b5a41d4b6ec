"""Preprocessing ops, written in configs as "decode|resize(224)|flip_lr".

Open `registry` first: it defines what an op is and holds every op by name. An
op registers itself when `parse` imports its module: one of the modules here, or
one listed in `config.pp_modules`. Inputs, evaluation, sources and tools import
this package; it imports only `bigtrain.files`, `bigtrain.text` and
`bigtrain.config`.
"""
