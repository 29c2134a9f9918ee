"""Shared protobuf messages <-> plain types. Protobuf stops here and in the servicers."""

from ballast.common.errors import InvalidRequest
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Place
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason, Grammar, GrammarKind, PriorityClass, SamplingParams
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
    return Group(GroupId(message.group_id), tuple(member_from_proto(member) for member in message.members))


def place_to_proto(place: Place | None) -> pb.Place | None:
    return None if place is None else pb.Place(epoch=place.epoch, group=group_to_proto(place.group))


def place_from_proto(message: pb.Place) -> Place | None:
    """None of one that is not set."""
    if not message.epoch or not message.group.members:
        return None
    return Place(Epoch(message.epoch), group_from_proto(message.group))


def layout_to_proto(layout: Layout) -> pb.Layout:
    groups = [group_to_proto(group) for group in layout.groups]
    return pb.Layout(epoch=layout.epoch, layer_count=layout.layer_count, groups=groups, reason=layout.reason)


def layout_from_proto(message: pb.Layout) -> Layout:
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
    return MemoryReport(
        budget_bytes=message.budget_bytes,
        parameter_bytes=message.parameter_bytes,
        kv_bytes=message.kv_bytes,
        free_bytes=message.free_bytes,
    )


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
    return LoadReport(
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
