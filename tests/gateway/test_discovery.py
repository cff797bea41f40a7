"""Models that no file names: they come and go with the backends that have them."""

from contextlib import AsyncExitStack

import msgspec

from tests.support.fake_backend import MODEL, FakeBackend, Received, Script, Wire
from tests.support.gateway_world import gateway_world, model_of, vllm_entry


def offers(*models: str) -> Script:
    """A page of models."""

    async def answer(asked: Received, wire: Wire) -> None:
        await wire.json({"object": "list", "data": [{"id": one} for one in models]})

    return answer


async def test_a_fallback_whose_model_went_away_ends_nothing(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await closing.enter_async_context(
        gateway_world(
            vllm_entry("a", a), vllm_entry("b", b), models=[model_of("chat", "a")],
            probe_every_s=3600.0,
        )
    )  # fmt: skip
    gateway = world.parts
    chained = model_of("chat", "a", fallback=MODEL)
    world.fleet = msgspec.structs.replace(world.fleet, models=(chained,))
    await gateway.reload()
    b.overrides["/v1/models"] = offers("other")
    for _ in range(2):
        gateway.registry.forget()
        await gateway.discover()
    assert list(gateway.live.now.table.routes) == ["chat", MODEL], "as before"
    assert world.log.count(f"The fallback of 'chat' is '{MODEL}', which is no model here") == 1
    assert (await world.chat()).status == 200
    b.overrides["/v1/models"] = offers(MODEL, "other")
    gateway.registry.forget()
    await gateway.discover()
    assert list(gateway.live.now.table.routes) == ["chat", MODEL, "other"]


async def test_a_model_whose_name_no_header_can_hold_is_left_out_and_told_once(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    a.overrides["/v1/models"] = offers("good", "b\nad", "", "b\x00ad")
    world = await closing.enter_async_context(
        gateway_world(vllm_entry("a", a), probe_every_s=3600.0)
    )
    for _ in range(2):
        world.parts.registry.forget()
        await world.parts.discover()
    assert [one["id"] for one in (await world.get("/v1/models")).json["data"]] == ["good"]
    assert (await world.chat(model="good")).status == 200
    assert (await world.chat(model="b\nad")).error["code"] == "model_not_found"
    assert world.log.count("model left out") == 1
    assert r"holds a control character: 'b\\nad'" in world.log
