"""``husky server`` as a real process on FIX-B: C128, C130, C131, C132, C133 and 200 requests.

The right answers come from mlx-lm's own model class in this process.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.server
import psutil
import pytest
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.sample_utils import make_logits_processors
from server_fixture import write_fix_b

from husky_mlx import cli, memory, serving
from husky_mlx.errors import HuskyError, MemoryLimitError

ROOT = Path(__file__).resolve().parents[1]
LETTERS = dict.fromkeys([*range(ord("a"), ord("z") + 1), ord(" ")], 60.0)
START_SECONDS = 60


@dataclass
class Server:
    """A running server and the two ways of asking it."""

    port: int
    process: subprocess.Popen

    def open(self, prompt: str, **options) -> http.client.HTTPResponse:
        body = {"prompt": prompt, "max_tokens": 12, "logit_bias": LETTERS, **options}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection.getresponse()

    def ask(self, prompt: str, **options) -> tuple[str, str]:
        """(text, finish_reason) of a complete answer."""
        with self.open(prompt, **options) as response:
            answer = json.loads(response.read())
        assert response.status == 200, answer
        (choice,) = answer["choices"]
        return choice["text"], choice["finish_reason"]

    def models(self) -> list[str]:
        """The names under /v1/models."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/v1/models")
        return [model["id"] for model in json.loads(connection.getresponse().read())["data"]]

    def stream(self, prompt: str, **options) -> tuple[list[str], str]:
        """(pieces of text, finish_reason) of a streamed answer."""
        with self.open(prompt, stream=True, **options) as response:
            lines = response.read().decode().splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        return [choice["text"] for choice in choices], choices[-1]["finish_reason"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_fix_b(tmp_path_factory.mktemp("server") / "fix-b")


@pytest.fixture(scope="module")
def stock(model):
    """mlx-lm's own greedy answer to a prompt, and its own logits processors."""
    loaded, tokenizer = mlx_lm.load(str(model))

    def answer(prompt: str, max_tokens: int = 12, **penalties) -> str:
        return mlx_lm.generate(
            loaded,
            tokenizer,
            tokenizer.encode(prompt),
            max_tokens=max_tokens,
            logits_processors=make_logits_processors(LETTERS, **penalties),
        )

    return answer


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    yield from _serve(model, tmp_path_factory.mktemp("log") / "server.log")


def _serve(model: Path, log: Path, *options: str):
    port = _free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HUSKY_")}
    command = ["server", "--model", str(model), "--port", str(port), *options]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "husky_mlx", *command],
            stdout=stream,
            stderr=stream,
            env=environment | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )
    try:
        started = Server(port, process)
        _wait_until(lambda: _healthy(started), lambda: log.read_text())
        yield started
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _healthy(server: Server) -> bool:
    assert server.process.poll() is None, "the server ended"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ConnectionError:
        return False


def _wait_until(condition, explain) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {START_SECONDS} s: {explain()}")


def test_one_request(server, stock):
    """The text is the one that the public case gives for FIX-B."""
    assert stock("hello") == "nmayfiayfiay"
    assert server.ask("hello") == ("nmayfiayfiay", "length")


