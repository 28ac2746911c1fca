# ruff: noqa: E501  (messages as they are)
"""Whose fault an error is, by its text: each row of the table with real messages, as the libraries word them."""

from __future__ import annotations

import re

import pytest

from clusterddp.failures.exit_status import TABLE, Blame, ExitStatus, find
from clusterddp.failures.stack_traces import uncaught
from clusterddp.messages.reports import End
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_progress import Progress
from clusterddp.supervisor.verdict import Action, RankEnd, judge

NODE, NETWORK, PEER, SCRIPT = Blame.NODE, Blame.NETWORK, Blame.PEER, Blame.SCRIPT
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
WATCHDOG = "c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
REMOTE = """NCCL error: remote process exited or there was a network error, NCCL version 2.20.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer gpu-node1<45074>"""

TEXTS = [
    # Out of memory.
    (SCRIPT, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
    (SCRIPT, "OutOfMemoryError: HIP out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total capacity of 63.98 GiB"),
    (SCRIPT, "OutOfMemoryError: Allocation on device 0 would exceed allowed memory."),
    (SCRIPT, f"AcceleratorError: CUDA error: out of memory{ADVICE}"),
    (SCRIPT, "RuntimeError: Triton Error [CUDA]: out of memory"),
    (SCRIPT, "RuntimeError: CUDA driver error: out of memory"),
    (SCRIPT, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with NCCL_DEBUG=INFO "
             "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
             "Cuda failure 2 'out of memory'"),
    (SCRIPT, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (SCRIPT, "MemoryError: "),
    (SCRIPT, "UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options, "
             "do those steps only if you trust the source of the checkpoint."),
    (SCRIPT, "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
             "tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"),
    # The script's kernels and calls.
    (SCRIPT, f"RuntimeError: CUDA error: device-side assert triggered{ADVICE}"),
    (SCRIPT, f"{WATCHDOG}CUDA error: device-side assert triggered{ADVICE}"),
    (SCRIPT, f"AcceleratorError: CUDA error: an illegal memory access was encountered{ADVICE}"),
    (SCRIPT, "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"),
    (SCRIPT, f"RuntimeError: CUDA error: misaligned address{ADVICE}"),
    (SCRIPT, "RuntimeError: HIP error: an illegal memory access was encountered\nHIP kernel errors might be asynchronously"),
    (SCRIPT, "Memory access fault by GPU node-1 (Agent handle: 0x7f2e) on address 0x7f4a00000000. Reason: Unknown."),
    (SCRIPT, f"RuntimeError: CUDA error: no kernel image is available for execution on the device{ADVICE}"),
    (SCRIPT, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"),
    (SCRIPT, f"RuntimeError: CUDA error: invalid device ordinal{ADVICE}"),
    (SCRIPT, f"AcceleratorError: CUDA error: operation not permitted when stream is capturing{ADVICE}"),
    (SCRIPT, "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
             "the 'spawn' start method"),
    (SCRIPT, f"RuntimeError: CUDA error: operation failed due to a previous error during capture{ADVICE}"),
    (SCRIPT, f"AcceleratorError: CUDA error: operation would make the legacy stream depend on a capturing blocking "
             f"stream{ADVICE}"),
    (SCRIPT, f"AcceleratorError: CUDA error: dependency created on uncaptured work in another stream{ADVICE}"),
    (SCRIPT, "AcceleratorError: CUDA error: the graph update was not performed because it included changes which "
             "violated constraints specific to instantiated graph update"),
    (SCRIPT, f"RuntimeError: CUDA error: too many resources requested for launch{ADVICE}"),
    (SCRIPT, f"RuntimeError: CUDA error: too many blocks in cooperative launch{ADVICE}"),
    (SCRIPT, "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (SCRIPT, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    (SCRIPT, "RuntimeError: Triton Error [CUDA]: invalid argument"),
    (SCRIPT, "RuntimeError: Triton Error [HIP]: Code: 1, Messsage: invalid argument"),
    (SCRIPT, "InductorError: RuntimeError: Triton Error [CUDA]: invalid argument"),
    (SCRIPT, f"RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.{ADVICE}"),
    (SCRIPT, "OutOfResources: out of resource: shared memory, Required: 245760, Hardware limit: 232448."),
    (SCRIPT, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
             "non-contiguous input."),
    (SCRIPT, "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    (SCRIPT, "DistBackendError: NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL "
             "version 2.26.2\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
             "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"),
    # The job's environment.
    (SCRIPT, "BdbQuit: "),
    (SCRIPT, "EOFError: EOF when reading a line"),
    (SCRIPT, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error (run with "
             "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or "
             "external library call failed or device error.\nLast error:\nCall to ibv_reg_mr failed with error Cannot "
             "allocate memory"),
    (SCRIPT, "DistBackendError: NCCL error\nLast error:\nCall to ibv_create_cq failed with error Cannot allocate memory"),
    (SCRIPT, "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
             "false, code: -98, name: EADDRINUSE, message: address already in use"),
    (SCRIPT, "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."),
    (SCRIPT, "OSError: [Errno 98] Address already in use"),
    (SCRIPT, "OSError: [Errno 12] Cannot allocate memory"),
    # Peers.
    (PEER, f"DistBackendError: {REMOTE}"),
    (PEER, f"{WATCHDOG}{REMOTE}"),
    (PEER, "DistBackendError: NCCL communicator was aborted on rank 3."),
    (PEER, f"{WATCHDOG}[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, "
           "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out."),
    (PEER, "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31250"),
    (PEER, "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms "
           "for recv operation to complete"),
    (PEER, "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
    (PEER, "DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (n1, 29500)."),
    (PEER, "PreflightError: the all-reduce of all nodes gave a wrong sum"),
    (PEER, "ConnectionResetError: [Errno 104] Connection reset by peer"),
    (PEER, "BrokenPipeError: [Errno 32] Broken pipe"),
    # The network, or a peer's end that NCCL did not recognize.
    (NETWORK, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error (run with "
              "NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or "
              "external library call failed or device error.\nLast error:\nCall to ibv_modify_qp failed"),
    (NETWORK, "DistBackendError: NCCL error in: NCCLUtils.hpp:275, internal error - please report this issue to the NCCL "
              "developers, NCCL version 2.21.5\nncclInternalError: Internal check failed."),
    (NETWORK, "DistBackendError: NCCL error in: ..."),
    # Devices and drivers.
    (NODE, "RuntimeError: No CUDA GPUs are available"),
    (NODE, "RuntimeError: No HIP GPUs are available"),
    (NODE, "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a "
           "driver from http://www.nvidia.com/Download/index.aspx"),
    (NODE, f"RuntimeError: CUDA error: no CUDA-capable device is detected{ADVICE}"),
    (NODE, "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
           "variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."),
    (NODE, f"AcceleratorError: CUDA error: unknown error{ADVICE}"),
    (NODE, f"AcceleratorError: CUDA error: uncorrectable ECC error encountered{ADVICE}"),
    (NODE, f"RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution{ADVICE}"),
    (NODE, "RuntimeError: Unable to determine the device handle for GPU 0000:1B:00.0: GPU is lost. Reboot the system to "
           "recover this GPU"),
    (NODE, "NVMLError_GpuIsLost: GPU is lost"),
    (NODE, "RuntimeError: GPU 0000:1B:00.0: GPU has fallen off the bus."),
    (NODE, "HW Exception by GPU node-4 (Agent handle: 0x55d8) reason :GPU Hang"),
    (NODE, f"RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable{ADVICE}"),
    (NODE, "RuntimeError: CUDA driver error: device not ready"),
    (NODE, "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    (NODE, "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    (NODE, "RuntimeError: Triton Error [CUDA]: unknown error"),
    (NODE, "RuntimeError: HIP error: unspecified error\nHIP kernel errors might be asynchronously reported"),
    (NODE, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with NCCL_DEBUG=INFO for "
           "details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
           "Cuda failure 999 'unknown error'"),
    (NODE, "[PG ID 0 PG GUID 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
           "monitoring enqueued collectives."),
    (NODE, "DeviceError: the ranks on node n2 need 8 GPUs, but Slurm gave 7"),
    (NODE, "DeviceError: device cuda requested, but no GPU is visible on node n2. Request GPUs (--gpus-per-node)"),
    (NODE, "PreflightError: node n2: the product of two matrices is wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("blame", "text"), TEXTS)
def test_an_error_is_blamed_by_its_text(blame: Blame, text: str) -> None:
    """On the node, its network, a peer or the script; an exception and an abort by torch's watchdog alike."""
    found = find(text)
    assert found is not None and found.blame is blame


def test_every_row_has_an_example_and_says_where_it_comes_from() -> None:
    """Also a cause without a full stop: it is part of a line."""
    found = [find(text) for _, text in TEXTS]
    assert [row.pattern for row in TABLE if row not in found] == []
    assert all(row.source and row.cause and not row.cause.endswith(".") for row in TABLE)


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: bad label",
        "OSError: [Errno 5] Input/output error",
        "KeyError: 'image'",
        "ValueError: bad value 'CUDA error' in config",
        "ValueError: CUDA error: unknown error",
        "AssertionError: expected no NCCL error",
        "ConfigError: CUDA out of memory is caught by `auto_batch`",
        "FileNotFoundError: [Errno 2] No such file or directory: 'gloo/transport/tcp/pair.cc'",
        "RuntimeError: the log has the words CUDA error and no more",
        "ValueError: the connection closed by peer is mentioned",
        "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api",
        "ConnectionError: Error 111 connecting to localhost:6379. Connection refused.",
        "ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
    ],
)
def test_the_scripts_own_errors_are_in_no_row(error: str) -> None:
    """Also if a message has a library's words, and if a connection to something other than a rank was lost."""
    assert find(error) is None


@pytest.mark.parametrize(
    ("error", "full"),
    [
        ("OSError: [Errno 12] Cannot allocate memory", True),
        (
            "DistBackendError: NCCL error\nLast error:\nCall to ibv_reg_mr failed with error Cannot allocate memory",
            False,
        ),
        ("RuntimeError: ibv_reg_mr(address=0x7f, length=4096, access=0xf) failed: Cannot allocate memory", False),
    ],
)
def test_the_limit_of_locked_memory_is_not_the_hosts_memory(error: str, full: bool) -> None:
    """Both have the text of ENOMEM."""
    assert RankEnd(1, "n1", End.EXCEPTION, 1.0, error).out_of_memory is full


@pytest.mark.parametrize(
    ("file", "peer"),
    [
        ("/home/me/train.py", True),
        ("/env/lib/python3.11/site-packages/torch/distributed/rpc/api.py", True),
        ("/env/lib/python3.11/site-packages/redis/connection.py", False),
        ("/usr/lib/python3.11/http/client.py", False),
        ("/usr/lib/python3.11/urllib/request.py", False),
    ],
)
def test_a_connection_that_a_library_has_opened_is_none_to_another_rank(file: str, peer: bool) -> None:
    """Even if that library passes on the error of the socket."""
    lines = [f'  File "/home/me/train.py", line 7, in <module>\n  File "{file}", line 1, in recv\n']
    failure = RankEnd(
        *(1, "n1", End.EXCEPTION, 1.0, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        traceback="".join(["Traceback (most recent call last):\n", *lines]),
        used_clusterddp=True,
    )
    assert failure.lost_peer is peer and failure.by_itself is not peer


LOG = """step 7
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {}
Exception raised from ncclCommWatchdog at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in libc10.so)

Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "train.py", line 7 in <module>
"""


def abort(rank: int, lost_at: float, text: str) -> RankEnd:
    """A rank that torch's watchdog aborted, with this message in its log."""
    thrown = uncaught(LOG.format(text))
    assert thrown is not None
    death = ExitStatus(signal=6, first=rank == 0)
    return RankEnd(
        rank, f"n{rank}", End.DIED, lost_at, f"aborted: {thrown}", thrown=thrown, used_clusterddp=True, death=death
    )


def test_an_abort_is_named_by_its_exception_without_torchs_advice() -> None:
    """The process is killed by SIGABRT, which says nothing."""
    ended = abort(1, 1.0, f"{WATCHDOG}CUDA error: device-side assert triggered{ADVICE}")
    assert (
        ended.sentence()
        == f"rank 1 (n1) aborted: c10::DistBackendError: {WATCHDOG}CUDA error: device-side assert triggered"
    )
    assert uncaught("step 7\nValueError: x\n") is None
    rocm = "HW Exception by GPU node-4 (Agent handle: 0x55d8) reason :GPU Hang"
    assert uncaught(f"step 7\n{rocm}\nAborted (core dumped)\n") == rocm


def test_of_several_aborts_the_one_that_names_no_peer_is_the_first_failure() -> None:
    """Even if it is seen last; and only a device's error counts against a node."""
    peers = [abort(0, 1.0, f"{WATCHDOG}{REMOTE}"), abort(1, 1.1, f"{WATCHDOG}{REMOTE}")]
    assert not any(peer.of_the_node or peer.by_itself for peer in peers)
    for says, of_the_node in (("uncorrectable ECC error encountered", True), ("device-side assert triggered", False)):
        broken = abort(2, 1.2, f"{WATCHDOG}CUDA error: {says}{ADVICE}")
        verdict = judge([*peers, broken], 134, False, lambda: Cause.NONE, Progress(steps=5))
        assert (verdict.first_failure, verdict.action) == (broken, Action.RESTART)
        assert broken.of_the_node is of_the_node


def test_a_device_side_assert_before_the_first_step_ends_the_run() -> None:
    """As an exception of the script would."""
    failed = abort(0, 1.0, f"{WATCHDOG}CUDA error: device-side assert triggered{ADVICE}")
    assert judge([failed], 134, False, lambda: Cause.NONE).action is Action.FAIL
    assert not re.search("signal 6", failed.sentence())
