"""The announcement of a worker."""

from dataclasses import dataclass

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.model import ModelInfo
from ballast.common.protocol import PROTOCOL


@dataclass(frozen=True, slots=True)
class Instance:
    """A worker, in one lifetime of its process, as it announces itself to the monitor."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str  # host:port at which other processes call its WorkerService
    model: ModelInfo
    data_address: str = ""  # host:port at which other workers open links to it; "": it cannot join a pipeline
    protocol: int = PROTOCOL  # version of the protocol between workers that it speaks
