"""Starts ranks on this machine, watches them and ends them all: the only package that spawns.

A rank is `python -m MODULE ARGUMENTS` with torchrun's variables, in a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone and a rank's children can be ended with it. Why this is not torch's elastic agent:
docs/decisions/0002-own-supervisor.md.
"""

from shardwright.launch.hang import OwnWatch, listen_for_dumps
from shardwright.launch.heartbeat import Heartbeat
from shardwright.launch.lock import owned
from shardwright.launch.rank import finish, inside_a_launcher, own_job, refuse_launcher, worker_main
from shardwright.launch.start import run_workers

__all__ = [
    "Heartbeat",
    "OwnWatch",
    "finish",
    "inside_a_launcher",
    "listen_for_dumps",
    "own_job",
    "owned",
    "refuse_launcher",
    "run_workers",
    "worker_main",
]
