"""The Python half of the stand-in: what a CUDA build of torch has in ``torch._C``, over ``_standin``.

Environment: STANDIN_CUDA_DEVICES (how many; CUDA_VISIBLE_DEVICES selects among them), STANDIN_CUDA_MEMORY_GIB (of
each, default 4), STANDIN_CUDA_DELAY_MS (copies to and from pinned memory are late by this, on their stream; with
STANDIN_CUDA_SEED, each by a random part of it), STANDIN_CUDA_RACES=count (missing synchronization between streams is
counted instead of raised), STANDIN_CUDA_FREES=events (memory may be freed while another stream uses it, if the next
use waits for that: FSDP does so, without record_stream), and what ``standin_watch`` lists: faults, counters, memory of
several processes.
"""

import contextlib
import functools
import os
import socket
import sys
import types
import uuid

import _standin
import standin_watch

_SLEEP_HZ = 1e9  # torch.cuda._sleep's cycles a second


def _visible():
    present = standin_watch.present(int(os.environ["STANDIN_CUDA_DEVICES"]))
    every = range(len(present))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return present
    found = []
    for one in asked.split(","):
        if not one.strip().isdigit() or int(one) not in every:
            break
        found.append(present[int(one)])
    return found


def _memory():
    return int(float(os.environ.get("STANDIN_CUDA_MEMORY_GIB", "4")) * 2**30)


def _number(name):
    return float(os.environ.get("STANDIN_CUDA_" + name) or 0)


def before(name):
    if name == "torch.cuda":
        _into_c()
    elif name == "torch.serialization":
        from torch.storage import UntypedStorage

        def new(cls, *args, device=None, **kwargs):
            torch = sys.modules["torch"]
            if device is not None and torch.device(device).type == "cuda":
                return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
            return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)

        def resize_(storage, size):
            if storage.device.type != "cuda":
                return sys.modules["torch"]._C.StorageBase.resize_(storage, size)
            _standin.resize_storage(storage, size)
            return storage

        UntypedStorage.__new__, UntypedStorage.resize_ = new, resize_
    else:
        import torch._C._distributed_c10d as c10d

        if not hasattr(c10d, "ProcessGroupNCCL"):
            c10d._DEFAULT_PG_NCCL_TIMEOUT = __import__("datetime").timedelta(minutes=10)
            _standin.bind_nccl(c10d)


class _Properties:
    def __init__(self, index, physical):
        self.name, self.major, self.minor = "Stand-in GPU", 8, 0
        self.total_memory, self.multi_processor_count = _memory(), 1
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()}/standin/{physical}")
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = physical, 0, 0
        self.is_integrated = self.is_multi_gpu_board = 0
        self.warp_size, self.max_threads_per_multi_processor, self.gcnArchName = 32, 1024, ""
        self.regs_per_multiprocessor, self.shared_memory_per_block = 65536, 49152
        self.shared_memory_per_multiprocessor, self.shared_memory_per_block_optin = 65536, 65536
        self.L2_cache_size, self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 2**20, 10**6, 10**6, 64

    def __repr__(self):
        return f"_CudaDeviceProperties(name={self.name!r}, uuid={self.uuid}, total_memory={self.total_memory >> 20}MB)"


class _Unsupported:
    def __new__(cls, *args, **kwargs):
        raise RuntimeError(f"the CUDA stand-in has no {cls.__name__}: this needs a GPU")


class _CUDAGraph:
    """Operators are recorded while they run, what they have changed is undone at the end of the capture, and a replay
    runs them again. As on a GPU, replays leave the versions of tensors as they are."""

    capturing = 0

    def __new__(cls, keep_graph=False):
        return object.__new__(cls)

    def capture_begin(self, pool=None, capture_error_mode="global"):
        from torch.utils._python_dispatch import TorchDispatchMode

        calls, before = self._calls, self._before = [], []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                written = _written(func, args, kwargs)
                before.extend((tensor, tensor.clone()) for tensor in written)
                found = func(*args, **kwargs)
                calls.append((func, args, kwargs, written, found))
                return found

        self._recorder = Recorder()
        self._recorder.__enter__()
        _CUDAGraph.capturing += 1

    def capture_end(self):
        _CUDAGraph.capturing -= 1
        self._recorder.__exit__(None, None, None)
        for tensor, value in reversed(self._before):
            _change([tensor], functools.partial(tensor.copy_, value))
        _standin.synchronize()  # nothing has run, for which another stream would have to wait

    def instantiate(self):
        pass

    def replay(self):
        torch = sys.modules["torch"]
        for func, args, kwargs, written, found in self._calls:
            again = _change(written, functools.partial(func, *args, **kwargs))
            pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(again), strict=True)
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old is not new:
                    _change([old], functools.partial(old.copy_, new))

    def reset(self):
        self._calls = []

    def pool(self):
        return (0, 0)


def _written(func, args, kwargs):
    torch, written = sys.modules["torch"], []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    return written


def _change(tensors, act):
    torch = sys.modules["torch"]
    with contextlib.ExitStack() as kept, torch.no_grad():
        for tensor in tensors:
            kept.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        return act()


