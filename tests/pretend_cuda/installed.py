"""Makes the pretend device what `torch.cuda` and `torch.accelerator` show, in this process.

Import this module before torch: the library of hooks must be loaded before torch asks whether there is a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if "torch" in sys.modules:
    raise RuntimeError("import tests.pretend_cuda.installed before torch")
_TORCH = Path(importlib.util.find_spec("torch").submodule_search_locations[0])  # type: ignore[union-attr,index]
BUILT = Path(os.environ["PRETEND_CUDA"])
"""The directory of the built libraries (`tests/pretend_cuda/build.py`)."""
ctypes.CDLL(str(_TORCH / "lib/libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
hooks = ctypes.CDLL(str(BUILT / "libhooks.so"), ctypes.RTLD_GLOBAL)
hooks.pretend_pin.argtypes, hooks.pretend_pin.restype = (ctypes.c_void_p, ctypes.c_size_t), None
hooks.pretend_unpin.argtypes, hooks.pretend_unpin.restype = (ctypes.c_void_p,), ctypes.c_bool

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402

_spec = importlib.util.spec_from_file_location("pretend_cuda_device", BUILT / "pretend_cuda_device.so")
assert _spec is not None and _spec.loader is not None
device_ = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device_)

NAME, MEMORY = "NVIDIA H100 80GB HBM3", 85_520_809_984
Note = tuple[str, str, str]
"""(kind, what, stack): `wait` where the host waits until the device has nothing to do, `late` where the device has more work
queued than the host waits for, `pageable` where it waits since the memory of a copy is not pinned, `h2d` and `d2h` for copies
beside the host's work, `never waited` for collectives. A thread beside training may wait: `wait of a thread`."""
notes: list[Note] = []
breaches: list[str] = []
"""Breaches of CUDA's rules in this process."""
_HERE = str(Path(__file__).resolve().parent)
_OPERATORS = str(Path(__file__).resolve().parent / "operators.py")
_violations = os.environ.get("PRETEND_CUDA_VIOLATIONS")


def _stack(limit: int) -> str:
    frames = [
        f for f in traceback.extract_stack() if _HERE not in f.filename and "torch/utils/_contextlib" not in f.filename
    ]
    short = [f"{f.filename.split('site-packages/')[-1].split('src/')[-1]}:{f.lineno} {f.name}" for f in frames[-limit:]]
    return " < ".join(reversed(short))


def _beside() -> bool:
    """Whether this is a thread that the program has started, beside the one that launches the work of the GPU.

    Autograd's threads, which launch backward, are strange to Python.
    """
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def _on_note(kind: str, what: str) -> None:
    if any(frame.filename == _OPERATORS for frame in traceback.extract_stack(limit=20)):
        return  # what stands for a kernel copies on the host
    if kind in ("wait", "pageable") and _beside():
        kind = f"{kind} of a thread"
    notes.append((kind, what, _stack(8)))


def _on_violation(text: str) -> None:
    breaches.append(text)
    line = f"{text}\n    {_stack(12)}\n"
    sys.stderr.write(f"pretend CUDA: {line}")
    if _violations:
        with open(_violations, "a", encoding="utf-8") as file:
            file.write(line)


@contextlib.contextmanager
def logging() -> Iterator[list[Note]]:
    """While it is open, `notes` grows."""
    device_.log(True)
    try:
        yield notes
    finally:
        device_.log(False)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return device_.current_device() if index is None else index


class Event:
    """`torch.cuda.Event`: a moment on the clock of a stream."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._clock: Any = None
        self._seconds, self._asked = 0.0, False

    def record(self, stream: Stream | None = None) -> None:
        self._clock = device_.recorded((stream or current_stream()).key)
        self._seconds, self._asked = time.perf_counter(), False

    def wait(self, stream: Stream | None = None) -> None:
        if self._clock is not None:
            device_.stream_waits((stream or current_stream()).key, self._clock)

    def query(self) -> bool:
        """Not at the first question: work ends as late as it may. After the answer yes, the host may read its results."""
        if self._clock is not None and self._asked:
            device_.host_waits(self._clock)
        done, self._asked = self._clock is None or self._asked, True
        return done

    def synchronize(self) -> None:
        if self._clock is not None:
            (device_.note_late if device_.leaves_work(self._clock) else device_.note_wait)("Event.synchronize")
            device_.host_waits(self._clock)

    def elapsed_time(self, other: Event) -> float:
        return (other._seconds - self._seconds) * 1e3


class Stream:
    """`torch.cuda.Stream`."""

    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **options: Any) -> None:
        self.device = torch.device("cuda", _index(device))
        self.stream_id, self.priority = device_.new_stream() if stream_id is None else stream_id, priority
        self.key = device_.key_of(self.device.index, self.stream_id)

    @property
    def device_index(self) -> int:
        return self.device.index

    def wait_stream(self, other: Stream) -> None:
        device_.stream_waits(self.key, device_.recorded(other.key))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        device_.note_wait("Stream.synchronize")
        device_.host_waits(device_.recorded(self.key))

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __enter__(self) -> Stream:
        self._context = stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._context.__exit__(*details)


def default_stream(device: Any = None) -> Stream:
    return Stream(_index(device), stream_id=0)


def current_stream(device: Any = None) -> Stream:
    return Stream(_index(device), stream_id=device_.stream_id(_index(device)))


def set_stream(chosen: Stream | None) -> None:
    """Makes the device of the stream the current one too, as torch does."""
    if chosen is not None:
        set_device(chosen.device.index)
        device_.set_stream_id(chosen.device.index, chosen.stream_id)


def set_device(device: Any) -> None:
    """Of another rank's GPU: a breach, since CUDA makes a context there."""
    index = _index(device)
    if index < 0 or index == device_.current_device():
        return
    device_.set_device(index)
    if _own and index != _own[0]:
        device_.violate(f"cudaSetDevice({index}) by the rank of cuda:{_own[0]}, which makes a context there")


