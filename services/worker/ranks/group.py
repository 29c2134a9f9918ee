"""The process group of one instance's ranks: gloo, or NCCL if each has its own GPU."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
    Work,
)

from ballast.common.addresses import is_ipv6, join_address, split_address
from services.worker.links.channels.nccl import UNWATCHED
from services.worker.ranks.channel import RankLost, Start
from services.worker.ranks.crew import LOAD_S, START_S

_MEET_S = START_S + 60.0  # maximum time for all ranks to join, some of which may still be loading torch
_TOGETHER_S = 30.0  # maximum wait at an all-reduce for the other ranks, which may have to compile a kernel first


class _RankGroup(Protocol):
    """The methods of a process group used here, which torch's stubs lack."""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: AllreduceOptions) -> Work: ...

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: BroadcastOptions) -> Work: ...

    def abort(self) -> None: ...


class RankGroup:
    """Collective operations of the ranks. Implements `Peers`, and broadcasts hidden states."""

    def __init__(self, group: _RankGroup, rank: int, count: int, device: torch.device) -> None:
        self._group = group
        self._rank = rank
        self._count = count
        self._device = device
        self._aborted = False
        self.loading = True  # a rank may wait at an all-reduce for others that are still loading

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def count(self) -> int:
        return self._count

    def sum(self, tensor: torch.Tensor) -> None:
        self._reduce(tensor, ReduceOp.SUM)

    def least(self, number: int) -> int:
        told = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._reduce(told, ReduceOp.MIN)
        return int(told.item())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill each rank's tensor with the contents of rank 0's."""
        try:
            self._group.broadcast([tensor], BroadcastOptions()).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def abort(self) -> None:
        """End collectives that wait for a rank on a GPU. On the host they time out without this."""
        if self._device.type == "cuda":
            self._aborted = True  # set before the result of an aborted all-reduce is visible
            self._group.abort()

    def require_whole(self) -> None:
        """Raise unless all ranks have contributed to the results so far, because on a GPU an aborted all-reduce
        completes like any other.

        Raises:
            RankLost: a rank may be missing.
        """
        if self._aborted:
            raise RankLost(f"rank {self._rank} of {self._count} was left alone in a step")

    def _reduce(self, tensor: torch.Tensor, how: ReduceOp.RedOpType) -> None:
        options = AllreduceOptions()
        if self.loading:
            options.timeout = timedelta(seconds=LOAD_S)
        options.reduceOp = how  # pyright: ignore[reportAttributeAccessIssue] the stubs know the class around it only
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            if self._is_recorded():  # a capture does not wait for other ranks, so none is lost
                raise
            raise self._lost(error) from error

    def _is_recorded(self) -> bool:
        """True during CUDA graph capture."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _lost(self, error: RuntimeError) -> RankLost:
        first_line = str(error).split("\n", 1)[0]
        return RankLost(f"rank {self._rank} of {self._count} was left alone in a step: {first_line}")


def meet(start: Start, store: Store | None = None) -> RankGroup:
    """Form the process group. Called by all ranks. `store`: the rendezvous store on the rank that has opened it; None:
    connect to it.

    Raises:
        RankLost: a rank has not joined.
    """
    rank, count = start.rank, len(start.devices)
    device = torch.device(start.devices[rank])
    places = {(number // start.share, torch.device(each)) for number, each in enumerate(start.devices)}
    each_has_its_own = device.type == "cuda" and len(places) == count  # NCCL refuses two ranks on one GPU
    try:
        store = store or _store_at(start)
        store.set_timeout(timedelta(seconds=_MEET_S))
        group = _nccl(store, rank, count, device) if each_has_its_own else _gloo(store, start)
    except (RuntimeError, OSError) as error:
        raise RankLost(f"rank {rank} of {count} has not met the others: {error}") from error
    return RankGroup(group, rank, count, device)


def _store_at(start: Start) -> Store:
    if start.share == len(start.devices):
        return FileStore(start.meeting, len(start.devices))
    host, port = split_address(start.meeting)
    return TCPStore(host, port, timeout=timedelta(seconds=_MEET_S), wait_for_workers=False)


def open_store(host: str) -> tuple[Store, str]:
    """Open a store for ranks on several hosts. Returns it with its HOST:PORT."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if is_ipv6(host) else socket.AF_INET)
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store takes it over
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, use_libuv=True)
    return store, join_address(host, port)


def _gloo(store: Store, start: Start) -> _RankGroup:
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] the stubs call it Options
    options._devices = [ProcessGroupGloo.create_device(hostname=start.host, lazy_init=False)]
    options._threads = 1
    options._timeout = timedelta(seconds=_TOGETHER_S)
    return cast(_RankGroup, ProcessGroupGloo(store, start.rank, len(start.devices), options))


def _nccl(store: Store, rank: int, count: int, device: torch.device) -> _RankGroup:
    from torch.distributed import ProcessGroupNCCL  # missing in builds for machines without GPUs

    os.environ.update(UNWATCHED)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_TOGETHER_S)
    group = ProcessGroupNCCL(store, rank, count, options)
    group.eager_connect_single_device(device)
    return cast(_RankGroup, group)
