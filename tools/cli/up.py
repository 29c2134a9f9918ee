"""`ballast up`: runs a whole cluster on this machine until Ctrl-C or SIGTERM."""

import argparse
import asyncio
import contextlib
import functools
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path

from ballast.client import AsyncClient
from ballast.common.arguments import size
from ballast.common.credentials import CA_FILE, TOKEN
from ballast.common.errors import ConfigError
from ballast.common.overload import OverloadPolicy
from ballast.rpc.server import ensure_free
from ballast.rpc.tls import CA
from ballast.service.models import find_model
from ballast.service.state import StateServer
from ballast.service.tokens import TokenRole
from sim.jobs.machines import emulated_model
from tools.cli.arguments import Commands
from tools.cli.certs import make
from tools.cli.first_checks import adapters_of, check_adapters, check_flags, check_host, check_memory, check_ports
from tools.cli.served import check_served
from tools.cli.tokens import add_token
from tools.local.cluster import LocalCluster, Service
from tools.local.keeper import Keeper
from tools.local.scaling import Scaler, hearing
from tools.model.info import read_info
from tools.model.tiny import make_preset
from tools.model.vocabulary import ensure_tokenizer

_STOPPED_BY_SIGNAL = 130
_MAX_PROCESSES = 256
_HTTP_PORT, _HTTP_PORTS = 8000, 100  # first port tried, and how many are tried
# As with a large model on a GPU, the default model's parameters fill two thirds of a worker's memory, so a drop nearly
# doubles the space for KV.
_DEFAULT_PRESET, _DEFAULT_MEMORY = "ballast-half", 48 << 20
_CERTIFICATE_DAYS = 365
TOKENS, OPERATOR_TOKEN = "tokens", "operator.token"

