"""Files in local folders and object stores.

Open paths.py first: it has one interface for both, and objects.py is its client
for object stores. Any package may import this one; it imports only
bigtrain.config, and tensorstore when an object store is used.
"""
