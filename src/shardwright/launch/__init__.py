"""Starts, watches and ends the ranks of this machine: the only package that spawns processes.

A rank is `python -m MODULE ARGUMENTS` with torchrun's variables, in a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone and a rank's children can be ended with it. Why this is not torch's elastic agent:
docs/decisions/0002-own-supervisor.md.
"""

from shardwright.launch.hang import Watchdog, answer_hang_reports
from shardwright.launch.heartbeat import Heartbeat
from shardwright.launch.lock import owned
from shardwright.launch.long_work import LongWork
from shardwright.launch.rank import current_job, finish, inside_a_launcher, refuse_launcher, worker_main
from shardwright.launch.start import run_training_ranks, run_workers

__all__ = [
    "Heartbeat",
    "LongWork",
    "Watchdog",
    "answer_hang_reports",
    "current_job",
    "finish",
    "inside_a_launcher",
    "owned",
    "refuse_launcher",
    "run_training_ranks",
    "run_workers",
    "worker_main",
]