def test_chat_request(server, model):
    loaded, tokenizer = mlx_lm.load(str(model))
    messages = [{"role": "user", "content": "what"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    processors = make_logits_processors(LETTERS)
    expected = mlx_lm.generate(
        loaded, tokenizer, prompt, max_tokens=9, logits_processors=processors
    )
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"messages": messages, "max_tokens": 9, "logit_bias": LETTERS}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("stop", ["yfi", ["yfi", "fiayz"], ["zzz", "yfi"]])
def test_stop_string_over_three_tokens_C128(server, stop):
    assert server.ask("hello", stop=stop) == ("nma", "stop")
    pieces, reason = server.stream("hello", stop=stop)
    assert ("".join(pieces), reason) == ("nma", "stop")


def test_empty_stop_string_is_ignored_C128(server):
    assert server.ask("hello", stop="") == ("nmayfiayfiay", "length")


PENALTY = {"repetition_penalty": 1.5, "repetition_context_size": 20}


def test_penalty_beside_none_C130(server, stock):
    plain, penalised = "the man in the " * 12, "an inn in the " * 12
    solo = [stock(plain, 24), stock(penalised, 24, **PENALTY)]
    assert solo[1] != stock(penalised, 24)
    assert server.ask(penalised, max_tokens=24, **PENALTY)[0] == solo[1]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            both = [
                pool.submit(server.ask, plain, max_tokens=24),
                pool.submit(server.ask, penalised, max_tokens=24, **PENALTY),
            ]
            assert [answer.result()[0] for answer in both] == solo


def test_closed_stream_stops_its_generation_C131(server, stock):
    """50,000 tokens would keep the server busy for minutes; it must be idle soon instead."""
    response = server.open("hello", stream=True, max_tokens=50_000)
    assert response.readline().startswith(b"data: ") or response.readline()
    response.close()
    assert server.ask("what")[0] == stock("what")
    process = psutil.Process(server.process.pid)

    def idle() -> bool:
        before = process.cpu_times()
        time.sleep(0.5)
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system < 0.1

    _wait_until(idle, lambda: "the server still works for the closed stream")


def test_same_prompt_twice_C132(server, stock):
    prompt = "say the same thing twice"
    assert [server.ask(prompt)[0] for _ in range(2)] == [stock(prompt)] * 2


def test_eight_at_once_equal_one_after_another_C132(server, stock):
    """Twice as many as the frozen step takes rows, so both paths run."""
    text = "once upon a time in a land far away there was a man who had an inn by the river bank"
    prompts = [text[: 4 + 11 * i] for i in range(8)]
    expected = [stock(prompt, 16) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: server.ask(prompt, max_tokens=16)[0], prompts))
    assert together == expected
    assert [server.ask(prompt, max_tokens=16)[0] for prompt in prompts] == expected


def test_seed_C133(server):
    def sample(seed: int) -> str:
        return server.ask("hello", temperature=1.0, seed=seed, max_tokens=24, logit_bias=None)[0]

    first, second, other = sample(1), sample(1), sample(2)
    assert first == second != other


def test_seed_beside_other_traffic_C133(server, stock):
    def sample() -> str:
        return server.ask("hello", temperature=1.0, seed=5, max_tokens=24, logit_bias=None)[0]

    alone = sample()
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(server.ask, f"what {i}", temperature=1.0) for i in range(3)]
        assert pool.submit(sample).result() == alone
        for other in others:
            other.result()
    assert server.ask("hello")[0] == stock("hello")


@pytest.mark.slow
def test_200_requests_without_growth_or_wrong_token(server, stock):
    """Two at a time; the first 80 fill what the server keeps on purpose, 10 prompt caches."""
    prompts = [f"{word} {n}" for n in range(40) for word in ("a", "the", "in", "an", "is")]
    process = psutil.Process(server.process.pid)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: server.ask(prompt)[0], prompts[:80]))
        before = process.memory_info().rss
        answers += pool.map(lambda prompt: server.ask(prompt)[0], prompts[80:])
        after = process.memory_info().rss
    assert answers == [stock(prompt) for prompt in prompts]
    assert after - before < 2e6, f"{(after - before) / 1e6:.1f} MB more after 120 requests"


@pytest.fixture(scope="module")
def limited(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("limited") / "server.log"
    yield from _serve(model, log, "--max-context", "24")


@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["batched", "alone"])
def test_reply_ends_at_max_context(limited, stock, options):
    """The limit holds 5 prompt tokens and 19 of the reply."""
    answer = limited.ask("hello", max_tokens=60, **options)
    assert answer == (stock("hello", 19), "length")
    assert limited.ask("hello", max_tokens=19, **options) == answer


@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["batched", "alone"])
@pytest.mark.parametrize(
    ("prompt", "says"),
    [("x" * 24, "24 tokens and max_context is 24"), ("", "the prompt is empty")],
)
def test_bad_prompt_is_an_error_for_that_request_only(limited, stock, options, prompt, says):
    """On mlx-lm's own server an empty prompt ends the service."""
    with limited.open(prompt, **options) as response:
        answer = json.loads(response.read())
    assert response.status == 404
    assert says in answer["error"]
    assert limited.ask("hi") == (stock("hi"), "length")
    assert limited.ask("x" * 23, max_tokens=9) == (stock("x" * 23, 1), "length")


