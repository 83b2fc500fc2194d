"""Keeps mlx-lm's server alive: one request, or one full memory, must not end it for everybody.

mlx-lm decodes in one thread. What is raised there ends the service while the process stays and
answers 404; what is raised while a request is tokenized is the answer to that request alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import ModuleType
from typing import Any

from husky_mlx.errors import ContextLimitError, HuskyError, MemoryLimitError

# (class of mlx_lm.server, its methods that we replace, attributes of its instances that we read)
_CLASSES = (
    ("ResponseGenerator", ("_tokenize", "_generate"), ("model_provider", "requests", "cli_args")),
    ("ModelProvider", (), ("model", "cli_args")),
    ("APIHandler", ("handle_models_request",), ("response_generator", "created")),
    ("ThreadingHTTPServer", ("service_actions",), ()),
)
_RESPONSE = ("text", "token", "logprob", "finish_reason", "top_tokens")


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Change mlx-lm's server while open; raises what its thread died of, once it has ended.

    * An empty prompt, or one that leaves no room under ``max_context``, is an error for its sender;
      a reply that would pass the limit ends there with finish_reason "length".
    * Replies that memory stops end with "length"; after any other error in the decoding thread the
      requests that it had are answered with it. Both go on with the next request.
    * A model that cannot be loaded ends the process.
    * ``GET /v1/models`` lists the served model too where mlx-lm's scan of the cache misses it.
    """
    server = importlib.import_module("mlx_lm.server")
    if (difference := _difference(server)) is not None:
        raise HuskyError(
            f"the installed mlx-lm has another server ({difference}): run mlx_lm.server itself"
        )
    generator, handler = server.ResponseGenerator, server.APIHandler
    stock = {
        name: getattr(getattr(server, kind), name) for kind, names, _ in _CLASSES for name in names
    }
    waiting: weakref.WeakSet[Answer] = weakref.WeakSet()
    arriving = threading.Lock()  # requests come in other threads than that which answers them
    fatal: list[Exception] = []

    class Answer(Queue):
        """What one request is answered with, and whether any text has been."""

        started = False

        def __init__(self) -> None:
            super().__init__()
            with arriving:
                waiting.add(self)

        def put(self, item: Any, *arguments: Any, **options: Any) -> None:
            self.started = self.started or isinstance(item, server.Response)
            super().put(item, *arguments, **options)

    def tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> tuple:
        prompt, *rest = stock["_tokenize"](self, tokenizer, request, args)
        limit = getattr(self.model_provider.model, "max_context", None)
        args.max_tokens = _allowed(len(prompt), args.max_tokens, limit)
        return (prompt, *rest)

    def generate(self: Any) -> None:
        while True:
            try:
                return stock["_generate"](self)
            except Exception as error:
                if self.model_provider.model is None:
                    fatal.append(error)
                    raise
                logging.exception("the requests in progress failed")
                with arriving:
                    answers = list(waiting)
                for answer in answers:
                    if answer is self.requests:
                        continue
                    if answer.started and isinstance(error, MemoryLimitError):
                        answer.put(
                            server.Response(
                                text="",
                                token=0,
                                logprob=0.0,
                                finish_reason="length",
                                top_tokens=(),
                            )
                        )
                        answer.put(None)
                    else:
                        answer.put(error)

    def stop_if_dead(self: Any) -> None:
        # serve_forever calls this between requests; mlx-lm shuts down on the interrupt.
        if fatal:
            raise KeyboardInterrupt

    def list_models(self: Any) -> None:
        connection, self.wfile = self.wfile, io.BytesIO()
        try:
            stock["handle_models_request"](self)
            head, _, body = self.wfile.getvalue().partition(b"\r\n\r\n")
        finally:
            self.wfile = connection
        models = json.loads(body)
        served = self.response_generator.cli_args.model
        wanted = "/".join(self.path.split("/")[3:])
        if served and not Path(served).exists() and wanted in ("", served):
            entry = {"id": served, "object": "model", "created": self.created}
            if served not in [model["id"] for model in models["data"]]:
                models["data"].append(entry)
        connection.write(head + b"\r\n\r\n" + json.dumps(models).encode())
        connection.flush()

    with contextlib.ExitStack() as stack:
        for holder, name, ours in (
            (server, "Queue", Answer),
            (generator, "_tokenize", tokenize),
            (generator, "_generate", generate),
            (handler, "handle_models_request", list_models),
            (server.ThreadingHTTPServer, "service_actions", stop_if_dead),
        ):
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, ours)
        yield
    if fatal:
        raise fatal[0]


def _difference(server: ModuleType) -> str | None:
    """What we rely on and the module does not have, or None."""
    if not hasattr(server, "Queue"):
        return "no Queue"
    response = getattr(server, "Response", lambda: None)
    fields = tuple(inspect.signature(response).parameters)
    if fields != _RESPONSE:
        return f"Response has {fields}, expected {_RESPONSE}"
    for name, methods, attributes in _CLASSES:
        kind = getattr(server, name, None)
        made = getattr(getattr(kind, "__init__", None), "__code__", None)
        known = {*dir(kind), *(made.co_names if made else ())}
        missing = [member for member in (*methods, *attributes) if member not in known]
        if missing:
            return f"{name} has no {', '.join(missing)}"
    return None


def _allowed(prompt_tokens: int, max_tokens: int, limit: int | None) -> int:
    """How many tokens the reply to a prompt of this length may have."""
    if prompt_tokens == 0:
        raise ValueError("the prompt is empty")
    if limit is None:
        return max_tokens
    if prompt_tokens >= limit:
        raise ContextLimitError(
            f"the prompt has {prompt_tokens} tokens and max_context is {limit}, which leaves no "
            "room for a reply"
        )
    return min(max_tokens, limit - prompt_tokens)
