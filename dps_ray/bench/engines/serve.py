"""The child's side: one engine that does the work it is told until the pipe closes."""

import json
import sys
from typing import Any

from dps_ray.bench.engines.turns import connection_of
from dps_ray.bench.engines.work import WORK
from dps_ray.checks.engine import engine
from dps_ray.checks.specs import EngineSpec


def _main(handle: str) -> None:
    connection = connection_of(handle)

    def answer(message: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(message).encode())

    def orders() -> Any:
        return json.loads(connection.recv_bytes())

    spec = EngineSpec.from_dict(orders()["spec"])
    try:
        with engine(spec) as running:
            answer({})
            while True:
                order = orders()
                answer(WORK[order["work"]](running, **order["arguments"]))
    except EOFError:
        return
    except ValueError as error:
        # vLLM's and our own word for a configuration that cannot work.
        answer({"refused": str(error)})


if __name__ == "__main__":
    _main(*sys.argv[1:])