@pytest.fixture
def in_process(model, monkeypatch):
    """Run a function of (ask, provider) beside the server's decoding thread, in this process.

    ``ask(prompt, max_tokens, seed)`` gives the texts and the last finish_reason.
    """

    def run(function) -> None:
        failures: list[Exception] = []

        def serve(_host, _port, provider):
            generator = mlx_lm.server.ResponseGenerator(provider, LRUPromptCache(10))

            def ask(prompt: str, max_tokens: int = 12, seed: int | None = None):
                request = mlx_lm.server.CompletionRequest("text", prompt, [], None, None)
                _, answers = generator.generate(request, _arguments(max_tokens, seed))
                answers = list(answers)
                return [answer.text for answer in answers], answers[-1].finish_reason

            try:
                ask("warm up")
                function(ask, provider)
            except Exception as error:
                # The command line would make one line of it.
                failures.append(error)
            finally:
                generator.stop_and_join()

        monkeypatch.setattr(mlx_lm.server, "run", serve)
        code = cli.main(["server", "--model", str(model), "--port", str(_free_port())])
        for failure in failures:
            raise failure
        assert code == 0

    return run


@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "alone"])
def test_decode_runs_on_the_frozen_step(in_process, stock, seed):
    def check(ask, provider) -> None:
        before = provider.model.plan.counts["frozen"]
        texts, reason = ask("hello", 12, seed)
        assert ("".join(texts), reason) == (stock("hello"), "length")
        assert provider.model.plan.counts["frozen"] - before >= 11

    in_process(check)


@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "alone"])
def test_full_memory_ends_one_reply(in_process, stock, monkeypatch, seed):
    """Beside what is held 300 kB fit: buffers of some hundred rows of 512 bytes, not of 600."""

    def check(ask, _provider) -> None:
        held = mx.get_active_memory()
        with monkeypatch.context() as full:
            full.setattr(memory, "memory_limit", lambda: held + 20_000)
            with pytest.raises(MemoryLimitError):
                ask("x" * 300, 4, seed)
            full.setattr(memory, "memory_limit", lambda: held + 300_000)
            texts, reason = ask("hello", 600, seed)
        reply = "".join(texts)
        assert reason == "length"
        assert 200 < len(reply) < 560
        assert stock("hello", 600).startswith(reply)
        assert ask("hello", 300, seed) == (list(stock("hello", 300)), "length")

    in_process(check)


def test_error_while_decoding_is_answered_and_survived(in_process, stock, monkeypatch):
    def check(ask, provider) -> None:
        def fail(*_arguments, **_options):
            raise ArithmeticError("a broken step")

        with monkeypatch.context() as broken:
            broken.setattr(type(provider.model), "__call__", fail)
            with pytest.raises(ArithmeticError, match="a broken step"):
                ask("hello")
        assert "".join(ask("hello")[0]) == stock("hello")

    in_process(check)


def test_requests_that_come_while_an_error_is_answered_end_nothing(monkeypatch):
    """They come in threads of their own; the decoding one goes through those that it has."""
    server = mlx_lm.server

    class Interrupted(weakref.WeakSet):
        def __iter__(self):
            for answer in super().__iter__():
                arrival = threading.Thread(target=lambda: kept.append(server.Queue()))
                arrival.start()
                arrival.join(0.2)
                yield answer

    errors = [ArithmeticError("a broken step")]

    def fail_once(_generator) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(weakref, "WeakSet", Interrupted)
    monkeypatch.setattr(server.ResponseGenerator, "_generate", fail_once)
    generator = types.SimpleNamespace(
        model_provider=types.SimpleNamespace(model="a model"), requests=None
    )
    with serving.guarded():
        kept = [server.Queue() for _ in range(3)]
        answers = list(kept)
        server.ResponseGenerator._generate(generator)
        for answer in answers:
            assert str(answer.get(timeout=5)) == "a broken step"


