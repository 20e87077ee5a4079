"""Kills one tensor-parallel rank in the middle of a restore, and prints what becomes of the engine.

Run in a process of its own: ``dying_rank.py MODEL``. Rank 1 is stopped before the restore is
ordered, so that the order finds it and no segment can come back; then it is killed.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from dps_ray.checks.scenarios import prompts
from dps_ray.demo.processes import descendants
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Pin

TIMEOUT_S = 120.0


def worker(rank: int) -> int:
    """PID of a rank's process."""
    for pid in descendants():
        if f"Worker_TP{rank}" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise RuntimeError(f"no process of rank {rank} among {sorted(descendants())}")


def ask(llm: LLM, count: int, tokens: int) -> list[Any]:
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts(count, tokens, tokens)]
    return llm.generate(
        asked, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )


def pinned(page: StatusPage, pin: Pin) -> bool:
    """Whether an engine without requests comes to run under ``pin``."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = page.read()
        if status is not None and status.pin is pin and str(status.mode) == str(pin):
            return True
        time.sleep(0.01)
    return False


def kill_once_restoring(page: StatusPage, pid: int, seen: dict[str, Any]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = page.read()
        if status is not None and status.restoring:
            seen["restoring"] = True
            break
        time.sleep(0.001)
    seen["killed_at_s"] = time.monotonic()
    os.kill(pid, signal.SIGKILL)


def main(model: str) -> None:
    llm = LLM(
        model=model, quantization="dps", tensor_parallel_size=2, enforce_eager=True,
        kv_cache_memory_bytes=1 << 20, max_model_len=1024, max_num_seqs=16, block_size=32,
        additional_config={"dps": {"min_fast_dwell_s": 0.0}},
    )  # fmt: skip
    key = llm.llm_engine.vllm_config.additional_config["dps"]["key"]
    page, seen = StatusPage.attach(key), dict[str, Any]()
    llm.collective_rpc("dps_set_pin", args=("fast",))
    seen["idle_engine_obeys"] = pinned(page, Pin.FAST)
    ask(llm, 12, 160)
    before = page.read()
    assert before is not None
    seen["units_lent"] = before.units_kv
    children = descendants()
    pid = worker(1)
    page.set_pin(Pin.AUTO)
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Thread(target=kill_once_restoring, args=(page, pid, seen))
    killer.start()
    try:
        ask(llm, 1, 30)
    except Exception as error:
        seen["error"] = type(error).__name__
    killer.join()
    seen["noticed_after_s"] = time.monotonic() - seen.pop("killed_at_s")
    after = page.read()
    assert after is not None
    seen |= {"mode": str(after.mode), "units_backed": after.units_backed, "units": after.units}
    seen |= {"children": sorted(children), "key": key}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
