"""``kvpass eval``: what compression costs in quality, every policy on the same prefill and the same physical entries.

One file an idea: :mod:`record` runs a sample once and keeps everything, :mod:`trial` compresses and goes on,
:mod:`metrics` compares with the full cache, :mod:`compare` puts them together for policy objects.
"""
