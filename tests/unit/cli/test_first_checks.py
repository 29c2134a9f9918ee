"""Configuration errors of a cluster are reported before any of its processes is started."""

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from ballast.common.errors import ConfigError
from tools.cli.first_checks import check_flags, check_host, check_memory, check_ports
from tools.model.info import read_info
from tools.model.tiny import make_preset


def asked(**given: Any) -> argparse.Namespace:
    defaults = {"secure": None, "insecure": False, "host": "127.0.0.1", "port": 0, "dispatchers": 1, "http_port": None}
    others = {"gateways": 1, "dashboard_port": None, "dtype": None, "tensor_parallel_size": None}
    return argparse.Namespace(**{**defaults, **others, **given})


@pytest.mark.parametrize(
    ("service", "flags", "why"),
    [
        ("planner", ["--overload-policy", "dorp"], "planner.overload_policy"),
        ("worker", ["--max-num-seqs", "many"], "worker.max_num_seqs"),
        ("gateway", ["--tool-call-parser", "klingon"], "gateway.tool_call_parser"),
    ],
)
def test_a_flag_that_a_service_would_refuse(service: Any, flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_flags({service: flags}, "model")
    check_flags({"planner": ["--overload-policy", "recompute"], "worker": ["--max-num-seqs", "8"]}, "model")


def test_a_reachable_host_needs_protection() -> None:
    with pytest.raises(ConfigError, match="--secure DIR"):
        check_host(asked(host="0.0.0.0"))
    for given in ({"host": "0.0.0.0", "insecure": True}, {"host": "0.0.0.0", "secure": Path("x")}, {"host": "::1"}):
        check_host(asked(**given))


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given, flag in (({"port": port}, "--port"), ({"http_port": port}, "--http-port")):
            with pytest.raises(ConfigError, match=f"{flag}: .*{port} is in use"):
                check_ports(asked(**given))
        with pytest.raises(ConfigError, match="--port"):
            check_ports(asked(port=port - 1, dispatchers=2))
    check_ports(asked())


def test_memory_that_does_not_hold_the_parameters(tmp_path: Path) -> None:
    info = read_info(make_preset("tiny", tmp_path / "tiny"))
    with pytest.raises(ConfigError, match="parameters alone"):
        check_memory(asked(device_memory_bytes=info.parameter_bytes - 1), info)
    with pytest.raises(ConfigError, match="parameters alone"):
        check_memory(asked(device_memory_bytes=info.parameter_bytes, dtype="float64"), info)
    check_memory(asked(device_memory_bytes=info.parameter_bytes), info)
    check_memory(asked(device_memory_bytes=info.parameter_bytes // 2, dtype="bfloat16"), info)
    check_memory(asked(device_memory_bytes=None), info)
