"""What is said of errors of torch's backends: the cause, and whether it lies on this rank.  Their texts are real."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from splitc.errors import SplitcError
from splitc.runtime.errors import BackendError
from splitc.runtime.live import Waits
from splitc.runtime.transport.base import PeerLost
from splitc.runtime.transport.in_flight import cause
from splitc.runtime.transport.torch_transport import TorchTransport

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.3\n{}"
RAISED = (
    "\nException raised from getNCCLComm at /pytorch/torch/csrc/x.cpp:3 (most recent call first):\nframe #0: c10::Error"
)
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
SYSTEM += "Last error:\n"
HINT = "(run with NCCL_DEBUG=WARN for details)"

OWN = {
    "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000": NCCL.format(
        f"invalid usage {HINT}",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000" + RAISED,
    ),
    "ncclUnhandledCudaError: Cuda failure 2 'out of memory'": NCCL.format(
        f"unhandled cuda error {HINT}",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ),
    "ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space "
    "left on device (28)": NCCL.format(
        "unhandled system error",
        SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left "
        "on device (28)",
    ),
    "ncclInternalError: Internal check failed.": NCCL.format(
        "internal error", "ncclInternalError: Internal check failed.\nLast error:\n" + RAISED
    ),
    "ncclInvalidUsage: Unknown NCCL Error": NCCL.format(
        "invalid usage",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error: Unknown NCCL Error\n",
    ),
}
OF_A_PEER = {
    "ncclRemoteError: socketProgress: Connection closed by remote peer node1<57557>": NCCL.format(
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        "Last error:\nsocketProgress: Connection closed by remote peer node1<57557>",
    ),
    "ncclSystemError: socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort": (
        NCCL.format(
            "unhandled system error",
            SYSTEM + "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort",
        )
    ),
    "[Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880, OpType=BROADCAST, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=1800000) ran for 1800902 milliseconds before timing out.": (
        "[Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880, OpType=BROADCAST, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=1800000) ran for 1800902 milliseconds before timing out." + RAISED
    ),
    "[4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: Socket Timeout": (
        "[4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: Socket Timeout"
    ),
}


def raised(error: RuntimeError) -> Exception:
    """What becomes of an error of torch's in an operation of rank 1 of 2."""
    transport = object.__new__(TorchTransport)
    transport.rank, transport.world, transport._timeout, transport.waits = 1, 2, 600.0, Waits()
    with pytest.raises((PeerLost, SplitcError)) as caught, transport.losing_peers("barrier", (0, 1)):
        raise error
    return caught.value


@pytest.mark.parametrize("text", OWN)
def test_what_nccl_refuses_is_an_error_of_the_rank_itself(text: str) -> None:
    assert cause(RuntimeError(OWN[text])) == text
    error = raised(dist.DistBackendError(OWN[text]))
    assert isinstance(error, BackendError) and str(error) == f"rank 1 of 2: barrier: {text}"


@pytest.mark.parametrize("text", OF_A_PEER)
def test_a_peer_that_is_gone_or_late_is_called_that(text: str) -> None:
    assert cause(RuntimeError(OF_A_PEER[text])) == text
    error = raised(dist.DistBackendError(OF_A_PEER[text]))
    assert isinstance(error, PeerLost) and str(error).startswith(f"rank 1 of 2: barrier: {text}; a peer died, or did ")


def test_an_error_of_cuda_is_the_ranks_own_and_one_of_gloo_a_peers() -> None:
    own = raised(RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously"))
    assert isinstance(own, BackendError) and "barrier: CUDA error: device-side assert triggered" in str(own)
    assert isinstance(raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), BackendError)
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:543] Connection closed by peer [127.0.0.1]:33291"
    assert "barrier: Connection closed by peer [127.0.0.1]:33291; a peer died" in str(raised(RuntimeError(gloo)))
