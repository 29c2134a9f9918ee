"""A worker's data plane in a separate process, controlled by one JSON object per line on stdin."""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.open import open_plane
from services.worker.links.plane import DataPlane
from services.worker.links.traffic import TrafficClass
from tests.unit.worker.links.recorder import Recorder, checksum, pattern


class Peer:
    def __init__(self) -> None:
        self.plane: DataPlane | None = None
        self.recorder = Recorder()
        self.links: dict[str, Link] = {}

    def open(self, worker_id: str, config: dict[str, Any], transport: str = "tcp") -> str:
        self.recorder = Recorder()
        given = TransportConfig(**config)
        self.plane = open_plane(worker_id, self.recorder, given, "127.0.0.1", transport, b"of this cluster")
        return self.plane.store_address

    def connect(self, peer_id: str, address: str, epoch: int) -> None:
        assert self.plane is not None
        self.links[peer_id] = self.plane.connect(peer_id, address, epoch)

    def retire(self, before_epoch: int) -> None:
        assert self.plane is not None
        self.plane.retire(before_epoch)

    def send(self, to: str, texts: list[str]) -> None:
        for text in texts:
            self.links[to].send(TrafficClass.ACTIVATION, 0, meta=text.encode(), timeout_s=60)

    def transfer(self, to: str, size_bytes: int, seed: int, wait: bool = True) -> dict[str, Any]:
        """Starts a transfer of a pattern. Returns its report if `wait`, otherwise an empty dict at once."""
        transfer = self.links[to].transfer(TrafficClass.KV, [pattern(size_bytes, seed)], stream=seed)
        if not wait:
            return {}
        report = transfer.done.result(60)
        return {"outcome": report.outcome.value, "sent_bytes": report.sent_bytes}

    def wait(self, what: str, count: int) -> int:
        self.recorder.wait(what, count)
        return len(getattr(self.recorder, what))

    def received(self) -> dict[str, Any]:
        return {
            "messages": [
                {
                    "meta": m.meta.decode(),
                    "dtype": str(m.tensor.dtype) if m.tensor is not None else None,
                    "shape": list(m.tensor.shape) if m.tensor is not None else None,
                    "checksum": checksum([m.tensor]) if m.tensor is not None else 0,
                }
                for m in self.recorder.messages
            ],
            "ended": [asdict(ended) for ended in self.recorder.ended],
            "endings": {peer_id: ending.state.value for peer_id, ending in self.recorder.endings.items()},
        }

    def counts(self, peer_id: str) -> dict[str, Any]:
        counts = self.links[peer_id].counts
        return {"stale_frames": counts.stale_frames, "discarded_bytes": counts.discarded_bytes}

    def close(self) -> None:
        if self.plane is not None:
            self.plane.close(60.0)
        self.plane = None
        self.links.clear()


def main() -> None:
    torch.set_num_threads(1)
    peer = Peer()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"result": getattr(peer, order["do"])(**order["with"])}
        except Exception as error:  # noqa: BLE001 any error is reported to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
