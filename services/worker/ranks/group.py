"""The ranks of one instance as a group of torch's, made once: gloo, or NCCL where each has a GPU of its own."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, FileStore, ProcessGroupGloo, ReduceOp, Store, Work

from services.worker.links.channels.nccl import UNWATCHED
from services.worker.ranks.channel import RankLost

_MEET_S = 60.0  # all are there and have loaded torch
_TOGETHER_S = 30.0  # between the first that comes to a sum and the last: a kernel may be compiled in between


class _Group(Protocol):
    """The part of a process group that is used here; torch's stubs leave it out."""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: AllreduceOptions) -> Work: ...

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: BroadcastOptions) -> Work: ...

    def abort(self) -> None: ...


class RankGroup:
    """`Peers`, and hidden states from the first rank to all."""

    def __init__(self, group: _Group, rank: int, count: int, device: torch.device) -> None:
        self._group = group
        self._rank = rank
        self._count = count
        self._device = device
        self._aborted = False

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
        """Fills everybody's tensor with the first rank's."""
        try:
            self._group.broadcast([tensor], BroadcastOptions()).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def abort(self) -> None:
        """Ends what waits for a rank on a GPU; on the host it has ended by itself."""
        if self._device.type == "cuda":
            self._aborted = True  # before anything computed from such a sum can be seen
            self._group.abort()

    def require_whole(self) -> None:
        """What the device has computed by now is made of all that the ranks have given: on a GPU a sum that is aborted
        ends like any other.

        Raises:
            RankLost: it may not be.
        """
        if self._aborted:
            raise RankLost(f"rank {self._rank} of {self._count} was left alone in a step")

    def _reduce(self, tensor: torch.Tensor, how: ReduceOp.RedOpType) -> None:
        options = AllreduceOptions()
        options.reduceOp = how  # pyright: ignore[reportAttributeAccessIssue] the stubs know the class around it only
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            if self._is_recorded():  # which waits for nobody
                raise
            raise self._lost(error) from error

    def _is_recorded(self) -> bool:
        """What is launched now is to be replayed later."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _lost(self, error: RuntimeError) -> RankLost:
        first_line = str(error).split("\n", 1)[0]
        return RankLost(f"rank {self._rank} of {self._count} was left alone in a step: {first_line}")


def meet(file: Path, rank: int, devices: Sequence[torch.device]) -> RankGroup:
    """All ranks are there, and call this.

    Raises:
        RankLost: one has not come.
    """
    store, device, count = FileStore(str(file), len(devices)), devices[rank], len(devices)
    store.set_timeout(timedelta(seconds=_MEET_S))
    each_has_its_own = device.type == "cuda" and len(set(devices)) == count  # NCCL refuses two ranks on one GPU
    try:
        group = _nccl(store, rank, count, device) if each_has_its_own else _gloo(store, rank, count)
    except (RuntimeError, OSError) as error:
        raise RankLost(f"rank {rank} of {count} has not met the others: {error}") from error
    return RankGroup(group, rank, count, device)


def _gloo(store: Store, rank: int, count: int) -> _Group:
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] the stubs call it Options
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._threads = 1
    options._timeout = timedelta(seconds=_TOGETHER_S)
    return cast(_Group, ProcessGroupGloo(store, rank, count, options))


def _nccl(store: Store, rank: int, count: int, device: torch.device) -> _Group:
    from torch.distributed import ProcessGroupNCCL  # not part of a build for machines without GPUs

    os.environ.update(UNWATCHED)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_TOGETHER_S)
    group = ProcessGroupNCCL(store, rank, count, options)
    group.eager_connect_single_device(device)
    return cast(_Group, group)
