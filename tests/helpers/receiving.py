"""A loopback server that receives weights over a process group, as vLLM does with our plug-in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from agentenv.engine.vllm import wire
from helpers.fake_vllm import FakeVLLM


@dataclass
class Receiving(FakeVLLM):
    """Receives weights as vLLM does with our plug-in."""

    got: dict = field(default_factory=dict)
    finished: list = field(default_factory=list)
    channel: wire.Channel | None = None
    is_open: bool = False
    refuses: str = ""
    """Command that the server refuses."""
    dies_at: str = ""
    """Command during which the connection breaks, once."""
    alters: bool = False
    """Whether the weights become others while they are loaded."""

    def app(self):
        app = super().app()
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights"):
            app.router.add_post(f"/{name}", getattr(self, name))
        app.router.add_post("/finish_weight_update", self.finish)
        app.router.add_get("/get_world_size", self.world_size)
        return app

    async def world_size(self, _):
        return web.json_response({"world_size": 1})

    async def command(self, request, name):
        self.posts.append(name)
        if self.refuses == name:
            raise web.HTTPInternalServerError(text='{"error": {"message": "no transfer engine"}}')
        if self.dies_at == name:
            self.dies_at = ""
            request.transport.close()
            raise web.HTTPInternalServerError
        return await request.json()

    async def init_weight_transfer_engine(self, request):
        body = await self.command(request, "init")
        meeting = wire.Rendezvous(**body["init_info"])
        self.channel = await asyncio.to_thread(wire.Channel, meeting, 1)
        await asyncio.to_thread(self.channel.connect)
        return web.json_response({})

    async def start_weight_update(self, request):
        await self.command(request, "start")
        if self.is_open:
            raise web.HTTPInternalServerError(text='{"error": {"message": "an update is active"}}')
        self.is_open, self.got = True, {}
        return web.json_response({})

    async def update_weights(self, request):
        described = (await self.command(request, "update"))["update_info"]
        tensors = await asyncio.to_thread(lambda: dict(self.channel.receive(described, "cpu")))
        self.got |= {name: tensor.clone() for name, tensor in tensors.items()}
        return web.json_response({})

    async def finish(self, request):
        self.finished.append((await self.command(request, "finish")).get("weight_version"))
        if self.channel is not None:
            await asyncio.to_thread(self.channel.verify)
        self.is_open = False
        self.version = self.finished[-1] or self.version
        return web.json_response({})

    async def checker(self, _):
        total = sum(float(tensor.double().sum()) for tensor in self.got.values())
        return web.json_response({"checksums": {"all": str(total + self.alters)}})


class Emptied(Receiving):
    """Reads the bytes and keeps none, so that many fit into the memory of a machine."""

    async def update_weights(self, request):
        described = (await self.command(request, "update"))["update_info"]
        await asyncio.to_thread(lambda: dict(self.channel.receive(described, "cpu")))
        return web.json_response({})
