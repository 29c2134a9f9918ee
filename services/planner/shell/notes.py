"""Log lines of the planner."""

from ballast.common.layout import Layout, Member
from ballast.service.logs import get_logger
from services.planner.core import messages as p
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage

_MOST_GROUPS_LOGGED = 16
_REFUSED = (p.WriteOutcome.CONFLICT, p.WriteOutcome.FENCED)


def note_layout(layout: Layout, cause_id: str) -> None:
    get_logger().info("layout", epoch=layout.epoch, reason=layout.reason, groups=describe(layout), cause_id=cause_id)


def note_rejected(command: p.RejectInstance) -> None:
    get_logger().error(
        "instance kept out: it serves another model than the cluster",
        worker=command.worker_id,
        incarnation=command.incarnation,
        why=command.why,
        cause_id=command.cause_id,
    )


def note_stale(command: p.IgnoreStale) -> None:
    get_logger().warning(
        "event of an old incarnation ignored",
        worker=command.worker_id,
        incarnation=command.have,
        newest=command.want,
        cause_id=command.cause_id,
    )


def note_probe(command: p.ProbeInstance, found: p.Probed) -> None:
    get_logger().warning(
        "an instance does not report to the monitor",
        worker=command.worker_id,
        incarnation=command.incarnation,
        address=command.address,
        planner_finds_it=found.name.lower(),
        cause_id=command.cause_id,
    )


def note_write(command: p.WriteLayout, outcome: p.WriteOutcome) -> None:
    if outcome in _REFUSED:
        get_logger().warning(
            "layout refused by the state server",
            epoch=command.layout.epoch,
            expected=command.expected_epoch,
            outcome=outcome.name.lower(),
            cause_id=command.cause_id,
        )


def note_journal(command: p.WriteJournal, outcome: p.WriteOutcome) -> None:
    if outcome in _REFUSED:
        get_logger().warning(
            "journal refused by the state server",
            epoch=command.journal.epoch,
            stage=command.journal.stage,
            outcome=outcome.name.lower(),
            cause_id=command.cause_id,
        )


def note_transition(record: TransitionRecord, cause_id: str) -> None:
    journal = record.journal
    log = get_logger().bind(epoch=journal.epoch, kind=str(journal.kind), cause_id=cause_id)
    if not journal.stage.over:
        log.info("transition", stage=str(journal.stage), by=record.by, why=journal.why or journal.failure)
    elif journal.stage is not Stage.DONE:
        log.warning("transition taken back", summary=record.summary, seconds=round(record.prepare_s, 3))
    else:
        log.info(
            "transition ended",
            summary=record.summary,
            prepare_s=round(record.prepare_s, 3),
            commit_s=round(record.seconds_in(Stage.COMMITTING), 3),
            exchange_s=round(record.seconds_in(Stage.EXCHANGING), 3),
            remap_s=round(record.longest_s("remap_s"), 4),
        )


def note_nothing(what: str, why: str, shortfall_bytes: int, cause_id: str) -> None:
    log = get_logger().bind(asked_by=what, why=why, cause_id=cause_id)
    if what == "overload":
        log.warning("memory remains short", shortfall_bytes=shortfall_bytes)
    else:
        log.info("no transition")


def note_sized(command: p.Sized) -> None:
    workers = " ".join(command.worker_ids[:_MOST_GROUPS_LOGGED])
    get_logger().info("another number serves", workers=workers, why="; ".join(command.lines), cause_id=command.cause_id)


def describe(layout: Layout) -> str:
    """Describe the layout on one line, for example "w1[0:8] | w2[0:4]+w3[4:8] draining"."""

    def stage(m: Member) -> str:
        what = "draining" if m.draining else "" if m.takes_new else m.standing
        return f"{m.worker_id}[{m.first_layer}:{m.last_layer}] {what}".rstrip()

    groups = ["+".join(stage(m) for m in group.members) for group in layout.groups[:_MOST_GROUPS_LOGGED]]
    more = len(layout.groups) - len(groups)
    return " | ".join(groups) + (f" and {more} more" if more else "")
