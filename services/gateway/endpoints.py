"""Handlers of the API's paths. Each takes a call and returns an answer or a stream of events."""

import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from ballast import __version__
from ballast.client import AsyncClient, Generation, GenerationChunk
from ballast.common.errors import BallastError, DeadlineExceeded, InvalidRequest, Unavailable
from ballast.common.sampling import SamplingParams
from services.gateway.anthropic import MessagesRequest, MessagesWriter
from services.gateway.errors import invalid
from services.gateway.generation import Ask, Generator, Numbered, RequestCaller, first_of
from services.gateway.models import KnownModel, ServedModel
from services.gateway.openai.chat import ChatWriter, Head, Wishes
from services.gateway.openai.completion import CompletionWriter
from services.gateway.openai.formats import (
    ReasoningParser,
    Thoughts,
    ToolFormat,
    answer,
    format_of,
    plain,
    thoughts_of,
)
from services.gateway.openai.messages import messages_for_template
from services.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
    refuse_unsupported,
)
from services.gateway.openai.responses import ResponsesRequest, ResponsesWriter
from services.gateway.openai.sampling import for_each_choice, priority_of, sampling_of
from services.gateway.openai.scanner import Format
from services.gateway.openai.structure import form_of
from services.gateway.openai.tools import ToolUse, tool_use_of

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
_MAX_TOP_LOGPROBS = 20

