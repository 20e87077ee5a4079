"""Replicas that start with two tensor-parallel ranks from some moment on."""

from pathlib import Path

from dps_deployments.server import DpsLLMServer

from .llm import BASE_KV_BYTES

RANKS = 2


def growing_server(sign: Path) -> type[DpsLLMServer]:
    """The fleet's own server, with two ranks where it starts once a file is there.

    So a fleet whose answers must be those of a single rank gets a replica to kill a rank of,
    without a start of its own: Serve starts one anyway in the place of a dead one.

    Parameters
    ----------
    sign
        The file.
    """

    class GrowingLLMServer(DpsLLMServer):
        async def start(self) -> None:
            if sign.exists():
                self._llm_config.get_engine_config().engine_kwargs.update(
                    tensor_parallel_size=RANKS, kv_cache_memory_bytes=BASE_KV_BYTES // RANKS
                )
            await super().start()

    return GrowingLLMServer
