"""Files in local folders and object stores.

Everything that a run reads or writes goes through here, except the arrays of
checkpoints. Open paths.py first: it has one interface for both kinds of
storage. objects.py is its client for object stores. Any package may import
this one; it imports only bigtrain.settings, and tensorstore when an object
store is used.
"""
