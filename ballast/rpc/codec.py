"""Conversion between protobuf messages and the plain types that services share.

`Mapper.record` raises InvalidRequest for an invalid message (`ballast.rpc.border`).
"""

import math

from ballast.common.errors import InvalidRequest
from ballast.common.layout import MAX_REASON_CHARS, Group, Layout, Member, Place
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason, Grammar, GrammarKind, PriorityClass, SamplingParams
from ballast.common.traffic import LENGTH_COUNTS, WAIT_COUNTS, Pace, Traffic
from ballast.rpc import border
from ballast.rpc.mapping import EnumMapper, Mapper, map_specially
from ballastpb.cluster.v1 import cluster_pb2 as pb

_ENUMS = pb.DESCRIPTOR.enum_types_by_name
FINISH = EnumMapper(FinishReason, _ENUMS["FinishReason"], unknown=FinishReason.ERROR)
PRIORITY = EnumMapper(PriorityClass, _ENUMS["PriorityClass"], absent=PriorityClass.DEFAULT)


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else FINISH.number_of[reason]


def finish_from_proto(number: int) -> FinishReason | None:
    """The reason with this number; None for 0 (still running), ERROR for an unknown number, which a newer peer may
    send.
    """
    return FINISH.member(number) if number else None


def _grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    message = pb.Grammar(thought_end=grammar.thought_end, thought_begin=grammar.thought_begin)
    setattr(message, grammar.kind, grammar.text)
    return message