# Flags that are passed on unchanged to the services: flag -> help.
_WORKER_FLAGS = {
    "--dtype": "number format of parameters: auto, float32, bfloat16, float16 or float64",
    "--kv-cache-dtype": "number format of KV: auto (that of --dtype) or fp8",
    "--model-impl": "implementation of the model: auto (default), ballast or transformers",
    "--device": "device: cpu (default), cuda (one GPU per worker) or cuda:N",
    "--tensor-parallel-size": "ranks of each worker, each on its own device",
    "--nnodes": "hosts of each worker, which share its ranks (docs/hosts.md)",
    "--dist-init-addr": "with --nnodes: HOST:PORT at which other hosts reach the first worker; further workers use"
    " the next ports",
    "--gpu-memory-utilization": "fraction of each GPU's memory, unless --device-memory-bytes is set (default: 0.9)",
    "--attention-backend": "attention kernels on a GPU: auto, triton or flashinfer",
    "--transport": "transport between workers: auto, tcp or nccl",
    "--max-model-len": "maximum length of prompt and answer together, in tokens",
    "--max-num-seqs": "maximum number of running requests of a worker",
    "--tpot-target-s": "target for the time per output token; requests beyond it wait (default: none)",
    "--offline-slowdown": "fraction by which offline requests may lengthen a step (default: 0.25)",
    "--max-num-batched-tokens": "maximum number of tokens of one engine step",
    "--block-size": "tokens of a KV block",
    "--threads": "threads of each worker's engine",
    "--kernels": "CPU kernels: auto, native (compiled) or torch",
    "--fallback-policy": "with drop, if no drop helps: recompute (default) or swap",
    "--swap-space-bytes": "host memory of each worker for swapped KV",
    "--host-copy": "one copy of the parameters in /dev/shm for all workers: auto, off or bytes (docs/operate.md)",
}
_WORKER_SWITCHES = {
    "--enforce-eager": "on a GPU: do not capture CUDA graphs",
    "--no-enable-prefix-caching": "disable prefix caching",
}
_POLICY_FLAG = {"--overload-policy": f"policy if KV memory runs short: {', '.join(OverloadPolicy)} (default: drop)"}
_PLANNER_FLAGS = {
    "--pipeline-degree": "with static-pipeline: instances of a pipeline",
    "--ttft-target-s": "with drop: TTFT target in seconds, below which nothing is dropped (default: 0.5)",
    "--restore": "whether dropped parameters are restored: on or off",
    "--park": "whether idle workers are parked until they are needed: on or off",
    "--least-instances": "with park: minimum number of serving workers (default: 1)",
}
_GATEWAY_FLAGS = {
    "--allowed-origins": "origins whose pages may call the API (CORS): https://HOST, comma-separated, or *",
    "--served-model-name": "names of the model in the HTTP API, comma-separated (default: its own name)",
    "--tool-call-parser": "format of tool calls: hermes, mistral, llama3_json ... (default: from its template)",
    "--reasoning-parser": "format of reasoning: qwen3, deepseek_r1, mistral, none (default: from its template)",
}
_DISPATCHER_FLAGS = {
    "--max-num-queued-reqs": "maximum number of waiting requests; more are refused",
    "--max-num-queued-tokens": "maximum number of waiting prompt tokens; more are refused",
    "--max-offline-queued": "maximum number of waiting offline requests (class batch)",
    "--chat-template": "file with a chat template (default: the model's own)",
    "--generation-config": "sampling defaults: auto (the model's own), ballast (none), or a folder (default: auto)",
}
_DESCRIPTION = (
    "Starts each service in its own process, with a private state server. Prints one line when ready. Ctrl-C waits"
    " for running requests and stops; a second Ctrl-C stops at once. A process that dies is restarted."
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("up", help="run a cluster on this machine", description=_DESCRIPTION)
    _add_flags(parser)
    serve = commands.add_parser("serve", help="the same as `up --model MODEL`", description=_DESCRIPTION)
    serve.add_argument("served", metavar="MODEL", help="as for --model")
    _add_flags(serve)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="folder, or org/name[@revision] (default: a small model with random weights)",
    )
    parser.add_argument(
        "--engine",
        choices=["torch", "emulated"],
        default="torch",
        help="emulated: workers take the time of a GPU and compute nothing",
    )
    parser.add_argument(
        "--profile",
        metavar="WHAT",
        help="speed of an emulated engine: a GPU of the catalogue or a FILE.yaml, with a model of the catalogue"
        " (--profile A800 --model Qwen2.5-14B); or a file from `ballast profile` for the --model",
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of instances (default: 2)")
    parser.add_argument(
        "--max-workers",
        type=int,
        metavar="N",
        help="maximum number of workers, which are started and stopped as the planner wants (default: --workers)",
    )
    parser.add_argument(
        "--dispatchers",
        type=int,
        default=1,
        metavar="N",
        help="number of dispatchers, on consecutive ports (default: 1)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=50051, help="port of the first dispatcher; 0: any free one")
    parser.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="number of HTTP servers, on consecutive ports (default: 1)"
    )
    parser.add_argument(
        "--http-port",
        type=int,
        metavar="PORT",
        help="port of the first gateway; 0: any free one (default: 8000, or the next free one)",
    )
    parser.add_argument("--jobs", type=Path, metavar="DIR", help="folder for batches and their files (docs/batches.md)")
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="port of the first service's metrics; further services use the next ports; 0: any free ones",
    )
    parser.add_argument("--dashboard", action="store_true", help="serve a live dashboard of the cluster")
    parser.add_argument(
        "--dashboard-port", type=int, metavar="PORT", help="port of the dashboard (default: 8088, or the next free one)"
    )
    parser.add_argument(
        "--twin",
        metavar="POLICY",
        choices=list(OverloadPolicy),
        help="run a second cluster with this policy, shown next to the first one on the dashboard",
    )
    parser.add_argument(
        "--device-memory-bytes", type=size, metavar="SIZE", help="memory budget of each worker: 512MiB, 16GiB ..."
    )
    parser.add_argument("--redis-url", metavar="URL", help="URL of a running state server")
    parser.add_argument(
        "--secure",
        type=Path,
        metavar="DIR",
        help="use TLS, certificates and tokens from this folder, and create missing ones. Required if --host is not"
        " loopback",
    )
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without authentication")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="folder for the services' logs")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="log level of all services")
    parser.add_argument(
        "--log-format", choices=["console", "json"], help="log format: console for people, json for programs"
    )
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="timeout for the start, including loading the model",
    )
    parser.add_argument(
        "--stop-timeout-s", type=float, default=30.0, metavar="S", help="time for running requests to finish"
    )
    for flag, text in (_POLICY_FLAG | _WORKER_FLAGS | _PLANNER_FLAGS | _DISPATCHER_FLAGS | _GATEWAY_FLAGS).items():
        parser.add_argument(flag, metavar=flag.rpartition("-")[2].upper(), help=text)
    what = "LoRA adapters; requests use their name as the model (docs/your-model.md)"
    parser.add_argument("--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=FOLDER", help=what)
    for flag, text in _WORKER_SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    if "served" in args:
        if args.model is not None:
            raise ConfigError("--model", "is already given as MODEL")
        args.model = Path(args.served)
    for name, least in (("workers", 0), ("dispatchers", 1), ("gateways", 0)):
        if not least <= getattr(args, name) <= _MAX_PROCESSES:
            raise ConfigError(f"--{name}", f"must be between {least} and {_MAX_PROCESSES}, got {getattr(args, name)}")
    if args.max_workers is not None and not max(1, args.workers) <= args.max_workers <= _MAX_PROCESSES:
        raise ConfigError("--max-workers", f"must be between --workers and {_MAX_PROCESSES}, got {args.max_workers}")
    if args.max_workers is not None and args.twin is not None:
        raise ConfigError("--max-workers", "cannot be combined with --twin: the two clusters would differ in size")
    if args.jobs is not None and not args.gateways:
        raise ConfigError("--jobs", "needs a gateway, to which jobs send their requests: --gateways 1")
    if not 0 <= args.port <= 65536 - args.dispatchers:
        raise ConfigError("--port", _port_range(args))
    check_host(args)
    check_ports(args)
    with contextlib.ExitStack() as resources:
        folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="ballast-model-"))
        if args.engine == "emulated":
            _emulate(args, Path(folder))
        elif args.profile is not None:
            raise ConfigError("--profile", "is for --engine emulated; a worker's own profile is its --cost-profile")
        has_default_model = args.model is None
        if has_default_model:
            args.model = make_preset(_DEFAULT_PRESET, Path(folder) / _DEFAULT_PRESET)
            args.device_memory_bytes = args.device_memory_bytes or _DEFAULT_MEMORY
            _say("no --model given: serving a small model with random weights; its answers mean nothing")
        adapters, starting = adapters_of(args.lora_modules), _Up(args)
        for policy in (None, args.twin) if args.twin else (None,):
            check_flags(starting.service_flags(policy), str(args.model))  # before a long download
        if args.engine == "torch" and not has_default_model:
            # Download the model here, with a progress bar, so that its problems are reported once rather than by each
            # worker.
            ranks = int(args.tensor_parallel_size or 1)
            check = functools.partial(check_served, model_impl=args.model_impl or "auto", ranks=ranks)
            found = find_model(args.model, weights=True, check=check)
            if ensure_tokenizer(found.folder):
                _say(f"{found.folder / 'tokenizer.json'} was missing: made from the model's vocabulary files")
            check_memory(args, read_info(found.folder))
            check_adapters(adapters, found.folder, args.model_impl or "auto")
        return asyncio.run(starting.run())


