"""Benchmarks beside LlamaIndex's own engines: ``python -m tests.benchmarks`` from the root of the repository.

Everything that is compared is measured in the same run, in turns. Nothing here reaches the network.
"""
