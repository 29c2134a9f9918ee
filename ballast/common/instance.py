"""Announcement of a worker."""

from dataclasses import dataclass

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.model import ModelInfo
from ballast.common.protocol import PROTOCOL


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of a worker, as announced by itself."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str  # host:port of its WorkerService for other processes
    model: ModelInfo
    data_address: str = ""  # host:port for links of other members; "": it cannot join a pipeline
    protocol: int = PROTOCOL  # protocol version for other workers
