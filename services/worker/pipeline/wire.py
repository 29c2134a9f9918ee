"""Messages between members of a group: plain types <-> protos/ballastpb/worker/v1/stage.proto."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from ballast.common.ids import Epoch, WorkerId
from ballast.common.sampling import Grammar, SamplingParams
from ballast.rpc.codec import SAMPLING
from ballast.rpc.mapping import Mapper
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core import migration_messages as m
from services.worker.core.batch import (
    Batch,
    NamedBlocks,
    NewSequence,
    NumberRuns,
    Slice,
    StepResult,
    SwapCopy,
    TakenBlocks,
    TokenLogprobs,
)
from services.worker.core.plan import Victim
from services.worker.core.room import RoomSizes
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.spans import Piece
from services.worker.core.transition_messages import RosterReceived, SendRoster

_COPY = Mapper(SwapCopy, pb.SwapCopy)
SNAPSHOT = Mapper(SequenceSnapshot, pb.SequenceState)


class Topic(IntEnum):
    """Type of a message or transfer; sent as a number."""

    BATCH = 1  # StageBatch and the hidden states of its tokens
    RESULT = 2
    EPOCH_ENDED = 3  # if a stage was lost: a Roster of the leader's sequences
    HANDOVER = 4
    ROSTER = 5
    KV_WANTED = 6
    KV_COMPLETE = 7
    CAPACITY = 8
    LAYER_WANTED = 9
    ROOM = 10  # limit of a group that will dissolve or is dissolving
    LAYER_REFUSED = 11  # payload: the reason, or nothing
    ROOM_WITHDRAWN = 14  # no payload
    BATCH_HEAD = 15  # a StageBatch too long for a header: the hidden states follow in a BATCH
    KV = 16  # transfers of KV; or a message with the last KV of a migrating sequence
    LAYER = 17  # transfers of a layer's parameters
    MIGRATION = 19
    WAVE = 21  # a Roster sent from stage to stage, in order with batches
    WAVE_DONE = 22  # no payload; the stream is the wave
    ACTIVATIONS_WANTED = 23
    ACTIVATIONS = 24  # activations from a stage's log
    GRAMMAR = 30  # to the last stage: announces a grammar; SamplingParams with no other field


def capacity_to_bytes(withdrawn: Epoch, block_count: int, sizes: RoomSizes) -> bytes:
    return pb.Capacity(
        epoch=withdrawn,
        block_count=block_count,
        leaving_block_count=sizes.leaving,
        home_block_count=sizes.home,
        host_block_count=sizes.host,
    ).SerializeToString()


def capacity_from_bytes(data: bytes) -> tuple[Epoch, int, RoomSizes]:
    told = pb.Capacity.FromString(data)
    sizes = RoomSizes(told.leaving_block_count, told.home_block_count, told.host_block_count)
    return Epoch(told.epoch), told.block_count, sizes


def room_to_bytes(epoch: Epoch, block_count: int) -> bytes:
    return pb.Room(epoch=epoch, block_count=block_count).SerializeToString()


def room_from_bytes(data: bytes) -> tuple[Epoch, int]:
    told = pb.Room.FromString(data)
    return Epoch(told.epoch), told.block_count


def batch_to_bytes(batch: Batch) -> bytes:
    slices = batch.slices
    return pb.StageBatch(
        step_id=batch.step_id,
        removed=batch.removed,
        added=[_new_to_proto(new) for new in batch.added],
        sequence_ids=[s.sequence_id for s in slices],
        first_positions=[s.first_position for s in slices],
        token_counts=[len(s.token_ids) for s in slices],
        token_ids=[token_id for s in slices for token_id in s.token_ids],
        samples=[s.samples for s in slices],
        quiet_s=batch.quiet_s,
        memory_is_awaited=batch.memory_is_awaited,
        failure=batch.failure,
        copies=[_COPY.message(copy) for copy in batch.copies],
        named=[pb.NamedBlocks(**named._asdict()) for named in batch.named],
        forgotten=_runs_to_proto(batch.forgotten),
        taken=[pb.TakenBlocks(sequence_id=s, runs=_runs_to_proto(runs)) for s, runs in batch.taken],
        safepoint_layers=batch.safepoint_layers,
    ).SerializeToString()


def batch_from_bytes(data: bytes) -> Batch:
    message = pb.StageBatch.FromString(data)
    token_ids, slices, at = tuple(message.token_ids), list[Slice](), 0
    for sequence_id, first, count, samples in zip(
        message.sequence_ids, message.first_positions, message.token_counts, message.samples, strict=True
    ):
        slices.append(Slice(sequence_id, first, token_ids[at : at + count], samples))
        at += count
    added = tuple(_new_from_proto(new) for new in message.added)
    removed, awaited = tuple(message.removed), message.memory_is_awaited
    copies = tuple(_COPY.record(copy) for copy in message.copies)
    return Batch(
        message.step_id,
        removed,
        added,
        tuple(slices),
        message.quiet_s,
        awaited,
        message.failure,
        copies,
        tuple(NamedBlocks(n.sequence_id, n.first_block, n.first_number, n.block_count) for n in message.named),
        _runs_from_proto(message.forgotten),
        tuple(TakenBlocks(t.sequence_id, _runs_from_proto(t.runs)) for t in message.taken),
        message.safepoint_layers,
    )


def _runs_to_proto(runs: NumberRuns) -> list[pb.BlockRun]:
    return [pb.BlockRun(first=first, count=count) for first, count in runs]


def _runs_from_proto(runs: Iterable[pb.BlockRun]) -> NumberRuns:
    return tuple((run.first, run.count) for run in runs)


def grammar_to_bytes(grammar: Grammar) -> bytes:
    return SAMPLING.message(SamplingParams(grammar=grammar)).SerializeToString()


def grammar_from_bytes(data: bytes) -> Grammar:
    """Decode a grammar. Raises ValueError if the message has none."""
    grammar = SAMPLING.record(cluster_pb2.SamplingParams.FromString(data)).grammar
    if grammar is None:
        raise ValueError("the grammar is empty")
    return grammar


def result_to_bytes(result: StepResult) -> bytes:
    rows = [i for i, logprobs in enumerate(result.logprobs) if logprobs is not None]
    return pb.StageResult(
        step_id=result.step_id,
        token_ids=result.token_ids,
        logprob_rows=rows,
        logprobs=[logprobs_to_proto(logprobs) for logprobs in result.logprobs if logprobs is not None],
        execute_s=result.execute_s,
        error_rows=[row for row, _ in result.errors],
        errors=[why for _, why in result.errors],
    ).SerializeToString()


def failure_to_bytes(step_id: int, why: str) -> bytes:
    return pb.StageResult(step_id=step_id, error=why or "unknown").SerializeToString()


def result_from_bytes(data: bytes) -> StepResult | tuple[int, str]:
    """Decode a result, or the step id of a failed batch and the reason."""
    message = pb.StageResult.FromString(data)
    if message.error:
        return message.step_id, message.error
    logprobs: list[TokenLogprobs | None] = [None] * len(message.token_ids)
    for row, entry in zip(message.logprob_rows, message.logprobs, strict=True):
        logprobs[row] = logprobs_from_proto(entry)
    errors = tuple(zip(message.error_rows, message.errors, strict=True))
    return StepResult(message.step_id, tuple(message.token_ids), tuple(logprobs), message.execute_s, errors=errors)


def victim_to_proto(victim: Victim) -> pb.Victim:
    return pb.Victim(
        sequence_id=victim.sequence_id,
        computed_tokens=victim.computed_tokens,
        old_leader=victim.old_leader,
        donor=victim.donor,
        donated_count=victim.donated_count,
    )


def victim_from_proto(message: pb.Victim) -> Victim:
    old_leader, donor = WorkerId(message.old_leader), message.donor
    return Victim(message.sequence_id, message.computed_tokens, old_leader, (), donor, message.donated_count)


def roster_to_bytes(roster: SendRoster | RosterReceived, recomputed: tuple[int, ...]) -> bytes:
    victims = [victim_to_proto(victim) for victim in roster.victims]
    said = pb.Roster(epoch=roster.epoch, victims=victims, recomputed=recomputed, wave=roster.wave, last=roster.last)
    return said.SerializeToString()


def logprobs_to_proto(logprobs: TokenLogprobs) -> cluster_pb2.Logprobs:
    return cluster_pb2.Logprobs(
        chosen=cluster_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[cluster_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in logprobs.top],
        prompt=map(logprobs_to_proto, logprobs.prompt),
    )


def logprobs_from_proto(message: cluster_pb2.Logprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    prompt = tuple(map(logprobs_from_proto, message.prompt))
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top, prompt)


# Mappers of migration messages, by field name. Any: each has its own record and message type.
_SAID: dict[str, Mapper[Any, Any]] = {
    "offer": Mapper(m.Offer, pb.MigrationOffer),
    "want": Mapper(m.Want, pb.MigrationWant),
    "handed": Mapper(m.Handed, pb.MigrationHanded),
    "taken": Mapper(m.Taken, pb.MigrationTaken),
    "off": Mapper(m.Off, pb.MigrationOff),
    "give": Mapper(m.Give, pb.MigrationGive),
    "take": Mapper(m.Take, pb.MigrationTake),
    "stop": Mapper(m.Stop, pb.MigrationStop),
    "keep": Mapper(m.Keep, pb.MigrationKeep),
    "ready": Mapper(m.Ready, pb.MigrationReady),
    "landed": Mapper(m.Landed, pb.MigrationLanded),
}
_SAID_AS = {mapper.record_type: name for name, mapper in _SAID.items()}
_PIECE = Mapper(Piece, pb.KvPiece)


def migration_to_bytes(message: m.Message) -> bytes:
    name = _SAID_AS[type(message)]
    made = pb.Migration()
    getattr(made, name).CopyFrom(_SAID[name].message(message))
    return made.SerializeToString()


def migration_from_bytes(data: bytes) -> m.Message:
    """Decode a message of a migration. Raises ValueError for an unknown one."""
    made = pb.Migration.FromString(data)
    name = made.WhichOneof("said")
    if name is None:
        raise ValueError("the migration message is empty")
    return _SAID[name].record(getattr(made, name))


def pieces_to_bytes(pieces: Iterable[Piece]) -> bytes:
    """Encode the list of KV pieces that a transfer or message carries."""
    return pb.KvPieces(pieces=[_PIECE.message(piece) for piece in pieces]).SerializeToString()


def pieces_from_bytes(data: bytes) -> list[Piece]:
    return [_PIECE.record(named) for named in pb.KvPieces.FromString(data).pieces]


def _new_to_proto(new: NewSequence) -> pb.NewSequence:
    return pb.NewSequence(
        sequence_id=new.sequence_id,
        prompt_token_ids=new.prompt_token_ids,
        output_token_ids=new.output_token_ids,
        sampling=SAMPLING.message(new.sampling),
    )


def _new_from_proto(message: pb.NewSequence) -> NewSequence:
    return NewSequence(
        message.sequence_id,
        tuple(message.prompt_token_ids),
        tuple(message.output_token_ids),
        SAMPLING.record(message.sampling),
    )
