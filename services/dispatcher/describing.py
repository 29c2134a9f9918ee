"""Converts histories and latencies of requests to protobuf."""

from ballast.common.ids import DispatcherId
from ballast.rpc.mapping import Mapper
from ballastpb.inference.v1 import inference_pb2 as pb
from services.dispatcher.shell.chronicle import Account, Past, Times


def account_to_proto(account: Account, dispatcher_id: DispatcherId, at_s: float) -> pb.DescribeRequestResponse:
    facts = account.facts
    return pb.DescribeRequestResponse(
        request_id=account.request_id,
        dispatcher_id=dispatcher_id,
        state=account.state,
        error=account.error,
        age_s=at_s - account.at_s,
        priority=facts.priority.value,
        caller=facts.caller,
        prompt_token_count=facts.prompt_token_count,
        completion_token_count=facts.completion_token_count,
        max_token_count=facts.max_token_count,
        queue_s=facts.queue_s,
        ttft_s=facts.ttft_s,
        tpot_s=facts.tpot_s,
        e2e_s=facts.e2e_s,
        replay_count=facts.replay_count,
        move_count=facts.move_count,
        recall_count=facts.recall_count,
        longest_gap_s=facts.longest_gap_s,
        longest_gap_token_count=facts.longest_gap_token,
        moments=[
            pb.RequestMoment(
                at_s=moment.at_s - facts.arrived_at_s,
                what=moment.what.value,
                worker_id=moment.worker_id,
                detail=moment.detail,
                token_count=moment.token_count,
                gap_s=moment.gap_s,
            )
            for moment in facts.story.moments
        ],
        left_out_moment_count=facts.story.left_out_count,
    )


def past_to_proto(past: Past, now_unix_s: float, at_s: float) -> pb.EndedRequest:
    return pb.EndedRequest(
        arrived_unix_s=now_unix_s - (at_s - past.arrived_at_s),
        prompt_token_count=past.prompt_token_count,
        completion_token_count=past.completion_token_count,
        priority=past.priority.value,
    )


TIMES = Mapper(Times, pb.RecentTimes, given=("window_s", "generated_tokens_total", "replays_total"))
