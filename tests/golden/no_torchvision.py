"""Imports timm without torchvision, of which its ViTs compute nothing.

torchvision requires another torch than the other scripts. Any name in it is an
empty class here, and any of a class's names a text.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types


class Names(type):
  def __getattr__(cls, name):
    if name.startswith("__"):
      raise AttributeError(name)
    return name


class Module(types.ModuleType):
  __path__ = ()

  def __getattr__(self, name):
    if name.startswith("__"):
      raise AttributeError(name)
    return Names(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] != "torchvision":
      return None
    return importlib.machinery.ModuleSpec(name, self, is_package=True)

  def create_module(self, spec):
    return Module(spec.name)

  def exec_module(self, module):
    pass


# Only while timm is imported: others do well without torchvision.
sys.meta_path.append(Finder())
importlib.import_module("timm")
sys.meta_path.pop()
for module in [x for x in sys.modules if x.partition(".")[0] == "torchvision"]:
  del sys.modules[module]