async def _check_state_server(url: str) -> None:
    """Check that the state server answers, because services would wait for it silently.

    Raises:
        Unavailable: the state server does not answer.
    """
    server = StateServer(url)
    try:
        await server.leader_address("planner")
    finally:
        await server.close()


def _port_range(args: argparse.Namespace) -> str:
    ports = "" if args.dispatchers == 1 else f", as {args.dispatchers} dispatchers take that many ports"
    return f"must be between 0 and {65536 - args.dispatchers}{ports}; got {args.port}"


def _emulate(args: argparse.Namespace, folder: Path) -> None:
    """Set the flags of emulated workers, and the model: a folder with only a tokenizer for a model of the catalogue."""
    if args.profile is None:
        raise ConfigError("--profile", "is needed: the GPU that workers emulate, such as A800, or a file")
    if args.model is None:
        raise ConfigError("--model", "is needed: the model that the workers appear to serve, such as Qwen2.5-14B")
    made = emulated_model(folder, args.profile, args.model, args.device_memory_bytes, args.kv_cache_dtype or "auto")
    args.model, args.engine_flags = made.model, made.worker_flags
    _say(f"nothing is computed: workers take the time of {made.machine.name} with {made.machine.model.name}")


class _Up:
    """Runs the cluster until a signal. The first signal drains and stops it; a second one, or any before it is ready,
    stops it at once.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._stopping = asyncio.Event()
        self._ready = False
        self._hooked: list[str] = []  # the planner's flags for its webhook to the scaler

    async def run(self) -> int:
        main = asyncio.current_task()
        assert main is not None, "runs in a task"
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if self._stopping.is_set() or not self._ready:
                main.cancel()
            self._stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)
        try:
            await self._serve()
        except asyncio.CancelledError:
            return _STOPPED_BY_SIGNAL
        return 0

    async def _serve(self) -> None:
        args = self._args
        if args.redis_url is not None:
            await _check_state_server(args.redis_url)
        _say(f"starting {args.workers} worker{'' if args.workers == 1 else 's'} ...")
        async with contextlib.AsyncExitStack() as running:
            scaler = await self._scaler(running)
            cluster = self._cluster()
            twin = self._cluster(args.twin) if args.twin else None
            await running.enter_async_context(cluster)
            if twin is not None:
                _say(f"starting its twin with {args.twin} ...")
                await running.enter_async_context(twin)
            keepers = [Keeper(one, _say) for one in (cluster, twin) if one is not None]
            page = ""
            if args.dashboard or args.dashboard_port is not None or twin is not None:
                page = await running.enter_async_context(self._dashboard([c for c in (cluster, twin) if c], keepers))
            print(await _ready_line(cluster, args.workers), flush=True)
            if page:
                _say(f"dashboard: {page}")
            if cluster.metrics_targets:
                file = cluster.write_metrics_targets(cluster.log_dir / "prometheus-targets.json")
                _say(f"metrics: {file} names them for Prometheus (file_sd_configs)")
            if args.secure is not None:
                _say(f"clients: export {CA_FILE}={args.secure / CA} {TOKEN}=$(cat {args.secure / OPERATOR_TOKEN})")
            self._ready = True
            scaling = [] if scaler is None else [scaler.run(cluster)]
            await self._until_stopped([*(keeper.run() for keeper in keepers), *scaling])
            _say("stopping; running requests finish (again: stop at once)")
        for one in (cluster, twin):
            if one is not None and one.keep_logs:
                _say(f"something had failed: the logs are kept in {one.log_dir}")

    def _cluster(self, twin_policy: str | None = None) -> LocalCluster:
        """The requested cluster, or its twin: with policy `twin_policy`, free ports, and without gateways and jobs."""
        args, is_twin = self._args, twin_policy is not None
        return LocalCluster(
            args.model,
            workers=args.workers,
            dispatchers=args.dispatchers,
            host=args.host,
            port=0 if is_twin else args.port,
            gateways=0 if is_twin else args.gateways,
            http_port=_http_port(args),
            jobs=int(args.jobs is not None and not is_twin),
            jobs_folder=args.jobs,
            metrics_port=None if is_twin else args.metrics_port,
            secure=args.secure,
            tokens_file=None if args.secure is None else secured(args.secure, args.host),
            flags=self.service_flags(twin_policy),
            log_dir=args.log_dir / "twin" if is_twin and args.log_dir is not None else args.log_dir,
            redis_url=None if is_twin else args.redis_url,
            start_timeout_s=args.start_timeout_s,
            stop_timeout_s=args.stop_timeout_s,
        )

    def _dashboard(
        self, clusters: list[LocalCluster], keepers: list[Keeper]
    ) -> contextlib.AbstractAsyncContextManager[str]:
        from tools.local.dashboard import dashboard_of  # imports starlette and uvicorn: needed for the page only

        args = self._args
        policies = [args.overload_policy or OverloadPolicy.DROP.value, args.twin]
        host = args.host if args.secure is None else "127.0.0.1"  # the page is served without authentication
        return dashboard_of(clusters, keepers, policies[: len(clusters)], host=host, port=args.dashboard_port)

    async def _scaler(self, running: contextlib.AsyncExitStack) -> Scaler | None:
        """Start a scaler that listens to the planner's webhook; None without `--max-workers`."""
        if self._args.max_workers is None:
            return None
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="ballast-scale-")))
        secret = folder / "scale.secret"
        secret.write_text(secrets.token_hex(32))
        scaler = Scaler(self._args.workers, self._args.max_workers, _say)
        url = await running.enter_async_context(hearing(secret.read_bytes(), scaler.take))
        self._hooked = ["--scale-webhook", url, "--scale-webhook-secret-file", str(secret)]
        return scaler

    async def _until_stopped(self, works: list[Coroutine[None, None, None]]) -> None:
        keeping = [asyncio.create_task(work, name="keep") for work in works]
        stopping = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            await asyncio.wait([*keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in keeping:
                if task.done():
                    await task  # raises a task's error, because these tasks do not end otherwise
        finally:
            for task in (*keeping, stopping):
                task.cancel()
            await asyncio.wait([*keeping, stopping])

    def service_flags(self, policy: str | None = None) -> dict[Service, list[str]]:
        def given(flags: dict[str, str]) -> list[str]:
            # Each worker gets its own GPU; with `cuda`, all workers would use the first one.
            dealt = vars(self._args) | ({"device": "cuda:auto"} if self._args.device == "cuda" else {})
            values = ((flag, dealt[flag[2:].replace("-", "_")]) for flag in flags)
            return [part for flag, value in values if value is not None for part in (flag, str(value))]

        chosen = given(_POLICY_FLAG) if policy is None else ["--overload-policy", policy]
        engine: list[str] = self._args.engine_flags if self._args.engine == "emulated" else []
        common = given({"--log-level": "", "--log-format": ""})
        insecure = ["--insecure"] if self._args.insecure else []
        switches = [flag for flag in _WORKER_SWITCHES if vars(self._args)[flag[2:].replace("-", "_")]]
        adapters = [part for one in self._args.lora_modules for part in ("--lora-modules", one)]
        worker = [*chosen, *given({"--device-memory-bytes": ""} | _WORKER_FLAGS), *switches, *adapters]
        return {
            "monitor": common,
            "planner": [*common, *chosen, *given(_PLANNER_FLAGS), *self._hooked],
            "worker": [*common, *engine, *worker],
            "dispatcher": [*common, *insecure, *given(_DISPATCHER_FLAGS)],
            "gateway": [*common, *insecure, *given(_GATEWAY_FLAGS)],
            "jobs": common,
        }


def secured(folder: Path, host: str) -> Path:
    """Create the missing files of a cluster with TLS and tokens in `folder`. Returns the file of tokens."""
    make(folder, days=_CERTIFICATE_DAYS, hosts=[host], workers=[])
    tokens = folder / TOKENS
    if not (folder / OPERATOR_TOKEN).exists():
        with os.fdopen(os.open(folder / OPERATOR_TOKEN, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(add_token(tokens, "operator", TokenRole.OPERATE) + "\n")
    return tokens


async def _ready_line(cluster: LocalCluster, workers: int) -> str:
    served = f"{workers} worker{'' if workers == 1 else 's'}"
    if workers:
        async with AsyncClient(cluster.address, **cluster.credentials) as client:
            served += f" with {(await client.model_info()).name}"
    http = f" at {', '.join(cluster.http_urls)}, gRPC" if cluster.http_urls else ""
    return f"ready: {served}{http} at {', '.join(cluster.addresses)} (logs: {cluster.log_dir})"


def _http_port(args: argparse.Namespace) -> int:
    """The first gateway's port: the requested one, by default 8000 or the next free one; 0: any free ports."""
    if args.http_port is not None or args.port == 0 or not args.gateways:
        return args.http_port or 0
    ports = range(_HTTP_PORT, _HTTP_PORT + _HTTP_PORTS)
    free = (port for port in ports if all(_is_free(args.host, port + i) for i in range(args.gateways)))
    return next(free, 0)


def _is_free(host: str, port: int) -> bool:
    try:
        ensure_free(host, port)
    except ConfigError:
        return False
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