def test_server_is_put_back(in_process):
    server = mlx_lm.server

    def state() -> list:
        generator = server.ResponseGenerator
        actions = server.ThreadingHTTPServer.service_actions
        listing = server.APIHandler.handle_models_request
        return [server.Queue, generator._tokenize, generator._generate, listing, actions]

    before = state()
    in_process(lambda _ask, _provider: None)
    assert state() == before


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("", "Queue"),
        ("ThreadingHTTPServer", "service_actions"),
        ("ResponseGenerator", "_generate"),
        ("APIHandler", "handle_models_request"),
        ("ModelProvider", "__init__"),
    ],
)
def test_another_server_of_mlx_lm_is_refused(monkeypatch, holder, name):
    """A module with the same names but one."""
    changed = types.ModuleType("mlx_lm.server")
    changed.__dict__.update(vars(mlx_lm.server))
    if holder:
        base = vars(changed)[holder]
        members = {k: v for k in dir(base) if k != name and (v := getattr(base, k, None))}
        setattr(changed, holder, types.SimpleNamespace(**members))
    else:
        delattr(changed, name)
    monkeypatch.setitem(sys.modules, "mlx_lm.server", changed)
    with pytest.raises(HuskyError, match="another server"), serving.guarded():
        pass


def test_another_response_of_mlx_lm_is_refused(monkeypatch):
    monkeypatch.setattr(mlx_lm.server, "Response", lambda text, token: None)
    with pytest.raises(HuskyError, match="Response has"), serving.guarded():
        pass


def test_served_model_is_listed_without_any_hub_cache(model, tmp_path, monkeypatch):
    """A folder by mlx-lm itself; a repo, whose cache lacks what mlx-lm looks for, by us."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    for served in _serve(model, tmp_path / "log"):
        assert served.models() == [str(model.resolve())]
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("path", "listed"),
    [("/v1/models", True), ("/v1/models/some/repo", True), ("/v1/models/some/other", False)],
)
def test_served_repo_is_listed_once(monkeypatch, path, listed):
    monkeypatch.setattr(
        mlx_lm.server, "scan_cache_dir", lambda: types.SimpleNamespace(repos=frozenset())
    )
    handler = mlx_lm.server.APIHandler.__new__(mlx_lm.server.APIHandler)
    arguments = types.SimpleNamespace(model="some/repo", allowed_origins=["*"])
    handler.response_generator = types.SimpleNamespace(cli_args=arguments)
    handler.path, handler.created, handler.wfile = path, 7, io.BytesIO()
    handler.headers, handler.request_version, handler.requestline = {}, "HTTP/1.1", ""
    handler.client_address = ("", 0)
    with serving.guarded():
        handler.handle_models_request()
    head, _, body = handler.wfile.getvalue().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    expected = [{"id": "some/repo", "object": "model", "created": 7}] if listed else []
    assert json.loads(body) == {"object": "list", "data": expected}


def test_model_that_cannot_be_loaded_ends_the_process(model, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    result = _husky("server", "--model", str(damaged), "--port", str(_free_port()))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"husky: error: {weights}: truncated")


def _arguments(max_tokens: int, seed: int | None) -> mlx_lm.server.GenerationArguments:
    return mlx_lm.server.GenerationArguments(
        model=mlx_lm.server.ModelDescription("default_model", "default_model", None),
        sampling=mlx_lm.server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
        logits=mlx_lm.server.LogitsProcessorArguments(LETTERS, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=max_tokens,
        num_draft_tokens=3,
        logprobs=False,
        top_logprobs=0,
        seed=seed,
        chat_template_kwargs=None,
    )


def test_occupied_port_is_one_error_before_loading(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["server", "--model", str(model), "--port", str(port)]
        result = _husky(*words)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"husky: error: cannot serve on 127.0.0.1:{port}: ")


def test_missing_model_is_one_error(tmp_path):
    result = _husky("server", "--model", str(tmp_path / "none"), "--port", str(_free_port()))
    assert result.returncode == 1
    assert "none: no such file or folder" in result.stderr.splitlines()[-1]


def _husky(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "husky_mlx", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
