"""A running cluster as a replay's target, called through the SDK."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from ballast.client import AsyncClient, ClusterStatus, SamplingParams
from ballast.common.errors import Unavailable
from ballast.common.model import ModelInfo
from tools.bench.records import StatusSample


class ClusterTarget:
    """The cluster of a client as a `Target`. Sampling is greedy. Refused requests are counted, not retried."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._model: ModelInfo | None = None
        self._preemptions: dict[tuple[str, int], int] = {}  # last count by (worker, incarnation)

    async def model(self) -> ModelInfo:
        if self._model is None:
            self._model = await self._client.model_info()
        return self._model

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        deadline_s: float,
        last_token: int | None = None,
    ) -> AsyncGenerator[Sequence[int]]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        if last_token is not None:
            most = (await self.model()).max_model_len - len(prompt_token_ids)
            stops = (last_token,)
            sampling = replace(sampling, max_tokens=most, min_tokens=max_tokens - 1, stop_token_ids=stops)
        stream = self._client.stream(
            token_ids=prompt_token_ids,
            sampling=sampling,
            request_id=request_id,
            deadline_s=deadline_s,
            include_text=False,
        )
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk.token_ids

    async def sample(self) -> StatusSample:
        statuses: list[ClusterStatus] = []
        failure: Unavailable | None = None
        for address in self._client.addresses:
            try:
                statuses.append(await self._client.status(address))
            except Unavailable as error:
                failure = error
        if not statuses and failure is not None:
            raise failure
        sample = sample_of(statuses)
        leaders = [leader for group in statuses[0].groups if (leader := group.leader) is not None]
        self._preemptions |= {(w.worker_id, w.incarnation): w.load.preemptions_total for w in leaders if w.load}
        return replace(sample, preemptions_total=sum(self._preemptions.values()))  # also those of present followers


def sample_of(statuses: Sequence[ClusterStatus]) -> StatusSample:
    """Sample of the whole cluster from its dispatchers' statuses: workers are taken from the first status, and backlogs
    are summed.

    Demand is the KV of running requests plus the prompts of waiting ones. A group's capacity is that of its smallest
    stage.

    Raises:
        Unavailable: the first dispatcher knows no worker yet.
    """
    status = statuses[0]
    if status.model is None:
        raise Unavailable(status.address, "knows no worker yet")
    groups, token_bytes = status.groups, status.model.kv_bytes_per_token
    loads = [group.load for group in groups if group.load is not None]
    backlog_token_count = sum(s.backlog_token_count for s in statuses)
    return StatusSample(
        at_s=0.0,
        kv_demand_bytes=(sum(group.demand_tokens for group in groups) + backlog_token_count) * token_bytes,
        kv_capacity_bytes=sum(group.capacity_tokens for group in groups) * token_bytes,
        kv_used_bytes=sum(group.used_tokens for group in groups) * token_bytes,
        running_count=sum(load.running_count for load in loads),
        waiting_count=sum(load.waiting_count for load in loads) + sum(s.backlog_request_count for s in statuses),
        preemptions_total=sum(load.preemptions_total for load in loads),
        epoch=status.layout.epoch if status.layout is not None else 0,
        epoch_reason=status.layout.reason if status.layout is not None else "",
        group_sizes=tuple(len(group.members) for group in groups),
    )
