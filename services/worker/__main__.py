"""`python -m services.worker`: loads the model, constructs the parts, and serves until a stop signal."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc.aio

from ballast.common.errors import ConfigError
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.instance import Instance as Announcement
from ballast.common.model import ModelInfo
from ballast.common.sampling import Grammar
from ballast.common.traffic import Pace
from ballast.rpc.server import RpcServer, ensure_free
from ballast.service import logs
from ballast.service.lifecycle import Lifecycle, advertised_address, run_service, say_ready
from ballast.service.metrics import REGISTRY, Exposition, MetricsServer
from ballast.service.otlp import Exporter
from ballast.service.security import Role, Security
from ballast.service.settings import load_settings
from ballast.service.state import StateServer, state_server
from ballast.service.tasks import run_supervised
from ballast.service.tokenizer import load_tokenizer
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker.config import WorkerSettings
from services.worker.core.limits import WorkerLimits
from services.worker.emulation.machine import read_machine
from services.worker.found_model import with_model
from services.worker.links.config import TransportConfig
from services.worker.metrics import LinkCollector, export
from services.worker.pipeline.activations import HostActivations
from services.worker.pipeline.build import BuiltInstance, join, stage_core
from services.worker.pipeline.context import ActivationStore, BlockCopier
from services.worker.pipeline.events import GrammarAnnounced
from services.worker.pipeline.grammars import CompileGrammar
from services.worker.pipeline.planner_side import Transitions
from services.worker.policy.harvest import Harvest
from services.worker.policy.lookahead import lookahead
from services.worker.policy.microbatching import by_token_count
from services.worker.policy.step_limits import StepLimits, limiting_factor, step_limits
from services.worker.policy.token_target import TokenTarget
from services.worker.ranks.channel import RankLog, RankLost
from services.worker.ranks.following import nodes_of, run_ranks
from services.worker.reporter import MonitorReporter
from services.worker.servicer import WorkerIdentity, WorkerServicer
from services.worker.shell import StepEngine as ShellEngine
from services.worker.shell import WorkerShell
from services.worker.spans import RequestSpans
from services.worker.store import StoredGpu, claimed_devices
from services.worker.text import primed_detokenizer

if TYPE_CHECKING:
    from ballast.common.cost import CostModel
    from services.worker.engine.load import Engine
    from services.worker.links.plane import DataPlane
    from services.worker.pipeline.hub import Hub
    from services.worker.policy.online_cost import OnlineCost

_READINESS_INTERVAL_S = 0.5
_RANKS_INTERVAL_S = 0.2
_CALLS_GRACE_S = 1.0  # maximum wait for streams to end after the last request
# A waiting thread requests the GIL after this time. With the default on busy cores, tokens reached clients in bursts,
# presumably because the engine's thread, which releases the GIL in every operator, regained it before the streaming
# loop woke up. Measurements of this are noisy, because of other load on the machine.
_SWITCH_INTERVAL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Kit:
    """Parts that depend on the kind of engine."""

    engine: LoadedEngine
    cost: Callable[[], CostModel | None]  # predicts the duration of a batch on this worker's stage, for microbatches
    costs: OnlineCost | None = None  # learns from step durations
    copier: BlockCopier | None = None  # copies KV to and from host memory, for preempted sequences
    compile_grammar: CompileGrammar | None = None  # runs outside the engine's thread, which it would block
    open_plane: Callable[[WorkerId, str, Hub, bytes | None], DataPlane] | None = None  # replaces the usual data plane
    device: str = "emulated"
    lost_rank: Callable[[], str | None] | None = None  # names a rank of this instance that has exited; None: all run
    swap_blocks: int = 0  # host blocks of the copier
    activations: ActivationStore | None = None  # memory of the activation log
    joins: bool = True  # True: the worker may join groups and migrate KV


class LoadedEngine(BuiltInstance, ShellEngine, Protocol):
    """A loaded model, to be executed as a whole or as a stage."""


def load(settings: WorkerSettings, devices: Sequence[str] = (), secret: bytes | None = None) -> Kit:
    """Load the engine. `devices`: one for each rank of this host; if empty, the device of the settings is used.
    `secret`: the secret shared by the cluster.

    Raises:
        ConfigError: the model cannot be loaded with these settings.
    """
    if settings.engine == "emulated":
        if settings.tensor_parallel_size > 1:
            raise ConfigError("worker.tensor_parallel_size", "not with an emulated engine: its profile sets its speed")
        return _emulated(settings)
    from services.worker.engine.load import load_engine  # imports torch, which is slow to load
    from services.worker.engine.rehearsal import Largest
    from services.worker.links.open import device_bytes
    from services.worker.memory.gpus import describe
    from services.worker.memory.host_blocks import HostBlocks
    from services.worker.ranks.load import load_ranked

    most = step_limits_of(settings)
    by_share = settings.device != "cpu" and "device_memory_bytes" not in settings.model_fields_set
    links_bytes = device_bytes(settings.transport, settings.device, settings.tensor_parallel_size)
    load_one = functools.partial(
        load_engine,
        settings.model,
        device_memory_bytes=None if by_share else int(settings.device_memory_bytes) - links_bytes,
        dtype=settings.dtype,
        block_tokens=settings.block_size,
        max_model_len=settings.max_model_len,
        name=settings.served_model_name,
        threads=settings.threads,
        kernels=settings.kernels,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        largest=Largest(most.tokens, most.sequences),
        links_bytes=links_bytes,
        enforce_eager=settings.enforce_eager,
        attention_backend=settings.attention_backend,
        model_impl=settings.model_impl,
        host_copy=settings.host_copy,
        lora_modules=settings.lora_modules,
        batch_invariant=settings.batch_invariant,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    devices = devices or (settings.device,)
    log = RankLog(settings.worker_id or "worker", settings.log_level, settings.log_format)
    several = settings.tensor_parallel_size > 1
    ranked = load_ranked(load_one, devices, log, nodes_of(settings, secret)) if several else None
    engine = load_one(device=devices[0]) if ranked is None else ranked.engine
    gc.freeze()  # torch makes so many objects that a full collection delays a step
    try:
        costs = load_costs(settings, engine)
        may_swap = ranked is None or ranked.swaps
        if settings.swaps and not may_swap:
            why = "swapping needs GPUs with peer access on one host"
            raise ConfigError("worker.overload_policy", why)
        swap_blocks = swap_block_count(settings, engine.info) if may_swap else 0
        copier = HostBlocks(engine.memory.kv, swap_blocks) if swap_blocks else None
    except BaseException:
        engine.close()
        raise
    compile_grammar = engine.grammars.ahead if engine.grammars is not None else None
    device = describe(engine.memory.pool.backend.device)
    log_bytes = int(settings.activation_log_bytes)
    kit = Kit(
        engine,
        costs.current,
        costs,
        copier,
        compile_grammar,
        device=device,
        swap_blocks=swap_blocks,
        activations=HostActivations(log_bytes) if log_bytes else None,
    )
    if ranked is None:
        return replace(kit, joins=engine.implementation.pipelines)
    hosts = f" of each of {settings.nnodes} hosts" if settings.nnodes > 1 else ""
    kit = replace(kit, device=f"{len(devices)} ranks from {device} on{hosts}")
    return replace(kit, lost_rank=ranked.lost, joins=ranked.exchanges)


def _emulated(settings: WorkerSettings) -> Kit:
    from services.worker.emulation.connection import EmulatedOpener
    from services.worker.emulation.copier import EmulatedCopier
    from services.worker.emulation.engine import emulate
    from services.worker.emulation.runner import EmulatedActivations
    from services.worker.links.pace import StagePace
    from services.worker.links.plane import DataPlane
    from services.worker.links.rendezvous import resolve_host

    if settings.profile is None:
        raise ConfigError("worker.profile", "an emulated engine needs a file with measured durations")
    told = "device_memory_bytes" in settings.model_fields_set
    engine = emulate(
        read_machine(settings.profile),
        device_memory_bytes=int(settings.device_memory_bytes) if told else None,
        block_tokens=settings.block_size,
        max_model_len=settings.max_model_len,
        name=settings.served_model_name,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    machine = engine.machine
    cost = machine.execution.cost_of(machine.model.layer_count, is_first=True, is_last=True)

    def open_plane(me: WorkerId, host: str, hub: Hub, secret: bytes | None) -> DataPlane:
        opener = EmulatedOpener(hub, machine.link_bytes_per_s, engine.runner.clock)
        return DataPlane(me, opener, host=resolve_host(host), pace=StagePace(), secret=secret, port=settings.data_port)

    swap_blocks = swap_block_count(settings, engine.info)
    copier = EmulatedCopier(engine.memory, swap_blocks, machine.host_bytes_per_s) if swap_blocks else None
    log_bytes = int(settings.activation_log_bytes)
    return Kit(
        cast(LoadedEngine, engine),
        lambda: cost,
        None,
        copier,
        open_plane=open_plane,
        swap_blocks=swap_blocks,
        activations=cast(ActivationStore, EmulatedActivations(log_bytes)) if log_bytes else None,
    )


def load_costs(settings: WorkerSettings, engine: Engine) -> OnlineCost:
    """Return the initial cost model, from a profile or from a measurement made now; an empty one without either.

    Raises:
        ConfigError: the profile is of another model or machine.
    """
    from services.worker.cost_profile import read_matching
    from services.worker.policy.online_cost import OnlineCost
    from services.worker.profiling.build import key_of
    from services.worker.profiling.measure import Options, measure

    most = step_limits_of(settings)
    if settings.cost_profile is not None:
        return OnlineCost(read_matching(settings.cost_profile, key_of(engine)).costs.stages())
    if settings.self_profile_s > 0:
        options = Options(
            batch_tokens=most.tokens,
            sequences=most.sequences,
            visits=1,
            held_out_count=0,
            seconds=settings.self_profile_s,
        )
        return OnlineCost(measure(engine, options).fit())
    return OnlineCost()


def link_bandwidth(settings: WorkerSettings) -> float | None:
    """Bulk bandwidth of a link according to the profile; None: it is measured while the worker serves."""
    if settings.cost_profile is None:
        return None
    from services.worker.cost_profile import read_profile  # imports NumPy

    link = read_profile(settings.cost_profile).link
    return None if link is None else link.bandwidth_bytes_per_s


def step_limits_of(settings: WorkerSettings, gpu_bytes: int | None = None) -> StepLimits:
    """Return the limits of a step: from the settings, or else the defaults. `gpu_bytes`: memory of the GPU; None: a
    CPU.
    """
    return step_limits(
        gpu_bytes,
        sequences=settings.max_num_seqs,
        tokens=settings.max_num_batched_tokens,
        queued=settings.max_num_queued_reqs,
    )


def limits_of(settings: WorkerSettings, engine: LoadedEngine, swap_block_count: int) -> WorkerLimits:
    most, info = step_limits_of(settings), engine.info
    kind = f"{info.name} {info.dtype} {info.kv_cache_dtype}"
    return WorkerLimits(
        block_tokens=settings.block_size,
        max_model_len=engine.info.max_model_len,
        vocab_size=engine.info.vocab_size,
        eos_token_ids=frozenset(engine.info.eos_token_ids),
        adapters=frozenset(adapter.name for adapter in engine.info.adapters),
        max_running_count=most.sequences,
        max_batch_tokens=most.tokens,
        max_waiting_count=most.queued,
        max_waiting_tokens=settings.max_num_queued_tokens,
        admission_reserve_fraction=settings.admission_reserve_fraction,
        swap_block_count=swap_block_count,
        swap_blocks_per_step=settings.swap_blocks_per_step,
        swaps_online=settings.swaps,
        async_scheduling=settings.launches,
        prefix_caching=settings.enable_prefix_caching,
        prefix_seed=secrets.token_bytes(16) + kind.encode(),
    )


def target_of(kit: Kit) -> TokenTarget:
    """Return the limit on running requests from their time per output token. It needs the costs of all layers, which at
    the start only an emulated engine knows.
    """
    return TokenTarget(math.inf, _cost_of_all_layers(kit))


def harvest_of(settings: WorkerSettings, kit: Kit) -> Harvest:
    """Return the bound on offline work in a step."""
    return Harvest(
        cost=_cost_of_all_layers(kit),
        slowdown=settings.offline_slowdown,
        targets=settings.targets,
        layer_count=0 if settings.preempt_within_step == "off" else kit.engine.info.layer_count,
    )


def _cost_of_all_layers(kit: Kit) -> Callable[[], CostModel | None]:
    layer_count, costs = kit.engine.info.layer_count, kit.costs
    return kit.cost if costs is None else lambda: costs.of_layers(layer_count)


def swap_block_count(settings: WorkerSettings, info: ModelInfo) -> int:
    """Number of KV blocks, each of all layers, in host memory for preempted sequences.

    Raises:
        ConfigError: not a single block fits, although online requests are to be swapped.
    """
    block_bytes = info.block_bytes * info.layer_count
    count = int(settings.swap_space_bytes) // block_bytes
    if settings.swaps and not count:
        raise ConfigError("worker.swap_space_bytes", f"must hold a KV block of all layers: {block_bytes} bytes")
    return count


def transport_of(settings: WorkerSettings) -> TransportConfig:
    rate = settings.link_bytes_per_s
    links = TransportConfig(
        port=settings.data_port,
        rate_bytes_per_s=None if rate is None else float(rate),
        bandwidth_bytes_per_s=link_bandwidth(settings),
    )
    return links.naive() if settings.transfers == "naive" else links


class WorkerProcess:
    """One worker process, from the loaded engine to the end of draining."""

    def __init__(
        self,
        life: Lifecycle,
        settings: WorkerSettings,
        security: Security,
        kit: Kit,
        state: StateServer,
        worker_id: WorkerId,
    ) -> None:
        self._life = life
        self._settings = settings
        self._security = security
        self._engine = engine = kit.engine
        self._device = kit.device
        self._lost_rank, self._joins = kit.lost_rank, kit.joins
        self._compile_grammar, self._cost = kit.compile_grammar, kit.cost
        self._state = state
        self._detokenizer = functools.partial(primed_detokenizer, load_tokenizer(settings.model))
        # The random prefix of sequence ids is unique with probability 1 - 2^-31 per pair of workers.
        microbatching = lookahead(kit.cost) if settings.microbatching == "lookahead" else by_token_count
        target = target_of(kit)
        core, book = stage_core(
            limits_of(settings, engine, kit.swap_blocks),
            engine,
            secrets.randbits(31),
            microbatching,
            target,
            harvest_of(settings, kit),
        )
        self._shell = WorkerShell(
            core=core,
            engine=engine,
            detokenizer=self._detokenizer,
            check_every_steps=settings.check_every_steps,
        )
        host = settings.advertise_host or advertised_address(settings.host, None, 0).rpartition(":")[0]
        self._membership = join(
            self._shell,
            me=worker_id,
            core=core,
            book=book,
            engine=engine,
            config=transport_of(settings),
            transport=settings.transport,
            advertise_host=host,
            costs=kit.costs,
            copier=kit.copier,
            open_plane=None if (opened := kit.open_plane) is None else functools.partial(opened, worker_id, host),
            secret=self._security.secret,
            compile_grammar=kit.compile_grammar,
            activations=kit.activations,
        )
        published = self._membership.member.published
        export(self._shell.load, REGISTRY, lambda: published.clock.times, published.migrations)
        plane = self._membership.plane
        REGISTRY.register(LinkCollector(lambda: getattr(plane, "refused", {})))  # an emulated plane refuses no callers

    def _pace(self) -> Pace | None:
        """Learned cost of batches; None while too few batches have been executed."""
        cost = self._cost()
        layer_count = self._membership.member.role.layer_count
        return None if cost is None else Pace(cost, layer_count, step_limits_of(self._settings).tokens)

    async def run(self, worker_id: WorkerId) -> None:
        incarnation = await self._register(worker_id)
        if incarnation is None:
            self._membership.member.close()
            self._engine.close()
            return
        plane = self._membership.plane
        plane.incarnation = incarnation
        collector = self._settings.otlp_traces_endpoint
        exporter = None if collector is None else Exporter(collector, "worker", worker_id)
        server = self._make_server(worker_id, incarnation, exporter)
        port = await server.start()
        address = advertised_address(self._settings.host, self._settings.advertise_host, port)
        reporter = MonitorReporter(
            instance=Announcement(
                worker_id, incarnation, address, self._engine.info, plane.store_address if self._joins else ""
            ),
            load=self._shell.load,
            place=lambda: self._membership.member.place,
            pace=self._pace,
            monitor_address=self._settings.monitor_address,
            state=self._state,
            interval_s=self._settings.report_interval_s,
            dial=self._security.dial(Role.MONITOR),
        )
        self._shell.on_requests(reporter.on_requests_arrived)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._shell.run(), name="engine")
                tasks.create_task(run_supervised(reporter.run, "reporter"), name="reporter")
                watching = tasks.create_task(self._watch_ranks(), name="ranks")
                readiness = tasks.create_task(run_supervised(lambda: self._keep_readiness(server), "readiness"))
                kv_tokens, limits = self._engine.block_count * self._settings.block_size, step_limits_of(self._settings)
                what = limiting_factor(limits, kv_tokens, self._engine.info.max_model_len)
                logs.get_logger().info("serving", address=address, incarnation=incarnation, limited_by=what)
                say_ready("worker", worker_id, address)
                await self._life.stopping.wait()
                readiness.cancel()
                await server.set_ready(False)
                await self._drain()
                reporter.leave()
                watching.cancel()
                self._shell.stop()
        finally:
            await server.stop(_CALLS_GRACE_S)
            if exporter is not None:
                await exporter.close()

    async def _register(self, worker_id: WorkerId) -> Incarnation | None:
        """Register this worker and return its incarnation number; None if it is stopped first."""
        stopping = asyncio.ensure_future(self._life.stopping.wait())
        taking = asyncio.ensure_future(self._state.take_incarnation("worker", worker_id))
        try:
            await asyncio.wait((stopping, taking), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else None
        finally:
            stopping.cancel()
            taking.cancel()

    def _announce_grammar(self, grammar: Grammar) -> Future[Any]:
        """Start compiling a grammar, so that the request can be validated here. The group's last stage, which samples,
        compiles it at the same time.
        """
        self._shell.post_member(GrammarAnnounced(grammar))
        assert self._compile_grammar is not None
        return self._compile_grammar(grammar)

    def _make_server(self, worker_id: WorkerId, incarnation: Incarnation, exporter: Exporter | None) -> RpcServer:
        servicer = WorkerServicer(
            shell=self._shell,
            identity=WorkerIdentity(worker_id, incarnation, self._engine.info, self._device),
            max_waiting_count=step_limits_of(self._settings).queued,
            detokenizer=self._detokenizer,
            compile_grammar=self._announce_grammar if self._compile_grammar is not None else None,
            transitions=Transitions(self._membership.member, incarnation, self._shell.post_member),
            clock=self._membership.member.published.clock,
            spans=RequestSpans(exporter, worker_id),
        )

        def register(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)

        return RpcServer(
            host=self._settings.host,
            port=self._settings.port,
            services=[(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"], register)],
            on_bug=self._life.report_bug,
            credentials=self._security.credentials(),
            admit=self._security.admit_peers(),
            on_failure=self._life.report_failure,
        )

    async def _keep_readiness(self, server: RpcServer) -> None:
        """Report ready while the engine makes progress and the worker is not draining."""
        told = None
        while True:
            load_report = self._shell.load()
            stuck = load_report.step_age_s > self._settings.step_timeout_s
            if (ready := not stuck and not load_report.draining) != told:
                told = ready
                await server.set_ready(ready)
            await asyncio.sleep(_READINESS_INTERVAL_S)

    async def _watch_ranks(self) -> None:
        """Raise RankLost when a rank has exited: the instance then stops, and its requests are replayed elsewhere."""
        while self._lost_rank is not None:
            if (who := self._lost_rank()) is not None:
                raise RankLost(who)
            await asyncio.sleep(_RANKS_INTERVAL_S)

    async def _drain(self) -> None:
        log, report = logs.get_logger(), self._shell.load()
        log.info("draining", running=report.running_count, waiting=report.waiting_count)
        self._shell.drain()
        try:
            async with asyncio.timeout(self._settings.shutdown_timeout_s):
                await self._shell.drained.wait()
        except TimeoutError:
            left = self._shell.load()
            log.warning("not drained in time", running=left.running_count, waiting=left.waiting_count)


def _with_limits(settings: WorkerSettings) -> WorkerSettings:
    """Fill in step limits from the GPU's memory where the settings leave them open."""
    if settings.engine != "torch" or settings.device == "cpu":
        return settings
    from services.worker.memory.gpus import gpu_bytes  # imports torch

    most = step_limits_of(settings, gpu_bytes(settings.device))
    found = {"max_num_seqs": most.sequences, "max_num_batched_tokens": most.tokens, "max_num_queued_reqs": most.queued}
    return settings.model_copy(update=found)


