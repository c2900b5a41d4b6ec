"""Preprocessing ops, written in configs as "decode|resize(224)|flip_lr".

Open `registry` first: it defines what an op is and holds every op by name. An
op registers itself when its module is imported. `parse` imports the `ops_*`
modules and `randaug` here, and the modules listed in `config.pp_modules`, and
then looks up each name of the string. Inputs, evaluation, sources and tools
import this package; it imports only `bigtrain.files` and `bigtrain.settings`.
"""
