"""The server of the endpoint: each session has an address of its own, which contains a secret.

1. `URL/v1/chat/completions` and `URL/v1/responses` serve OpenAI's SDK and all that speak its API, and
   `URL/v1/messages` Anthropic's; `URL` is the session's address. A client whose base URL lacks `/v1`, or has
   it twice, is served too.
2. The secret in the address is what lets a client act. The keys that SDKs send are not read.
3. The guard of all our servers refuses requests of web pages, of other hosts, and other bodies than JSON.
4. A reply counts as delivered once it was written to a connection that was open. A stream that breaks off in
   the middle delivers nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from aiohttp import web

from agentenv.core.errors import RenderError, UsageError
from agentenv.core.serving.guard import Guard, Refused, new_token
from agentenv.core.serving.listening import guarded, listen, read_body
from agentenv.endpoint.bodies import Bodies, Body
from agentenv.endpoint.live import Listener, StreamedAnswer
from agentenv.endpoint.request import Answer, Asked, NotAnswered
from agentenv.endpoint.session import Session
from agentenv.endpoint.share import check_bounds
from agentenv.endpoint.wire.chat import ChatCompletions
from agentenv.endpoint.wire.common import Conversations, Event, Head, Json, Wire, new_id
from agentenv.endpoint.wire.messages import Messages
from agentenv.endpoint.wire.responses import Responses

__all__ = ["Endpoint", "serve_sessions", "session_url"]

MAX_BODY_BYTES = 256 << 20
"""Largest body of a request; a request holds the whole conversation."""
WIRES: Mapping[str, Wire] = {
    "/chat/completions": ChatCompletions(),
    "/messages": Messages(),
    "/responses": Responses(),
}
_NO_RETRY = {"x-should-retry": "false"}
"""Tells OpenAI's and Anthropic's SDKs not to send the request again."""


@dataclass(slots=True)
class _Served:
    """A session that is served."""

    session: Session
    held: Conversations = field(default_factory=Conversations)
    bodies: Bodies = field(default_factory=Bodies)

    def hold(self, wire: Wire, head: Head, answer: Answer) -> None:
        """Keep the conversation of an answer, if a request may name it."""
        if wire.holds:
            self.held[head.id] = ([*head.asked.messages, answer.message], head.asked.tools)
            self.held.issued.update((item["id"], item) for item in head.items)


class Endpoint:
    """Serves sessions to agents.

    Args:
        guard: rules for whom the server answers; the secrets of the sessions stand in for its token.
        model: name of the model in the list of models.
        key_of: returns the keys that a request may carry in place of the guard's token.
    """

    def __init__(
        self,
        guard: Guard | None = None,
        *,
        model: str = "agentenv",
        key_of: Callable[[web.Request], Iterable[str]] = lambda _: (),
    ) -> None:
        self.guard = guard or Guard(token="")
        self.url = ""
        """Address of the server, once it listens."""
        self._model = model
        self._key_of = key_of
        self._sessions: dict[str, _Served] = {}

    def open(self, session: Session) -> str:
        """Serve a session, and return its secret."""
        secret = new_token()
        self._sessions[secret] = _Served(session)
        return secret

    def url_of(self, secret: str) -> str:
        """Return the address of a session; OpenAI's SDKs get it with `/v1` at its end."""
        return f"{self.url}/s/{secret}"

    async def close(self, secret: str) -> None:
        """Serve a session no more, and end its requests."""
        if (closed := self._sessions.pop(secret, None)) is not None:
            await closed.session.close()

    async def close_all(self) -> None:
        """Serve no session any more."""
        for secret in list(self._sessions):
            await self.close(secret)

    def app(self, more: Iterable[web.RouteDef] = ()) -> web.Application:
        """Return the aiohttp application of the server.

        Args:
            more: further routes, which may be below the addresses of sessions.
        """
        asks_first = guarded(self.guard, tokens=self._key_of)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[asks_first])
        app.router.add_routes(more)
        for base in ("", "/v1", "/v1/v1"):
            root = "/s/{secret}" + base
            for path in WIRES:
                app.router.add_post(root + path, self._answer)
            app.router.add_post(f"{root}/messages/count_tokens", self._count)
            app.router.add_get(f"{root}/models", self._models)
            app.router.add_get(f"{root}/models/{{model}}", self._models)
        app.router.add_route("*", "/s/{secret}/{rest:.*}", self._unknown)
        return app

    async def _unknown(self, request: web.Request) -> web.Response:
        """Tell a client that it asks for something that no address serves."""
        path = request.match_info["rest"]
        told = (
            f"{request.method} {path!r:.80} is not served here. Served are POST {', '.join(WIRES)} and "
            f"/messages/count_tokens and GET /models, all with or without /v1 before them"
        )
        wire = WIRES["/messages" if "anthropic-version" in request.headers else "/chat/completions"]
        return _refused(wire, NotAnswered(404, "unknown_url", told))

    def _of(self, request: web.Request) -> _Served:
        served = self._sessions.get(request.match_info["secret"])
        if served is None:
            raise Refused(404, "there is no session at this address", remedy="it may be over")
        return served

    async def _models(self, request: web.Request) -> web.Response:
        self._of(request)
        name = request.match_info.get("model", self._model)
        model: Json = {"id": name, "object": "model", "created": 0, "owned_by": "agentenv"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        if "model" in request.match_info:
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _count(self, request: web.Request) -> web.Response:
        """Count the tokens of a conversation in Anthropic's format."""
        wire = WIRES["/messages"]
        served = self._of(request)
        try:
            _, asked = await _read(request, wire, served)
            return web.json_response({"input_tokens": await served.session.count_tokens(asked)})
        except RenderError as error:
            return _refused(wire, NotAnswered(400, "invalid_request", str(error)))
        except NotAnswered as error:
            return _refused(wire, error)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of an agent."""
        wire = next(wire for path, wire in WIRES.items() if request.path.endswith(path))
        try:
            served = self._of(request)
        except Refused as error:
            return _refused(wire, NotAnswered(404, "no_session", str(error)))
        try:
            body, asked = await _read(request, wire, served)
            head = Head(asked, body, new_id(wire.id_prefix))
            if asked.stream:
                return await self._stream(request, wire, head, served)
            answer = await served.session.ask(asked, lambda: _is_gone(request))
        except NotAnswered as error:
            served.session.refusal = str(error)
            return _refused(wire, error)
        response = web.json_response(wire.whole(head, answer))
        served.hold(wire, head, answer)
        await response.prepare(request)
        await response.write_eof()
        if not _is_gone(request):
            served.session.delivered(answer)
        return response

    async def _stream(
        self, request: web.Request, wire: Wire, head: Head, served: _Served
    ) -> web.StreamResponse:
        """Answer a request in parts, while the model samples.

        Raises:
            NotAnswered: The request failed before the first part.
        """
        listener, events, sent = Listener(), StreamedAnswer(wire.stream(head)), _EventStream(request)
        asking = asyncio.create_task(served.session.ask(head.asked, lambda: _is_gone(request), listener.tell))
        try:
            while not asking.done():
                await listener.wait(asking)
                if listener.progress is not None and not asking.done():
                    await sent.write(events.news(listener.progress))
            answer = await asking
            last = list(events.end(answer))
            # A client may name the answer as soon as it has its last event.
            served.hold(wire, head, answer)
            await sent.write(last)
            await sent.response.write_eof()
            if not _is_gone(request):
                served.session.delivered(answer)
        except NotAnswered as error:
            if not sent.response.prepared:
                raise
            await sent.write(events.stream.failed(error))
        except ConnectionError:
            pass  # the client has hung up, and the reply is not delivered
        finally:
            asking.cancel()
        return sent.response


class _EventStream:
    """Sends the events of a streamed answer; the first ones open it."""

    def __init__(self, request: web.Request) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self._request = request

    async def write(self, events: Iterable[Event]) -> None:
        """Send events at once.

        Raises:
            ConnectionError: The client has hung up.
        """
        data = b"".join(map(_event_bytes, events))
        if not self.response.prepared:
            await self.response.prepare(self._request)
        if data:
            await self.response.write(data)


def _event_bytes(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


async def _read(request: web.Request, wire: Wire, served: _Served) -> tuple[Json, Asked]:
    """Return the body of a request, and what it asks for.

    Raises:
        NotAnswered: It is no request of the wire format.
    """
    content = await read_body(request)

    def read() -> tuple[Body, Asked]:
        body = served.bodies.read(request.path, content)
        served.held.last = body.converted
        return body, wire.read(body.value, served.held)

    try:
        body, asked = await served.session.share.run(len(content), read)
    except KeyError as error:
        raise NotAnswered(400, "invalid_request", f"the body has no {error}") from error
    except UsageError as error:
        raise NotAnswered(400, "invalid_request", str(error)) from error
    except (TypeError, ValueError, AttributeError) as error:
        told = f"the body does not have the form of the API: {error}"
        raise NotAnswered(400, "invalid_request", told) from error
    check_bounds(asked)
    retry = request.headers.get("x-stainless-retry-count", "0") != "0"
    return body.value, replace(asked, digest=body.digest, retry=retry, size=len(content))


def _is_gone(request: web.Request) -> bool:
    """Return whether the client has hung up."""
    return request.transport is None or request.transport.is_closing()


def _refused(wire: Wire, error: NotAnswered) -> web.Response:
    headers = None if error.retry else _NO_RETRY
    return web.json_response(wire.error(error), status=error.status, headers=headers)


@asynccontextmanager
async def serve_sessions(
    guard: Guard | None = None, *, port: int = 0, model: str = "agentenv"
) -> AsyncGenerator[Endpoint]:
    """Serve sessions while the block runs, and yield the endpoint that opens and closes them.

    Args:
        guard: rules for whom the server answers; None answers clients of this machine.
        port: port at which the server listens; 0 chooses a free one.
        model: name of the model in the list of models.

    Raises:
        OSError: The port is in use.
    """
    endpoint = Endpoint(guard, model=model)
    async with listen(endpoint.app(), endpoint.guard, port=port) as served:
        endpoint.url = served.url
        try:
            yield endpoint
        finally:
            await endpoint.close_all()


@dataclass(slots=True)
class _Hub:
    """The server of an event loop."""

    # Invariant: the server listens exactly while `users` is positive, outside of the lock.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    endpoint: Endpoint | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def enter(self) -> Endpoint:
        """Start the server if nobody uses it yet."""
        async with self.lock:
            if self.endpoint is None:
                self.endpoint = await self.stack.enter_async_context(serve_sessions())
            self.users += 1
            return self.endpoint

    async def leave(self) -> None:
        """Stop the server if nobody uses it any more."""
        async with self.lock:
            self.users -= 1
            if not self.users:
                self.endpoint = None
                await self.stack.aclose()


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub] = WeakKeyDictionary()


@asynccontextmanager
async def session_url(session: Session) -> AsyncGenerator[str]:
    """Serve a session while the block runs, and yield its address.

    OpenAI's SDKs take the address with `/v1` at its end, Anthropic's take it as it is.
    """
    hub = _hubs.setdefault(asyncio.get_running_loop(), _Hub())
    endpoint = await hub.enter()
    secret = endpoint.open(session)
    try:
        yield endpoint.url_of(secret)
    finally:
        await endpoint.close(secret)
        await asyncio.shield(hub.leave())
