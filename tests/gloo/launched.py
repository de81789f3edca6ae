"""What the ranks of test_launch.py do: `python -m tests.gloo.launched MODE ...`. Torch is imported only where said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.started import LIMIT

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.launch import Heartbeat, LongWork, Watchdog, answer_hang_reports, finish, worker_main
from shardwright.train.signals import StopFlag

FOREVER = 2 * LIMIT  # seconds: longer than a test waits for what must end
RANK = int(os.environ.get("RANK", "0"))


def _child() -> int:
    """Starts a child that outlives its parent and is deaf to SIGTERM; returns its process id."""
    code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({FOREVER})"
    return subprocess.Popen([sys.executable, "-S", "-c", code]).pid


def exit_with(code: str, only_rank: str = "all") -> int:
    return int(code) if only_rank in ("all", str(RANK)) else 0


def raise_on_one() -> int:
    if RANK == 0:  # reports first, but only that its peer is gone
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    if RANK == 1:
        time.sleep(0.5)
        raise ValueError("the third sample is empty")
    time.sleep(FOREVER)
    return 0


def refuse() -> int:
    if RANK == 1:
        raise ConfigError("tp_size = 3 is wrong.", "", "Set tp_size to 2.")
    time.sleep(FOREVER)
    return 0


def hang_with_children(directory: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = Path(directory) / f"{RANK}.part"
    part.write_text(json.dumps([os.getpid(), _child()]))
    part.rename(Path(directory) / f"{RANK}.json")
    print("waiting on", RANK, file=sys.stderr)
    time.sleep(FOREVER)
    return 0


def stop_when_asked(directory: str, seconds: str) -> int:
    """Saves in `seconds`: the file is complete or not there."""
    with StopFlag() as stop:
        (Path(directory) / f"{RANK}.ready").touch()
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(float(seconds))
        (Path(directory) / f"{RANK}.saved").write_text(str(stop.signal_name))
    return 75


def meet(token: str) -> int:
    """Rank 0 answers on the socket it was handed, rank 1 asks on the port it was told; both know the run's token."""
    if RANK == 0:
        with socket.socket(fileno=int(os.environ["SHARDWRIGHT_STORE_FD"])) as listening:
            listening.settimeout(LIMIT)
            with listening.accept()[0] as peer:
                peer.sendall(token.encode())
        return 0
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with socket.create_connection(address, timeout=LIMIT) as peer:
        return 0 if peer.recv(100).decode() == token else 1


def abort_after_report() -> int:
    from shardwright.launch.rank import report_outcome

    report_outcome({"code": 0})
    if RANK == 0:
        os.abort()
    return 0


def abort_with_words() -> int:
    if RANK == 1:
        words = "  what():  24 vs 20. Received data size doesn't match expected size\n"
        os.write(2, f"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n{words}".encode())
        os.abort()
    time.sleep(600)
    return 0


def crash_once(directory: str) -> int:
    marker = Path(directory) / f"{RANK}.crashed"
    if not marker.exists():
        marker.touch()
        raise ValueError("first time")
    return 0


def record(directory: str) -> int:
    """Writes the configuration of the connection, one file a rank."""
    import torch

    from shardwright.mesh.process_group import connect

    with connect("cpu", LIMIT) as connection:
        value = torch.tensor([connection.rank_info.rank + 1.0])
        torch.distributed.all_reduce(value)
        entry = connection.configuration() | {"sum": value.item(), "torch_threads": torch.get_num_threads()}
        path = Path(directory) / f"{connection.rank_info.started_by}-{connection.rank_info.rank}.json"
        path.write_text(json.dumps(entry))
    return 0


def prepare_for_long(seconds: str, works: str) -> int:
    """The first rank of the host works longer than a collective and a phase may last; the other waits, or rank 0 dies."""
    from shardwright.mesh.process_group import connect
    from shardwright.torch_private import second_store

    heartbeat = Heartbeat.of_this_rank()
    with connect("cpu", float(seconds), 1) as connection:
        place = connection.rank_info
        watch = Watchdog(heartbeat, place.rank, 2, float(seconds) / 5, second_store, dict)

        def work() -> None:
            time.sleep(1.5 * float(seconds) if works == "long" else 0.5)
            if works == "dies":
                os._exit(9)

        LongWork(place, [0], "prepares the run", float(seconds), second_store, heartbeat).run(work)
        watch.close()
    return 0


def train(directory: str, until: str) -> int:
    """Updates of one reduction each, in which the ranks agree to stop."""
    import torch

    from shardwright.mesh.process_group import connect

    with StopFlag() as stop, connect("cpu", LIMIT, 1):
        # like a loader, a fork that holds copies of the sockets; a child of multiprocessing would end with its parent
        if os.fork() == 0:
            time.sleep(FOREVER)
        for update in range(10**6):
            if until == "raise" and RANK == 1 and update == 20:
                raise ValueError("the third sample is empty")
            asked = torch.tensor([float(stop.requested)])
            torch.distributed.all_reduce(asked)
            (Path(directory) / f"{RANK}.json").write_text(
                json.dumps([os.getpid(), update, stop.requested, asked.item() > 0])
            )
            if asked.item():
                break
            time.sleep(0.01)
    return 75


