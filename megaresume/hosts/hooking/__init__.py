"""How hooks come into programs that do not know us, whatever the host.

importing.py   act when a module is imported; wrap, chain, never twice; the same in child processes
startup/       what Python runs when such a child starts

Importing this package imports neither torch nor anything else that is heavy.
"""