Events = AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request.

    Attributes:
        request_id: Unique id of the request; contains the x-request-id that the client has sent.
        body: The body, unpacked but not parsed.
        path: Parameters in the path.
        metadata: Metadata for calls to dispatchers: authorization, traceparent, targets.
        reply_headers: Additional headers of the response.
    """

    request_id: str
    body: bytes
    path: Mapping[str, str]
    metadata: Mapping[str, str]
    reply_headers: dict[str, str] = field(default_factory=dict[str, str])

    def report_ignored_keys(self, keys: Iterable[str]) -> None:
        """Add a response header that lists the keys of a JSON schema that are not enforced on the answer."""
        if names := ", ".join(sorted(keys)):
            self.reply_headers["x-ballast-schema-ignored"] = names


Reply = Mapping[str, object] | Events


class Writer(Protocol):
    """Writes one answer in the format of an API, as one object or as a stream of events."""

    def complete(self, generations: Sequence[Generation], /) -> Mapping[str, object]: ...

    def chunk(self, index: int, chunk: GenerationChunk, /) -> bytes:
        """Write a chunk of choice `index`. Returns its events, which may be empty."""
        ...

    def end(self) -> bytes:
        """Return the events after the last chunk of the last choice; may be empty."""
        ...


class HttpEndpoints:
    """The handlers of the API. They raise Failure or an error of `ballast.common.errors`."""

    def __init__(
        self,
        client: AsyncClient,
        generator: Generator,
        model: ServedModel,
        max_choices: int,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningParser = ReasoningParser.AUTO,
    ) -> None:
        """`max_choices`: limit on prompts times choices of a request. `tool_format`: format of the model's tool calls;
        None: detected from its chat template.
        """
        self._client = client
        self._generator = generator
        self._model = model
        self._max_choices = max_choices
        self._tool_format = tool_format
        self._reasoning = reasoning

    async def admit(self, metadata: Mapping[str, str]) -> None:
        """Check the caller's credentials (`ServedModel.admit`). Raises a BallastError if dispatchers refuse them."""
        await self._model.admit(metadata)

    # ------------------------------------------------------------------------------------------ generating

    async def chat(self, call: Call) -> Reply:
        request = parse(ChatRequest, call.body)
        return await self._chat(call, request, lambda head, wishes: ChatWriter(head, wishes))

    async def message(self, call: Call) -> Reply:
        request = parse(MessagesRequest, call.body)
        stop = request.stop_sequences or ()
        # Anthropic requires max_tokens, so clients send one that may exceed the model's maximum length.
        return await self._chat(
            call, request.as_chat(), lambda head, wishes: MessagesWriter(head, wishes, stop), fit_max_tokens=True
        )

    async def count_tokens(self, call: Call) -> Reply:
        tokens = await self._tokenize(call, parse(MessagesRequest, call.body).as_tokens())
        return {"input_tokens": len(tokens)}

    async def respond(self, call: Call) -> Reply:
        request = parse(ResponsesRequest, call.body)
        return await self._chat(call, request.as_chat(), lambda head, wishes: ResponsesWriter(head, wishes, request))

    async def _chat(
        self,
        call: Call,
        request: ChatRequest,
        make_writer: Callable[[Head, Wishes], Writer],
        *,
        fit_max_tokens: bool = False,
    ) -> Reply:
        served = await self._served(call, request.model)
        refuse_unsupported(request)
        if request.modalities and request.modalities != ["text"]:
            raise invalid("modalities", "this model writes text only", code="unsupported_value")
        given = [limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None]
        limit = given[0] if given else served.info.max_model_len
        logprobs = _top_logprobs(request)
        tools = tool_use_of(
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls is not False,
            template=served.chat_template,
            kind=self._tool_format,
        )
        form = form_of(request.response_format, request.structured)
        call.report_ignored_keys(form.left_out)
        grammar = form.grammar
        if tools is not None and tools.grammar is not None:
            grammar = tools.grammar
        variables = _template_variables(request)
        if tools is not None:
            variables["tools"] = tools.tools
        thoughts = thoughts_of(self._reasoning, served.chat_template, variables)
        if grammar is not None and thoughts is not None:
            grammar = thoughts.before(grammar)
        sampling = sampling_of(
            request,
            served.default_sampling,
            max_tokens=limit,
            logprobs=logprobs,
            grammar=grammar,
            prompt_logprobs=_prompt_logprobs(request),
            adapter=served.adapter_of(request.model),
        )
        is_harmony = self._tool_format is ToolFormat.OPENAI or "<|channel|>" in served.chat_template
        if tools is not None or is_harmony:
            sampling = replace(sampling, skip_special_tokens=False)  # some models' tool call tags are special tokens
        messages = messages_for_template(request.messages)
        asks = [
            Ask(sampling=each, messages=messages, template_variables=variables)
            for each in self._for_each_choice(sampling, request.choice_count)
        ]
        wishes = Wishes(
            logprobs=logprobs is not None,
            usage=request.usage_wish,
            token_ids=bool(request.return_token_ids),
            format=_format(tools, thoughts, is_harmony=is_harmony),
            prompt_logprobs=request.prompt_logprobs is not None,
            reasoning=request.include_reasoning is not False,
            most_calls=None if tools is None else tools.most_calls,
            thought_end_id=None if thoughts is None else await self._model.single_token(thoughts.end, call.metadata),
        )
        writer = make_writer(self._head(call, request, served), wishes)
        return await self._answer(call, request, asks, writer, fit_max_tokens=fit_max_tokens or not given)

    async def complete(self, call: Call) -> Reply:
        request = parse(CompletionRequest, call.body)
        served = await self._served(call, request.model)
        refuse_unsupported(request)
        if request.best_of is not None and request.best_of != request.choice_count:
            raise invalid("best_of", "is not supported beyond n", code="unsupported_value")
        prompts = _prompts(request)
        limit = _COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        form = form_of(request.response_format, request.structured)
        call.report_ignored_keys(form.left_out)
        counts = (_prompt_logprobs(request), request.logprobs if request.echo else None)
        scored = [count for count in counts if count is not None]
        sampling = sampling_of(
            request,
            served.default_sampling,
            max_tokens=1 if limit == 0 else limit,
            logprobs=request.logprobs,
            grammar=form.grammar,
            prompt_logprobs=max(scored, default=None),
            adapter=served.adapter_of(request.model),
        )
        each_prompt = self._for_each_choice(sampling, request.choice_count, len(prompts))
        asks = [
            Ask(sampling=each, prompt=prompt) if isinstance(prompt, str) else Ask(sampling=each, token_ids=prompt)
            for prompt in prompts
            for each in each_prompt
        ]
        echoes = [await self._echo(call, ask) if request.echo else "" for ask in asks]
        writer = CompletionWriter(
            self._head(call, request, served),
            Wishes(
                logprobs=request.logprobs is not None,
                usage=request.usage_wish,
                token_ids=bool(request.return_token_ids),
                prompt_logprobs=request.prompt_logprobs is not None,
            ),
            echoes,
            request.choice_count,
            drops=limit == 0,
        )
        return await self._answer(call, request, asks, writer, fit_max_tokens=request.max_tokens is None)

    async def _answer(
        self,
        call: Call,
        request: GenerationRequest,
        asks: Sequence[Ask],
        writer: Writer,
        *,
        fit_max_tokens: bool,
    ) -> Reply:
        caller = RequestCaller(
            request_id=call.request_id,
            priority=priority_of(request),
            metadata=call.metadata,
            fit_max_tokens=fit_max_tokens,
            cache_salt=request.cache_salt or "",
        )
        if request.stream:
            chunks = self._generator.stream(asks, caller)
            return _events(await first_of(chunks), chunks, writer)
        return writer.complete(await self._generator.collect(asks, caller))

    def _for_each_choice(self, sampling: SamplingParams, count: int, prompt_count: int = 1) -> list[SamplingParams]:
        if count * prompt_count > self._max_choices:
            why = f"{count * prompt_count} choices are requested; at most {self._max_choices} are allowed"
            raise invalid("n", why)
        return for_each_choice(sampling, count)

    async def _echo(self, call: Call, ask: Ask) -> str:
        if ask.prompt is not None:
            return ask.prompt
        return await self._text_of(call, "prompt", ask.token_ids or ())

    async def _text_of(self, call: Call, field: str, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, which the client has sent in `field`."""
        try:
            return await self._client.detokenize(token_ids, metadata=call.metadata)
        except InvalidRequest as error:
            raise InvalidRequest(re.sub("^(token_)?ids", field, error.field), error.why) from error

    def _head(self, call: Call, request: GenerationRequest, served: KnownModel) -> Head:
        tier = "default" if request.service_tier == "auto" else request.service_tier
        return Head(
            id=call.request_id,
            created=int(time.time()),
            model=request.model or served.name,
            service_tier=tier,
        )

    async def _served(self, call: Call, name: str | None) -> KnownModel:
        served = await self._model.get(call.metadata)
        served.adapter_of(name)
        return served

    # ------------------------------------------------------------------------------------------ all else

    async def models(self, call: Call) -> Reply:
        served = await self._model.ask(call.metadata)
        return {"object": "list", "data": [_model_card(name, served) for name in (*served.names, *served.adapters)]}

    async def model(self, call: Call) -> Reply:
        name = call.path["name"]
        if not name:
            return await self.models(call)  # /v1/models/ with a slash at the end
        served = await self._model.ask(call.metadata)
        served.adapter_of(name)
        return _model_card(name, served)

    async def tokenize(self, call: Call) -> Reply:
        request = parse(TokenizeRequest, call.body)
        tokens = await self._tokenize(call, request)
        served = await self._served(call, request.model)
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": served.info.max_model_len}

    async def _tokenize(self, call: Call, request: TokenizeRequest) -> Sequence[int]:
        await self._served(call, request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        refuse_unsupported(request)
        variables = _template_variables(request)
        if request.tools:
            variables["tools"] = request.tools
        return await self._client.tokenize(
            request.prompt,
            messages=None if request.messages is None else messages_for_template(request.messages),
            template_variables=variables,
            add_special_tokens=request.add_special_tokens is not False,
            metadata=call.metadata,
        )

    async def detokenize(self, call: Call) -> Reply:
        request = parse(DetokenizeRequest, call.body)
        await self._served(call, request.model)
        return {"prompt": await self._text_of(call, "tokens", request.tokens)}

    async def health(self, call: Call) -> Reply:
        """Report readiness: ok if a dispatcher answers. Raises Unavailable or DeadlineExceeded if none does."""
        try:
            await self._model.ask(call.metadata)
        except (Unavailable, DeadlineExceeded):
            raise
        except BallastError:
            pass  # a dispatcher answers, though this caller may lack a token
        return {"status": "ok"}

    async def live(self, call: Call) -> Reply:
        return {"status": "ok"}

    async def version(self, call: Call) -> Reply:
        return {"version": __version__}


async def _events(first: Numbered, chunks: AsyncGenerator[Numbered, None], writer: Writer) -> Events:
    async with aclosing(chunks):
        events = writer.chunk(*first)
        if events:
            yield events
        async for index, chunk in chunks:
            events = writer.chunk(index, chunk)
            if events:
                yield events
    last = writer.end()
    if last:
        yield last


def _format(tools: ToolUse | None, thoughts: Thoughts | None, *, is_harmony: bool) -> Format:
    if tools is not None:
        return tools.format(thoughts)
    if is_harmony:
        return format_of(ToolFormat.OPENAI, (), thoughts)
    return plain if thoughts is None else answer(thoughts, plain)


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "are part of complete answers; leave out stream", code="unsupported_value")
    return request.prompt_logprobs


def _top_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        return None
    count = request.top_logprobs or 0
    if not 0 <= count <= _MAX_TOP_LOGPROBS:
        raise invalid("top_logprobs", f"must be between 0 and {_MAX_TOP_LOGPROBS}, got {count}")
    return count


def _template_variables(request: ChatRequest | TokenizeRequest) -> dict[str, object]:
    variables: dict[str, object] = dict(request.chat_template_kwargs or {})
    names = ("enable_thinking", "reasoning_effort", "documents", "add_generation_prompt", "continue_final_message")
    variables |= {name: value for name in names if (value := getattr(request, name, None)) is not None}
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise invalid("continue_final_message", "and add_generation_prompt cannot both be true")
        if not request.messages or request.messages[-1].get("role") != "assistant":
            raise invalid("continue_final_message", "needs a last message of the assistant")
        variables["add_generation_prompt"] = False
    return variables


def _prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """Return the prompts of a request, each a text or a list of token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "must not be empty")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    return cast(list[str] | list[list[int]], prompt)


def _model_card(name: str, served: KnownModel) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "ballast",
        "root": name if name in served.adapters else served.info.name,
        "parent": served.name if name in served.adapters else None,
        "max_model_len": served.info.max_model_len,
    }