_own: list[int] = []  # the GPU of this rank, once the process group binds it


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[Stream | None]:
    """`torch.cuda.stream`: at its end the device that was current before is current again."""
    if chosen is None:
        yield None
        return
    before, inner = current_stream(), None
    if before.device != chosen.device:
        inner = current_stream(chosen.device)
    set_stream(chosen)
    try:
        yield chosen
    finally:
        if inner is not None:
            set_stream(inner)
        set_stream(before)


class device:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = device_.current_device()
        if self._index >= 0:
            device_.set_device(self._index)

    def __exit__(self, *details: Any) -> None:
        device_.set_device(self._before)


def _synchronize(device: Any = None) -> None:
    device_.note_wait("synchronize")
    device_.host_waits(device_.all_streams())


def _stats() -> OrderedDict[str, int]:
    now, peak = device_.memory()
    counted = ("allocated_bytes", "reserved_bytes", "active_bytes")
    found = {f"{name}.all.{kind}": value for name in counted for kind, value in (("current", now), ("peak", peak))}
    return OrderedDict(found | {"num_alloc_retries": 0, "num_ooms": 0})


class _NCCLMeta(type):
    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, torch._C._distributed_c10d.Backend)


class ProcessGroupNCCL(metaclass=_NCCLMeta):
    """gloo behind collectives that complete as late as they may."""

    class Options:
        is_high_priority_stream = False

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        from datetime import timedelta

        inner = c10d.ProcessGroupGloo(store, rank, size, timeout=getattr(options, "_timeout", timedelta(seconds=600)))
        inner.options.global_ranks_in_group = list(getattr(options, "global_ranks_in_group", [])) or list(range(size))
        inner.options.group_name = getattr(options, "group_name", "")
        made.append(size)
        return device_.make_late(inner)


made: list[int] = []
"""Sizes of the NCCL groups of this process."""


def _register(address: int, size: int, flags: int) -> int:
    hooks.pretend_pin(address, size)
    return 0


def _unregister(address: int) -> int:
    return 0 if hooks.pretend_unpin(address) else 1


def install() -> None:
    """Replaces what a process of this machine's torch says of CUDA."""
    properties = SimpleNamespace(
        name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, gcnArchName="",
        regs_per_multiprocessor=65536, warp_size=32, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    now_and_peak = device_.memory
    shown: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
        "_initialized": True, "is_built": lambda: True, "_is_in_bad_fork": lambda: False,
        "device_count": device_.device_count, "current_device": device_.current_device, "set_device": set_device,
        "device": device, "synchronize": _synchronize, "Stream": Stream, "Event": Event, "stream": stream,
        "current_stream": current_stream, "default_stream": default_stream, "set_stream": set_stream,
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "memory_stats": lambda device=None: _stats(), "memory_allocated": lambda device=None: now_and_peak()[0],
        "memory_reserved": lambda device=None: now_and_peak()[0], "max_memory_allocated": lambda device=None: now_and_peak()[1],
        "max_memory_reserved": lambda device=None: now_and_peak()[1], "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "reset_peak_memory_stats": lambda device=None: device_.reset_peak(), "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
    }  # fmt: skip
    for name, value in shown.items():
        setattr(torch.cuda, name, value)
    accelerator: dict[str, Any] = {
        "is_available": lambda: True, "device_count": device_.device_count, "current_device_index": device_.current_device,
        "current_accelerator": lambda check_available=False: torch.device("cuda"), "set_device_index": set_device,
        "synchronize": _synchronize, "memory_stats": lambda device=None, /: _stats(), "current_stream": current_stream,
        "set_stream": set_stream, "memory_allocated": lambda device=None, /: now_and_peak()[0],
        "reset_peak_memory_stats": lambda device=None, /: device_.reset_peak(),
    }  # fmt: skip
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, value)
    torch._C._get_accelerator = lambda check=None: torch.device("cuda")  # type: ignore[assignment]
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True  # type: ignore[assignment]
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment]
    torch.Tensor.record_stream = lambda self, stream: device_.record_stream(self, stream.key)  # type: ignore[method-assign]
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        device_.resize_storage(self, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    device_.on_note(_on_note)
    device_.on_violation(_on_violation)
    profile = torch.profiler.profile

    def without_cuda(*arguments: Any, activities: Any = None, **options: Any) -> Any:
        kept = [a for a in activities or [] if a != torch.profiler.ProfilerActivity.CUDA]
        return profile(*arguments, activities=kept, **options)

    torch.profiler.profile = without_cuda  # type: ignore[misc,assignment]
    begin = dist.init_process_group

    def init_process_group(*arguments: Any, **options: Any) -> None:
        if options.get("device_id") is not None:
            _own[:] = [options["device_id"].index]
            device_.bind(_own[0])
        begin(*arguments, **options)

    dist.init_process_group = c10d.init_process_group = init_process_group  # type: ignore[assignment]
    from tests.pretend_cuda import operators

    operators.register(device_)
    if os.environ.get("PRETEND_CUDA_NOTES"):
        from tests.pretend_cuda import noted

        noted.watch(os.environ["PRETEND_CUDA_NOTES"])
