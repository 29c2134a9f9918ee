"""Shared protobuf messages <-> plain types. Protobuf stops here and in the servicers.

Everything `*_from_proto` raises InvalidRequest for a value that makes no sense (`ballast.rpc.border`).
"""

from ballast.common.errors import InvalidRequest
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Place
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason, Grammar, GrammarKind, PriorityClass, SamplingParams
from ballast.rpc import border
from ballastpb.cluster.v1 import cluster_pb2 as pb

_FINISH_TO_PROTO = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}

_PRIORITY_TO_PROTO = {
    PriorityClass.INTERACTIVE: pb.PRIORITY_CLASS_INTERACTIVE,
    PriorityClass.DEFAULT: pb.PRIORITY_CLASS_DEFAULT,
    PriorityClass.BATCH: pb.PRIORITY_CLASS_BATCH,
}
_PRIORITY_FROM_PROTO = {number: priority for priority, number in _PRIORITY_TO_PROTO.items()}


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_from_proto(number: int) -> FinishReason | None:
    """None while not finished; an unknown number of a newer peer counts as ERROR."""
    if number == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_FROM_PROTO.get(pb.FinishReason.ValueType(number), FinishReason.ERROR)


def priority_to_proto(priority: PriorityClass) -> pb.PriorityClass.ValueType:
    return _PRIORITY_TO_PROTO[priority]


def priority_from_proto(number: int) -> PriorityClass:
    if number == pb.PRIORITY_CLASS_UNSPECIFIED:
        return PriorityClass.DEFAULT
    found = _PRIORITY_FROM_PROTO.get(pb.PriorityClass.ValueType(number))
    if found is None:
        raise InvalidRequest("priority", f"unknown class {number}; known are interactive, default and batch")
    return found


_SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logprobs",
)


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(stop=sampling.stop, stop_token_ids=sampling.stop_token_ids)
    for name in _SCALARS:
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    if sampling.logit_bias:
        message.logit_bias.update(sampling.logit_bias)
    if sampling.grammar is not None:
        setattr(message.grammar, sampling.grammar.kind, sampling.grammar.text)
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest for values out of range; absent fields have their defaults."""
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}  # pyright: ignore[reportArgumentType]
    return SamplingParams(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_from_proto(message: pb.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("sampling.grammar", "is of no kind that is known here")
    return Grammar(GrammarKind(kind), getattr(message, kind))


def member_to_proto(member: Member) -> pb.Member:
    return pb.Member(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        address=member.address,
        first_layer=member.first_layer,
        last_layer=member.last_layer,
        draining=member.draining,
        data_address=member.data_address,
    )


def member_from_proto(message: pb.Member) -> Member:
    border.name("member.worker_id", message.worker_id)
    border.within("member.incarnation", message.incarnation, 1, border.MAX_EPOCH)
    border.within("member.first_layer", message.first_layer, 0, border.MAX_LAYERS - 1)
    border.within("member.last_layer", message.last_layer, message.first_layer + 1, border.MAX_LAYERS)
    border.text("member.address", message.address, border.MAX_ADDRESS_CHARS)
    border.text("member.data_address", message.data_address, border.MAX_ADDRESS_CHARS)
    return Member(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        address=message.address,
        first_layer=message.first_layer,
        last_layer=message.last_layer,
        draining=message.draining,
        data_address=message.data_address,
    )


def group_to_proto(group: Group) -> pb.Group:
    return pb.Group(group_id=group.group_id, members=[member_to_proto(member) for member in group.members])


def group_from_proto(message: pb.Group) -> Group:
    border.name("group.group_id", message.group_id)
    border.within("group.members", len(message.members), 1, border.MAX_MEMBERS)
    border.distinct("group.members", [member.worker_id for member in message.members])
    return Group(GroupId(message.group_id), tuple(member_from_proto(member) for member in message.members))


def place_to_proto(place: Place | None) -> pb.Place | None:
    return None if place is None else pb.Place(epoch=place.epoch, group=group_to_proto(place.group))


def place_from_proto(message: pb.Place) -> Place | None:
    """None of one that is not set."""
    if not message.epoch or not message.group.members:
        return None
    border.within("place.epoch", message.epoch, 1, border.MAX_EPOCH)
    return Place(Epoch(message.epoch), group_from_proto(message.group))


def layout_to_proto(layout: Layout) -> pb.Layout:
    groups = [group_to_proto(group) for group in layout.groups]
    return pb.Layout(epoch=layout.epoch, layer_count=layout.layer_count, groups=groups, reason=layout.reason)


def layout_from_proto(message: pb.Layout) -> Layout:
    """What it says of layers is looked at by `Layout.check`."""
    border.within("layout.epoch", message.epoch, 0, border.MAX_EPOCH)
    border.within("layout.layer_count", message.layer_count, 0, border.MAX_LAYERS)
    border.count("layout.groups", message.groups, border.MAX_GROUPS)
    border.distinct("layout.groups", [group.group_id for group in message.groups])
    border.text("layout.reason", message.reason)
    groups = tuple(group_from_proto(group) for group in message.groups)
    return Layout(Epoch(message.epoch), message.layer_count, groups, message.reason)


def memory_to_proto(report: MemoryReport) -> pb.MemoryReport:
    return pb.MemoryReport(
        budget_bytes=report.budget_bytes,
        parameter_bytes=report.parameter_bytes,
        kv_bytes=report.kv_bytes,
        free_bytes=report.free_bytes,
    )


def memory_from_proto(message: pb.MemoryReport) -> MemoryReport:
    report = MemoryReport(
        budget_bytes=message.budget_bytes,
        parameter_bytes=message.parameter_bytes,
        kv_bytes=message.kv_bytes,
        free_bytes=message.free_bytes,
    )
    parts = (report.budget_bytes, report.parameter_bytes, report.kv_bytes, report.free_bytes)
    if min(parts) < 0 or max(parts) > border.MAX_BYTES:
        raise InvalidRequest("load.memory", f"must be from 0 to {border.MAX_BYTES} bytes each: {report}")
    return report


def load_to_proto(report: LoadReport) -> pb.LoadReport:
    return pb.LoadReport(
        block_tokens=report.block_tokens,
        block_count=report.block_count,
        used_block_count=report.used_block_count,
        waiting_block_count=report.waiting_block_count,
        running_count=report.running_count,
        waiting_count=report.waiting_count,
        max_running_count=report.max_running_count,
        steps_total=report.steps_total,
        preemptions_total=report.preemptions_total,
        prompt_tokens_total=report.prompt_tokens_total,
        generation_tokens_total=report.generation_tokens_total,
        step_age_s=report.step_age_s,
        draining=report.draining,
        memory=memory_to_proto(report.memory),
        newest_epoch=report.newest_epoch,
    )


def load_from_proto(message: pb.LoadReport) -> LoadReport:
    report = LoadReport(
        block_tokens=message.block_tokens,
        block_count=message.block_count,
        used_block_count=message.used_block_count,
        waiting_block_count=message.waiting_block_count,
        running_count=message.running_count,
        waiting_count=message.waiting_count,
        max_running_count=message.max_running_count,
        steps_total=message.steps_total,
        preemptions_total=message.preemptions_total,
        prompt_tokens_total=message.prompt_tokens_total,
        generation_tokens_total=message.generation_tokens_total,
        step_age_s=message.step_age_s,
        draining=message.draining,
        memory=memory_from_proto(message.memory),
        newest_epoch=message.newest_epoch,
    )
    _check_load(report)
    return report


def _check_load(report: LoadReport) -> None:
    """Once for every step of every worker: one comparison for all counts."""
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
    )
    if min(counts) < 0:
        raise InvalidRequest("load", f"counts must not be negative, and a block has tokens: {report}")
    if report.newest_epoch > border.MAX_EPOCH:
        raise InvalidRequest("load.newest_epoch", f"must be at most {border.MAX_EPOCH}, got {report.newest_epoch}")
    if not 0.0 <= report.step_age_s <= border.MAX_SECONDS:
        raise InvalidRequest("load.step_age_s", f"must be a number of seconds, got {report.step_age_s}")


def model_to_proto(model: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        layer_count=model.layer_count,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        dtype=model.dtype,
        parameter_count=model.parameter_count,
        kv_bytes_per_token=model.kv_bytes_per_token,
        eos_token_ids=model.eos_token_ids,
        layer_parameter_bytes=model.layer_parameter_bytes,
        other_parameter_bytes=model.other_parameter_bytes,
        block_bytes=model.block_bytes,
        extent_bytes=model.extent_bytes,
    )


def model_from_proto(message: pb.ModelInfo) -> ModelInfo:
    _check_model(message)
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        layer_count=message.layer_count,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=message.dtype,
        parameter_count=message.parameter_count,
        kv_bytes_per_token=message.kv_bytes_per_token,
        eos_token_ids=tuple(message.eos_token_ids),
        layer_parameter_bytes=tuple(message.layer_parameter_bytes),
        other_parameter_bytes=message.other_parameter_bytes,
        block_bytes=message.block_bytes,
        extent_bytes=message.extent_bytes,
    )


def _check_model(message: pb.ModelInfo) -> None:
    for field in ("name", "architecture", "dtype"):
        border.text(f"model.{field}", getattr(message, field))
    border.within("model.layer_count", message.layer_count, 0, border.MAX_LAYERS)
    border.within("model.kv_bytes_per_token", message.kv_bytes_per_token, 0, border.MAX_BYTES)
    border.within("model.block_bytes", message.block_bytes, 0, border.MAX_BYTES)
    border.within("model.extent_bytes", message.extent_bytes, 0, border.MAX_BYTES)
    border.within("model.other_parameter_bytes", message.other_parameter_bytes, 0, border.MAX_BYTES)
    border.none_negative("model", (message.vocab_size, message.max_model_len, message.parameter_count))
    border.count("model.eos_token_ids", message.eos_token_ids, border.MAX_LAYERS)
    sizes = message.layer_parameter_bytes
    if sizes and (len(sizes) != message.layer_count or min(sizes) < 1 or sum(sizes) > border.MAX_BYTES):
        why = f"must be a positive size for each of {message.layer_count} layers, or empty"
        raise InvalidRequest("model.layer_parameter_bytes", why)
