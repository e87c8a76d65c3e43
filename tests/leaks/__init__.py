"""Does anything of one principal ever reach another? Stateful property tests, and ``python -m tests.leaks``."""
