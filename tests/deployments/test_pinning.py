"""The operator's pin on its way to an engine that may refuse it."""

import asyncio

from dps_deployments.pinning import PinKeeper

from dps_ray.modes import Pin


class Engine:
    """Takes pins, but fails so many times before."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.asked: list[Pin] = []

    async def take(self, pin: Pin) -> None:
        self.asked.append(pin)
        if len(self.asked) <= self.failures:
            raise TimeoutError("no answer")


async def look(keeper: PinKeeper, wanted: Pin | None, times: int = 5) -> None:
    for _ in range(times):
        keeper.keep(wanted)
        await asyncio.sleep(0.002)


def test_push_that_failed_is_repeated_until_the_engine_has_taken_it() -> None:
    async def run() -> list[Pin]:
        engine = Engine(failures=2)
        await look(PinKeeper(Pin.AUTO, engine.take, retry_pause_s=0.001), Pin.FAST, times=20)
        return engine.asked

    assert asyncio.run(run()) == [Pin.FAST] * 3


def test_failed_push_is_not_repeated_before_its_pause() -> None:
    async def run() -> list[Pin]:
        engine = Engine(failures=9)
        await look(PinKeeper(Pin.AUTO, engine.take, retry_pause_s=60.0), Pin.FAST)
        return engine.asked

    assert asyncio.run(run()) == [Pin.FAST]


def test_end_of_the_operators_pin_brings_back_the_one_the_engine_was_started_with() -> None:
    async def run() -> list[Pin]:
        engine = Engine()
        keeper = PinKeeper(Pin.FULL, engine.take)
        for wanted in (None, Pin.FAST, None):
            await look(keeper, wanted)
        return engine.asked

    assert asyncio.run(run()) == [Pin.FAST, Pin.FULL]