async def main(life: Lifecycle) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    settings = load_settings(WorkerSettings, sys.argv[1:])
    suffix = settings.port or secrets.token_hex(3)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{suffix}"
    if settings.node_rank:
        worker_id = f"{worker_id}/node-{settings.node_rank}"
    logs.configure(service="worker", instance=worker_id, level=settings.log_level, form=settings.log_format)
    logs.get_logger().info("starting", settings=settings.model_dump(mode="json"))
    security = Security(Role.WORKER, settings)
    hosts = [settings.host, settings.advertise_host]
    if settings.dist_init_addr is not None:
        hosts.append(settings.dist_init_addr.rpartition(":")[0])
    security.ensure_guarded(hosts, links=True)
    if not settings.node_rank:
        ensure_free(settings.host, settings.port)  # before loading the model, which may take minutes
    settings = await asyncio.to_thread(with_model, settings)
    state = state_server(settings)
    metrics = MetricsServer(settings.metrics_host, settings.metrics_port, service="worker", instance=worker_id)
    lost = ""
    try:
        await serve(life, settings, security, state, WorkerId(worker_id), metrics.shown)
    except* RankLost as group:
        lost = str(group.exceptions[0])
    finally:
        await state.close()
        metrics.close()
    if lost:
        logs.get_logger().error("a rank is lost, and this instance ends", why=lost)
        sys.exit(1)


