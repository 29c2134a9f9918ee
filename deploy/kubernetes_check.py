"""`make kubernetes-check`: runs the manifests in deploy/kubernetes as local processes and sends requests through them.

It works like `compose_check`, with four differences as in Kubernetes: pods do not wait for others to be healthy,
readiness is probed as a kubelet does, pods know their names and addresses, and preStop hooks run before pods are
stopped.
"""

import argparse
import asyncio
import dataclasses
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ballast.common.errors import BallastError, Unavailable
from deploy.compose_check import ComposeRun, Replica, base_environ, check_gateway, check_jobs, check_service
from deploy.compose_file import ServiceSpec
from deploy.kubernetes_file import SETTINGS, of_kind, pre_stop, read_kubernetes, read_manifests
from tools.cli.certs import make
from tools.local.process import ChildProcess
from tools.model.tiny import make_preset

FOLDER = Path(__file__).resolve().parent / "kubernetes"
_SCALE = {"worker": 2, "dispatcher": 2, "gateway": 2, "monitor": 2, "planner": 2, "state": 1, "jobs": 1}
_HOOK_WITHIN_S = 60.0
_DATA_PORT = 50062
_REFERENCE = re.compile(r"\$\((POD_NAME|POD_IP)\)|\$(POD_NAME)\b")


class PodRun(ComposeRun):
    """Runs pods on this machine: replicas with POD_NAME and POD_IP in their environment, and preStop hooks."""

    async def stop(self) -> None:
        for replica in reversed(self.replicas):
            if command := pre_stop(replica.spec):
                await self._run_hook(replica, replica.placement.command(command))
        await super().stop()

    def _start_replica(self, spec: ServiceSpec, index: int) -> None:
        facts = {"POD_NAME": f"{spec.name}-{index}", "POD_IP": "127.0.0.1"}

        def fill(text: str) -> str:
            return _REFERENCE.sub(lambda found: facts[found[1] or found[2]], text)

        environment = {name: fill(value) for name, value in spec.environment.items()}
        hook = {"preStop": {"exec": {"command": [fill(word) for word in pre_stop(spec)]}}} if pre_stop(spec) else {}
        raw = {**spec.raw, "lifecycle": hook}
        super()._start_replica(dataclasses.replace(spec, environment=environment, raw=raw), index)

    async def _run_hook(self, replica: Replica, command: list[str]) -> None:
        path = self.folder / f"{replica.name}-hook.log"
        child = ChildProcess(f"{replica.name} hook", command, log_path=path, environ=base_environ(), cwd=self.folder)
        if not await child.wait(_HOOK_WITHIN_S) or child.returncode != 0:
            raise Unavailable(replica.name, f"its preStop hook failed: {child.log_tail()}")
        print(f"  {replica.name:<14} {child.log().strip()}")


def check_data_ports(run: ComposeRun) -> None:
    """Check that workers listen for links on the port that the manifests name."""
    for worker in run.of("worker"):
        with socket.create_connection(("127.0.0.1", worker.placement.ports[_DATA_PORT]), timeout=5):
            print(f"  {worker.name:<14} takes links where it should")


async def check(scale: Mapping[str, int]) -> None:
    manifests = read_manifests(FOLDER)
    with tempfile.TemporaryDirectory(prefix="ballast-kubernetes-") as name:
        folder = Path(name)
        model = str(make_preset("demo", folder / "model"))
        written: dict[str, str] = of_kind(manifests, "ConfigMap")[SETTINGS]["data"]
        small = {"BALLAST_WORKER__DEVICE_MEMORY_BYTES": "256MiB", "BALLAST_WORKER__THREADS": "1"}
        settings = {key: model if key.endswith("__MODEL") else small.get(key, value) for key, value in written.items()}
        run = PodRun(read_kubernetes(manifests, settings), scale, folder)
        make(folder / "volumes" / "keys", days=30, hosts=[], workers=[])
        try:
            print("starting")
            await run.start()
            print("all ready; sending requests")
            await check_service(run)
            await check_gateway(run)
            await check_jobs(run)
            check_data_ports(run)
            print("stopping")
            await run.stop()
        finally:
            run.kill()


def main() -> int:
    argparse.ArgumentParser(prog="python -m deploy.kubernetes_check", description=__doc__).parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(check(_SCALE))
    except BallastError as error:
        print(f"kubernetes-check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"kubernetes-check passed: {', '.join(f'{name}={count}' for name, count in _SCALE.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
