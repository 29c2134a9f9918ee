"""The announcement of a worker."""

from dataclasses import dataclass

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.model import ModelInfo
from ballast.common.protocol import PROTOCOL


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of one worker, as it announced itself."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str  # host:port of its WorkerService, as others reach it
    model: ModelInfo
    data_address: str = ""  # host:port where other members' links to it are made; "": it cannot join a pipeline
    protocol: int = PROTOCOL  # that it speaks with other workers
