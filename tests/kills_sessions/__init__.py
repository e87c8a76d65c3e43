"""Processes are killed while sessions are written: no turn is lost, and none is half written.

python -m tests.kills_sessions --kills 100
"""
