"""What import-linter cannot see: a dynamic import would show in the modules that a core has loaded."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("core", ["services.monitor.core.machine", "services.planner.core.machine"])
def test_a_core_loads_neither_network_nor_store_nor_torch(core: str) -> None:
    program = f"import sys, {core}; print(sorted({{'grpc', 'redis', 'torch', 'asyncio'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
