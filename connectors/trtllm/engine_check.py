"""Checks, where the engine is installed, that the connector fits it and that two engines give one's tokens.

    python -m kvxfer.connectors.trtllm                  # only the interface
    python -m kvxfer.connectors.trtllm MODEL            # and prompts, through a prefill and a decode

Prints a line for each check. The part with a model has never run, because no engine was at hand. Each engine
takes one GPU: prefill the first visible one, decode the last.
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

_MODULE: Final = "kvxfer.connectors.trtllm"
_SCHEDULER: Final = "KvxferConnectorScheduler"
_WORKER: Final = "KvxferConnectorWorker"
_NUM_NEW_TOKENS: Final = 16
#: Lengths of prompts, in tokens: they end at every position of a block, and some span many blocks.
_LENGTHS: Final = (33, 64, 100, 257, 600)
_START_S: Final = 900.0
_ANSWER_S: Final = 300.0

#: Exit statuses.
PASSED, FAILED, MISSING = 0, 1, 2


class _Report:
    """The results of the checks."""

    def __init__(self) -> None:
        self.has_failed = False

    def line(self, passed: bool, what: str, found: str = "") -> None:
        self.has_failed |= not passed
        print(f"{'ok    ' if passed else 'FAILED'}  {what}{': ' if found else ''}{found}", flush=True)


def main(arguments: list[str]) -> int:
    """Runs the checks; returns 0 if all passed, 1 if one failed, 2 if there is no engine."""
    report = _Report()
    try:
        interface = importlib.import_module(f"{_MODULE}.interface")
    except ModuleNotFoundError as error:
        print(f"MISSING  {error}")
        print("nothing was checked: tensorrt_llm is not installed in this environment")
        return MISSING
    version = getattr(sys.modules.get("tensorrt_llm"), "__version__", "of an unknown version")
    report.line(True, f"TensorRT-LLM {version}", interface.module.__name__)
    _look_at_interface(report, interface.module)
    if arguments and not report.has_failed:
        _run_pair(report, arguments[0])
    else:
        print("not checked: whether two engines give the same tokens as one (pass a model to check it)")
    print("some checks failed, see above" if report.has_failed else "all checks passed")
    return FAILED if report.has_failed else PASSED


# ---- the interface ----------------------------------------------------------------------------


def _look_at_interface(report: _Report, module: Any) -> None:
    package = importlib.import_module(_MODULE)
    for name, base_name in ((_SCHEDULER, "KvCacheConnectorScheduler"), (_WORKER, "KvCacheConnectorWorker")):
        base = getattr(module, base_name)
        cls = getattr(package, name)
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        report.line(not missing, f"{name} has all methods that {base_name} requires", ", ".join(missing))
        unfit = [
            f"{each} must take ({', '.join(theirs)})"
            for each, own in vars(cls).items()
            if not each.startswith("_")
            and (theirs := _parameters(getattr(base, each, None)))
            and _parameters(own) != theirs
        ]
        report.line(not unfit, f"its methods take the parameters of {base_name}'s", "; ".join(unfit))
    recomputing = importlib.import_module(f"{_MODULE}.recomputing")
    has_method = hasattr(getattr(module, "KvCacheConnectorManager", None), recomputing.METHOD)
    report.line(has_method, f"KvCacheConnectorManager has {recomputing.METHOD} (failed_loads recompute)")
    try:
        bindings = importlib.import_module("tensorrt_llm.bindings.internal.batch_manager")
    except ImportError as error:
        report.line(False, "LlmRequest can be imported", str(error))
        return
    needed = importlib.import_module(f"{_MODULE}.llm_request").NEEDED
    lacking = [name for name in needed if not hasattr(bindings.LlmRequest, name)]
    report.line(not lacking, f"LlmRequest has {', '.join(needed)}", ", ".join(lacking))


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters) if inspect.isfunction(function) else []


# ---- two engines ------------------------------------------------------------------------------


def _run_pair(report: _Report, model: str) -> None:
    """Computes prompts with one engine alone, and with a prefill and a decode engine."""
    random_ = random.Random(0)
    prompts = [[random_.randrange(100, 10_000) for _ in range(length)] for length in _LENGTHS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    prefill = {"role": "prefill", "port": port}
    decode = {
        "role": "decode",
        "prefills": [f"tcp://127.0.0.1:{port}"],
        "lookup_timeout_s": 5,
        "log_level": "DEBUG",
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        _engine(model, None, visible[0], Path(folder) / "alone") as ask,
    ):
        expected = [ask(prompt, _NUM_NEW_TOKENS) for prompt in prompts]
    report.line(True, f"one engine alone answered {len(prompts)} prompts of {_LENGTHS} tokens")
    with (
        tempfile.TemporaryDirectory() as folder,
        _engine(model, prefill, visible[0], Path(folder) / "prefill") as to_prefill,
        _engine(model, decode, visible[-1], Path(folder) / "decode") as to_decode,
    ):
        for at, prompt in enumerate(prompts):
            to_prefill(prompt, 1)
            answer = to_decode(prompt, _NUM_NEW_TOKENS)
            report.line(
                answer == expected[at], f"a prompt of {len(prompt)} tokens: the same tokens as one engine"
            )
        log = (Path(folder) / "decode").read_text(errors="replace")
        num_loaded = log.count(": loaded (pull)")
        report.line(num_loaded >= len(prompts), f"decode has loaded {num_loaded} of {len(prompts)} prompts")
        report.line("cache not loaded" not in log, "no load has failed")
        if report.has_failed:
            print(log[-20_000:])


@contextmanager
def _engine(
    model: str, settings: dict[str, Any] | None, gpu: str, log: Path
) -> Iterator[Callable[[list[int], int], list[int]]]:
    """Runs an engine in its own process; yields a function that sends it a prompt and a number of tokens."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(model, settings, gpu, str(log), theirs))
    process.start()
    theirs.close()
    try:
        _answer(ours, _START_S)

        def ask(prompt: list[int], count: int) -> list[int]:
            ours.send((prompt, count))
            tokens: list[int] = _answer(ours, _ANSWER_S)
            return tokens

        yield ask
        ours.send(None)
        process.join(60)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _answer(line: Connection, timeout_s: float) -> Any:
    if not line.poll(timeout_s):
        raise TimeoutError(f"the engine did not answer within {timeout_s:g} s")
    return line.recv()


def _serve(model: str, settings: dict[str, Any] | None, gpu: str, log: str, line: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ["KVXFER_TRTLLM"] = json.dumps(settings or {})
    # At the file descriptors, so that the output of the engine's own processes is included.
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)
    llm_api: Any = importlib.import_module("tensorrt_llm")
    arguments: Any = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    options: dict[str, Any] = {}
    if settings is not None:
        options["kv_connector_config"] = arguments.KvCacheConnectorConfig(
            connector_module=_MODULE, connector_scheduler_class=_SCHEDULER, connector_worker_class=_WORKER
        )
    share = 0.2  # of the GPU's free memory: two engines may be on one
    cache = arguments.KvCacheConfig(free_gpu_memory_fraction=share, enable_block_reuse=False)
    engine = llm_api.LLM(
        model=model, backend="pytorch", cuda_graph_config=None, kv_cache_config=cache, **options
    )
    line.send("ready")
    while (asked := line.recv()) is not None:
        prompt, count = asked
        sampling = llm_api.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        line.send(list(engine.generate([prompt], sampling)[0].outputs[0].token_ids))
    engine.shutdown()
