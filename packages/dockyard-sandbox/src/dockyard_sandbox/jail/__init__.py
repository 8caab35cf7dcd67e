"""The small process that builds namespaces and runs one test process in each.

Everything here runs outside the server, in an interpreter started with ``-I -S`` and an empty
environment, so it imports the standard library only and nothing of the rest of the package.
"""