def stuck(how: str) -> int:
    """Rank 1 does not come back from its data, or is stopped there; rank 0 waits in the reduction of the same update."""
    answer_hang_reports()
    heartbeat = Heartbeat.of_this_rank()
    heartbeat.begin(3)
    heartbeat.update = 4
    heartbeat.enter("data")
    if RANK == 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        read_rows()
    heartbeat.enter("reduce")
    time.sleep(FOREVER)
    return 0


def read_rows() -> None:
    time.sleep(FOREVER)


def stuck_in_a_chain() -> int:
    """Rank 2 sleeps in code of its own, rank 1 waits for a message of it, rank 0 for rank 1 in a group of both.

    All are in the same phase. Rank 2 has begun to receive from rank 0, which has not sent, and does not wait for it.
    """
    import torch
    import torch.distributed as dist

    from shardwright.measure.flight_recorder import count_transfers, issued
    from shardwright.mesh.process_group import connect

    count_transfers()
    answer_hang_reports(issued)
    with connect("cpu", 60, 1):
        pair = dist.new_group([0, 1])
        given = torch.ones(3)
        if RANK == 0:
            dist.recv(torch.empty(3), 2, tag=4)
        if RANK == 2:
            dist.send(given, 0, tag=4)
        heartbeat = Heartbeat.of_this_rank()
        heartbeat.begin(3)
        heartbeat.update = 4
        heartbeat.enter("forward_backward")
        if RANK == 2:
            held = dist.irecv(given, 0, tag=5)
            assert held is not None
            read_rows()
        if RANK == 1:
            dist.recv(given, 2, tag=4)
        dist.all_reduce(given, group=pair)
    return 0


def tell(directory: str) -> int:
    """Prints to both streams until it is asked to stop, then saves."""
    with StopFlag() as stop:
        (Path(directory) / f"{RANK}.ready").touch()
        while not stop.requested:
            print("update 3", flush=True)
            print("a warning", file=sys.stderr, flush=True)
            time.sleep(0.01)
        for stream in (sys.stdout, sys.stderr):
            print("Saved.", file=stream, flush=True)
        (Path(directory) / f"{RANK}.saved").write_text(str(stop.signal_name))
    return 75


def stuck_in_save() -> int:
    """Rank 1 does not come back from a save, which may be long; a collective of rank 0 times out."""
    answer_hang_reports()
    heartbeat = Heartbeat.of_this_rank()
    heartbeat.begin(3)
    heartbeat.update = 4
    heartbeat.enter("save")
    if RANK == 1:
        read_rows()
    time.sleep(1)
    raise RuntimeError("Application timeout caused pair closure")


def slow_but_alive() -> int:
    """An evaluation of many batches and a long save, each over the limit of three seconds."""
    heartbeat = Heartbeat.of_this_rank()
    heartbeat.begin(3)
    heartbeat.update = 4
    heartbeat.enter("evaluate")
    for _ in range(20):
        time.sleep(0.2)
        heartbeat.beat()
    heartbeat.enter("save")
    time.sleep(4)
    return 0


def needs_two(directory: str) -> int:
    """Fails before its first update on more than two ranks."""
    heartbeat = Heartbeat.of_this_rank()
    if int(os.environ["WORLD_SIZE"]) > 2:
        raise ValueError("device 3 is gone")
    heartbeat.begin(0)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (Path(directory) / f"{RANK}.json").write_text(json.dumps([os.environ["WORLD_SIZE"], restarts]))
    return 0


def crash_after_updates() -> int:
    """Fails after its first update, on any number of ranks."""
    heartbeat = Heartbeat.of_this_rank()
    heartbeat.begin(0)
    heartbeat.update = 1
    heartbeat.enter("data")
    raise ValueError(f"on {os.environ['WORLD_SIZE']} ranks")


def refuse_for_good() -> int:
    raise ShardwrightError("The loss is not finite.", "", "Lower the learning rate.")


def stopped_while_loading(directory: str) -> int:
    """Asks for signals only a second after it has said that it is there."""
    (Path(directory) / f"{RANK}.json").write_text(json.dumps(os.getpid()))
    time.sleep(1)
    with StopFlag() as stop:
        for _ in range(200):
            if stop.requested:
                return 75
            time.sleep(0.01)
    return 75 if RANK else 0  # only rank 0 is asked


MODES = {
    function.__name__: function
    for function in (
        exit_with,
        raise_on_one,
        refuse,
        hang_with_children,
        stop_when_asked,
        meet,
        abort_after_report,
        abort_with_words,
        crash_once,
        record,
        prepare_for_long,
        train,
        stuck,
        stuck_in_a_chain,
        tell,
        stuck_in_save,
        slow_but_alive,
        needs_two,
        crash_after_updates,
        refuse_for_good,
        stopped_while_loading,
    )
}

if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    finish(worker_main(lambda: MODES[mode](*arguments)))