def _into_c():
    torch = sys.modules["torch"]
    C = torch._C
    visible = _visible()
    _standin.start(len(visible))
    C._has_cuda = True
    bad_fork, initialized = [False], [False]

    class _CudaStreamBase(C.Stream):
        def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0, stream_ptr=0):
            if stream_id or device_type:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            torch.cuda._lazy_init()
            return super().__new__(cls, torch.device("cuda", _standin.device()), priority=priority)

        def __init__(self, *args, **kwargs):
            pass

        priority = 0
        cuda_stream = property(lambda self: self.stream_id)
        priority_range = staticmethod(lambda: (0, -5))

    class _CudaEventBase(C.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            torch.cuda._lazy_init()
            return super().__new__(cls, torch.device("cuda", _standin.device()), enable_timing=enable_timing)

        def __init__(self, *args, **kwargs):
            pass

        def elapsed_time(self, other):
            return _standin.elapsed_ms(self, other)

        cuda_event = property(lambda self: self.event_id)

    def initialize():
        if not visible:
            raise RuntimeError("No CUDA GPUs are available")
        if not initialized[0]:
            # Only now: a process that has not used the devices may fork others that do, with settings of their own.
            os.register_at_fork(after_in_child=lambda: bad_fork.__setitem__(0, True))
            raises = os.environ.get("STANDIN_CUDA_RACES", "raise") == "raise"
            delay_s, patience_s = _number("DELAY_MS") / 1e3, _number("PATIENCE_S")
            _standin.frees_by_events(os.environ.get("STANDIN_CUDA_FREES") == "events")
            _standin.configure(_memory(), delay_s, int(_number("SEED")), patience_s, raises)
            standin_watch.start(visible)
        initialized[0] = True
        cuda = sys.modules["torch.cuda"]
        cuda._get_device_properties = [_Properties(*pair) for pair in enumerate(visible)].__getitem__
        cuda.default_generators = tuple(_standin.generator(i) for i in range(len(visible)))

    def usage(index):
        used, peak, *_ = _standin.memory(index)
        kinds = {"current": used, "peak": peak, "allocated": peak, "freed": peak - used}
        both = {"all": kinds, "small_pool": dict.fromkeys(kinds, 0), "large_pool": kinds}
        counts = {kind: dict.fromkeys(kinds, 0) for kind in both}
        names = "allocated_bytes reserved_bytes active_bytes requested_bytes inactive_split_bytes"
        stats = dict.fromkeys(names.split(), both)
        stats |= dict.fromkeys(("allocation", "segment", "active", "inactive_split"), counts)
        return stats | {"num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}

    def free_and_total(index):
        _standin.touch(index)
        used, _, total, others = _standin.memory(index)
        return total - used - others, total

    def pin(address, size, flags=0):
        return _standin.pin(address, size)

    class CudaError(int):
        success, not_ready = 0, 34

    class cudart(types.SimpleNamespace):
        cudaError = CudaError
        cudaGetErrorString = staticmethod(lambda code: f"CUDA error {int(code)} (stand-in)")
        cudaHostRegister, cudaHostUnregister = staticmethod(pin), staticmethod(_standin.unpin)
        cudaMemGetInfo = staticmethod(free_and_total)
        cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)

    def handle(index, id_):
        return id_, _standin.device() if index is None or index < 0 else index, 1

    nothing = lambda *args, **kwargs: None  # noqa: E731
    provided = {
        "_cudart": cudart(),
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_CudaDeviceProperties": _Properties,
        "_CUDAGraph": _CUDAGraph,
        "_graph_pool_handle": lambda: (0, 0),
        "_cuda_isCurrentStreamCapturing": lambda: _CUDAGraph.capturing > 0,
        "_host_emptyCache": nothing,
        "_cuda_init": initialize,
        "_cuda_isInBadFork": lambda: bad_fork[0],
        "_cuda_getDeviceCount": lambda: len(visible),
        "_cuda_getDevice": _standin.device,
        "_cuda_setDevice": lambda index: (torch.cuda._lazy_init(), _standin.set_device(index))[1],
        "_cuda_exchangeDevice": _standin.exchange_device,
        "_cuda_maybeExchangeDevice": _standin.maybe_exchange_device,
        "_cuda_synchronize": _standin.synchronize,
        "_cuda_getCurrentStream": lambda index: handle(index, _standin.stream(-1 if index is None else index)),
        "_cuda_getCurrentRawStream": _standin.stream,
        "_cuda_getDefaultStream": lambda index: handle(index, 0),
        "_cuda_setStream": lambda stream_id, device_index, device_type: _standin.set_stream(device_index, stream_id),
        "_cuda_getCompiledVersion": lambda: 0,
        "_cuda_getArchFlags": lambda: None,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_sleep": lambda cycles: _standin.sleep(cycles / _SLEEP_HZ),
        "_cuda_memoryStats": usage,
        "_cuda_resetPeakMemoryStats": _standin.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": nothing,
        "_cuda_emptyCache": _standin.empty_cache,
        "_cuda_ipc_collect": nothing,
        "_cuda_setMemoryFraction": nothing,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_set_sync_debug_mode": _standin.set_sync_mode,
        "_cuda_get_sync_debug_mode": _standin.sync_mode,
        "_nccl_version": lambda: 22703,
        "_nccl_version_suffix": lambda: b"standin",
    }
    for name, value in provided.items():
        setattr(C, name, value)