def _grammar_from_proto(message: pb.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("sampling.grammar", "has an unknown kind")
    return Grammar(GrammarKind(kind), getattr(message, kind), message.thought_end, message.thought_begin)


map_specially(Grammar, pb.Grammar, _grammar_to_proto, _grammar_from_proto)
SAMPLING = Mapper(SamplingParams, pb.SamplingParams)


def _check_member(message: pb.Member) -> None:
    border.name("member.worker_id", message.worker_id)
    border.within("member.incarnation", message.incarnation, 1, border.MAX_EPOCH)
    border.within("member.first_layer", message.first_layer, 0, border.MAX_LAYERS - 1)
    border.within("member.last_layer", message.last_layer, message.first_layer + 1, border.MAX_LAYERS)
    border.text("member.address", message.address, border.MAX_ADDRESS_CHARS)
    border.text("member.data_address", message.data_address, border.MAX_ADDRESS_CHARS)


def _check_group(message: pb.Group) -> None:
    border.name("group.group_id", message.group_id)
    border.within("group.members", len(message.members), 1, border.MAX_MEMBERS)
    border.distinct("group.members", [member.worker_id for member in message.members])


def _check_place(message: pb.Place) -> None:
    border.within("place.epoch", message.epoch, 1, border.MAX_EPOCH)


def _check_layout(message: pb.Layout) -> None:
    """Validate a layout except for its layers, which `Layout.check` validates."""
    border.within("layout.epoch", message.epoch, 0, border.MAX_EPOCH)
    border.within("layout.layer_count", message.layer_count, 0, border.MAX_LAYERS)
    border.count("layout.groups", message.groups, border.MAX_GROUPS)
    border.distinct("layout.groups", [group.group_id for group in message.groups])
    border.text("layout.reason", message.reason, MAX_REASON_CHARS)


def _check_memory(report: pb.MemoryReport) -> None:
    parts = (report.budget_bytes, report.parameter_bytes, report.kv_bytes, report.free_bytes, report.extent_bytes)
    if min(parts) < 0 or max(parts) > border.MAX_BYTES:
        raise InvalidRequest("load.memory", f"must be from 0 to {border.MAX_BYTES} bytes each: {report}")


def _check_load(report: pb.LoadReport) -> None:
    """Validate a load report. All counts are compared at once, because every step of every worker calls this."""
    counts = (
        report.block_tokens - 1,
        report.block_count,
        report.used_block_count,
        report.waiting_block_count,
        report.running_count,
        report.waiting_count,
        report.max_running_count,
        report.steps_total,
        report.preemptions_total,
        report.prompt_tokens_total,
        report.generation_tokens_total,
        report.newest_epoch,
        report.kept_block_count,
        report.prompt_token_count,
        report.max_prompt_token_count,
        report.spare_block_count,
        report.offline_block_count,
        report.offline_running_count,
        report.offline_waiting_count,
        report.offline_wanted_tokens,
        report.offline_tokens_total,
        report.offline_yields_total,
        report.offline_lost_tokens_total,
        report.uncomputed_token_count,
        report.prefixes_kept_s,
        report.retained_block_count,
        report.prefix_queries_total,
        report.prefix_hits_total,
        report.longest_token_count,
        report.longest_limit_tokens,
        report.prefix_host_hits_total,
        report.host_block_count,
        report.busiest_caller_count,
    )
    if min(counts) < 0:
        raise InvalidRequest("load", f"counts must not be negative, and block_tokens must be positive: {report}")
    if report.newest_epoch > border.MAX_EPOCH:
        raise InvalidRequest("load.newest_epoch", f"must be at most {border.MAX_EPOCH}, got {report.newest_epoch}")
    if not 0.0 <= report.wake_s <= border.MAX_SECONDS:
        raise InvalidRequest("load.wake_s", f"must be a number of seconds, got {report.wake_s}")
    if not 0.0 <= report.step_age_s <= border.MAX_SECONDS:
        raise InvalidRequest("load.step_age_s", f"must be a number of seconds, got {report.step_age_s}")


def _check_model(message: pb.ModelInfo) -> None:
    for field in ("name", "architecture", "dtype", "kv_cache_dtype", "revision"):
        border.text(f"model.{field}", getattr(message, field))
    border.within("model.layer_count", message.layer_count, 0, border.MAX_LAYERS)
    border.within("model.kv_bytes_per_token", message.kv_bytes_per_token, 0, border.MAX_BYTES)
    border.within("model.block_bytes", message.block_bytes, 0, border.MAX_BYTES)
    border.within("model.extent_bytes", message.extent_bytes, 0, border.MAX_BYTES)
    border.within("model.other_parameter_bytes", message.other_parameter_bytes, 0, border.MAX_BYTES)
    if message.HasField("tensor_parallel_size"):
        border.within("model.tensor_parallel_size", message.tensor_parallel_size, 1, border.MAX_LAYERS)
    border.count("model.adapters", message.adapters, border.MAX_LAYERS)
    border.distinct("model.adapters", [adapter.name for adapter in message.adapters])
    for adapter in message.adapters:
        border.text("model.adapters.name", adapter.name)
        border.text("model.adapters.revision", adapter.revision)
    border.none_negative("model", (message.vocab_size, message.max_model_len, message.parameter_count))
    border.count("model.eos_token_ids", message.eos_token_ids, border.MAX_LAYERS)
    sizes = message.layer_parameter_bytes
    if sizes and (len(sizes) != message.layer_count or min(sizes) < 1 or sum(sizes) > border.MAX_BYTES):
        why = f"must be a positive size for each of {message.layer_count} layers, or empty"
        raise InvalidRequest("model.layer_parameter_bytes", why)


_ROUNDED_S = 1e-9  # rounding in a fit may make a cost negative by this much


def _check_pace(message: pb.Pace) -> None:
    cost = message.cost
    border.within("pace.layer_count", message.layer_count, 1, border.MAX_LAYERS)
    border.within("pace.max_batch_tokens", message.max_batch_tokens, 1, border.MAX_BYTES)
    terms = (cost.attention_s, cost.token_s, cost.chunk_s, cost.prefix_s, cost.many_s, cost.beyond_s, cost.shared_s)
    border.within("pace.cost.knee_tokens", cost.knee_tokens, 0, border.MAX_BYTES)
    if not all(-_ROUNDED_S <= seconds <= border.MAX_SECONDS for seconds in terms):
        raise InvalidRequest("pace.cost", f"must be numbers of seconds, got {terms}")
    if cost.shared_s > cost.chunk_s + _ROUNDED_S:
        raise InvalidRequest("pace.cost.shared_s", f"must be at most chunk_s, {cost.chunk_s}, got {cost.shared_s}")


def _check_traffic(message: pb.Traffic) -> None:
    border.none_negative(
        "traffic",
        (
            message.queued_count,
            message.queued_tokens,
            message.recent_count,
            message.minute_count,
            message.minute_tokens,
            message.ended_count,
            message.ended_tokens,
            message.open_tokens,
            message.later_count,
            message.long.count,
            message.long.need_tokens,
            message.long.prompt_tokens,
            *message.first_counts,
            *message.prompt_counts,
        ),
    )
    if len(message.prompt_counts) > LENGTH_COUNTS:
        raise InvalidRequest("traffic", f"impossible prompt lengths: {message}")
    if len(message.first_counts) > WAIT_COUNTS or not 0.0 <= message.later_s < math.inf:
        raise InvalidRequest("traffic", f"impossible waits: {message}")
    if not all(
        0.0 <= value <= border.MAX_SECONDS
        for value in (
            message.calm_per_s,
            message.known_s,
            message.oldest_wait_s,
            message.burst_since_s,
            message.burst_s,
            message.burst_per_s,
            message.long.wait_s,
        )
    ):
        raise InvalidRequest("traffic", f"rates are not negative: {message}")


MEMBER = Mapper(Member, pb.Member, check=_check_member)
GROUP = Mapper(Group, pb.Group, check=_check_group)
PLACE = Mapper(Place, pb.Place, check=_check_place)
LAYOUT = Mapper(Layout, pb.Layout, check=_check_layout)
MEMORY = Mapper(MemoryReport, pb.MemoryReport, check=_check_memory)
LOAD = Mapper(LoadReport, pb.LoadReport, check=_check_load)
PACE = Mapper(Pace, pb.Pace, check=_check_pace)
TRAFFIC = Mapper(Traffic, pb.Traffic, check=_check_traffic)
MODEL = Mapper(ModelInfo, pb.ModelInfo, check=_check_model)


def place_to_proto(place: Place | None) -> pb.Place | None:
    return None if place is None else PLACE.message(place)


def place_from_proto(message: pb.Place) -> Place | None:
    """None if the message is not set."""
    return PLACE.record(message) if message.epoch and message.group.members else None