async def serve(
    life: Lifecycle,
    settings: WorkerSettings,
    security: Security,
    state: StateServer,
    worker_id: WorkerId,
    shown: Exposition,
) -> None:
    """Load the model and serve until a stop signal. On a host with a node rank above 0, run this host's ranks
    instead.
    """
    count = settings.tensor_parallel_size // settings.nnodes
    async with claimed_devices(settings.device, count, _gpus, state, worker_id) as devices:
        if settings.node_rank and (nodes := nodes_of(settings, security.secret)) is not None:
            say_ready("worker", worker_id, nodes.address)
            await run_ranks(life.stopping, settings, nodes, devices)
            return
        settings = settings.model_copy(update={"device": devices[0], "worker_id": worker_id})
        settings = await asyncio.to_thread(_with_limits, settings)
        # Loading a large model is slow, so it runs in a thread while the event loop handles signals.
        kit = await asyncio.to_thread(load, settings, devices, security.secret)
        shown.model_name = lambda: kit.engine.info.name
        await WorkerProcess(life, settings, security, kit, state, worker_id).run(worker_id)


def _gpus() -> list[StoredGpu]:
    from services.worker.memory.gpus import gpu_uuids  # imports torch

    return [StoredGpu(f"cuda:{index}", uuid) for index, uuid in enumerate(gpu_uuids())]


if __name__ == "__main__":
    run_service(main)
