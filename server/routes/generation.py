"""What the routes that generate have in common: from a request to a plain or streamed answer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.core.errors import RequestTimeoutError
from octavo.server.admission import Ticket
from octavo.server.context import current_request
from octavo.server.disconnect import run_until_disconnect
from octavo.server.engine_stream import GenerateRequest
from octavo.server.middleware import REQUEST_ID_HEADER
from octavo.server.output_stream import OutputStream
from octavo.server.protocol.common import GenerationBody, StreamOptions
from octavo.server.state import AppState, Serving, get_state
from octavo.server.streaming import LAST_WORDS_S, ChunkWriter, EventStream, write_events
from octavo.server.validation.fields import read_fields

Body = TypeVar("Body", bound=GenerationBody)


class GenerationJob(Protocol):
    """A checked request: what the engine shall do and how the answer is written."""

    requests: Sequence[GenerateRequest]

    async def answer(self, outputs: OutputStream) -> bytes:
        """Return the body of the plain answer."""

    def writer(self) -> ChunkWriter:
        """Return what renders the stream."""


Prepare = Callable[[Serving, Body], Awaitable[GenerationJob]]


async def generate(
    request: Request,
    model: type[Body],
    prepare: Prepare[Body],
    num_prompts: Callable[[Body], int] = lambda body: 1,
) -> Response:
    """Answer a request that generates, checking in the order that the API promises.

    State and queue come before the body is read, and everything that can be wrong with the body
    before a stream begins.
    """
    state = get_state(request)
    serving = state.require_serving()
    with contextlib.ExitStack() as held:
        ticket = held.enter_context(serving.admission.admit())
        body = await read_fields(request, lambda _: model)
        if body.request_id is not None and REQUEST_ID_HEADER not in request.headers:
            request.state.request_id = body.request_id
        if state.config.enable_force_include_usage and body.stream:
            body = _with_usage(body)
        ticket.resize(num_prompts(body))
        response = await run_until_disconnect(
            request, _respond(state, serving, body, prepare, ticket)
        )
        if isinstance(response, EventStream):
            # The stream gives the places back at its end.
            held.pop_all()
        return response


def _with_usage(body: Body) -> Body:
    options = body.stream_options or StreamOptions()
    forced = options.model_copy(update={"include_usage": True})
    return body.model_copy(update={"stream_options": forced})


async def _answer(job: GenerationJob, outputs: OutputStream) -> bytes:
    """Return the plain answer, soon or not at all once the engine has given the request up.

    Raises RequestTimeoutError.
    """
    context = current_request()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            context.watch(lambda: limit.reschedule(loop.time() + LAST_WORDS_S))
            try:
                return await job.answer(outputs)
            finally:
                context.watch(lambda: None)
    except TimeoutError:
        raise RequestTimeoutError("The request reached the time limit") from None


async def _respond(
    state: AppState, serving: Serving, body: Body, prepare: Prepare[Body], ticket: Ticket
) -> Response:
    job = await prepare(serving, body)
    outputs = OutputStream(serving.engine, job.requests)
    async with contextlib.AsyncExitStack() as held:
        held.push_async_callback(outputs.aclose)
        if not body.stream:
            return Response(await _answer(job, outputs), media_type="application/json")
        held.callback(ticket.release)
        writer = job.writer()
        events = write_events(outputs, writer, state.config.sse_keep_alive)
        held.push_async_callback(events.aclose)
        # An error before anything was sent is raised here and keeps its status.
        first = await anext(events)
        return EventStream(first, events, held.pop_all().aclose, writer.failed)
