"""Words that no command can take: one line with the argument, the value and what to give."""

import pytest

from dps_ray.cli.main import main

REPLAY = "bench replay azure-2023-code-excerpt --url http://localhost:1"
REFUSED = [
    ("benhc", "command is 'benhc': did you mean 'bench'? choose one of models, check"),
    ("bench kernel", "benchmark is 'kernel': did you mean 'kernels'? choose"),
    ("admin pin slow --fleet", "mode is 'slow': choose one of auto, full, fast"),
    ("admin pin fast", "--replica --fleet --key is required; see dps-ray admin pin --help"),
    ("admin pin fast --fleet --url localhost", "is 'localhost': give it with its scheme and host"),
    ("admin pin fast --fleet --token-file nofile", "--token-file is 'nofile': there is no such"),
    ("admin revoke --replica a --hold-s -1", "--hold-s is -1: give a number of at least 0"),
    ("explain --floor ful", "--floor is 'ful': did you mean 'full'? choose one of any, prefer"),
    ("explain --url localhost:8000/dps", "--url is 'localhost:8000/dps': give it with its scheme"),
    ("tune nofile.yaml", "costs is 'nofile.yaml': there is no such file; give the path of one"),
    ("tune . --levels 101", "costs is '.', a folder: give a file"),
    (f"tune {__file__} --levels 2", "--levels is 2: give a whole number of at least 3"),
    (f"tune {__file__} --compare 0.5,0.9", "--compare is '0.5,0.9': give HIGH,LOW, two shares of"),
    ("bench autoscaling --config nofile", "--config is 'nofile': there is no such file"),
    ("bench autoscaling --out no/folder.png", "--out is 'no/folder.png': there is no folder no"),
    ("demo --config nofile", "--config is 'nofile': there is no such file"),
    (f"demo --out {__file__}", ", a file: give a folder"),
    ("bench replay x --url localhost:8000", "its scheme and host, such as http://localhost:8000"),
    ("bench replay x --url http://a:99999", "--url is 'http://a:99999': Port out of range"),
    ("bench replay azure --url http://localhost", "trace is 'azure', which is no file: choose one"),
    (REPLAY, "--url is 'http://localhost:1': no server answers /v1/models there"),
    (f"{REPLAY} --precision fulll", "--precision is 'fulll': did you mean 'full'? choose one of"),
    (f"{REPLAY} --timeout-s -1", "--timeout-s is -1: give a number above 0"),
    (f"{REPLAY} --speed nan", "--speed is nan: give a number above 0"),
    (f"{REPLAY} --max-requests many", "--max-requests is 'many': give a whole number of at least"),
    ("bench kernels --row-s 0", "--row-s is 0: give a number above 0"),
    ("bench kernels --tokens 1 0", "--tokens is 0: give a whole number of at least 1"),
    ("bench kernels --threads 2 2", "--threads is [2, 2]: give different numbers"),
    ("bench engine --model nope", "--model is 'nope': choose one of smollm2, tiny:qwen3"),
    ("bench layers --model tiny:qwen", "--model is 'tiny:qwen': did you mean 'tiny:qwen3'?"),
    ("check chaos --fault cotroller", "--fault is 'cotroller': did you mean 'controller'? choose"),
    ("check engine --cycles 0", "--cycles is 0: give a whole number of at least 1"),
    ("bench fleet --policy mode_awar", "--policy is 'mode_awar': did you mean 'mode_aware'?"),
    ("models prepare smol", "model is 'smol': did you mean 'smollm2'? choose one of smollm2, tiny"),
    ("validate --jsn x.yaml", "unrecognized arguments: --jsn; see dps-ray validate --help"),
    ("bench --jsn", "dps-ray bench: unrecognized arguments: --jsn; see dps-ray bench --help"),
    ("--jsn", "dps-ray: unrecognized arguments: --jsn; see dps-ray --help"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_words_that_cannot_be_meant_are_refused_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert not said.out
    assert message in said.err
    assert said.err.startswith("dps-ray")
    assert said.err.count("\n") == 1


def test_bench_alone_says_what_each_benchmark_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert "accuracy while full precision returns layer by layer" in said
