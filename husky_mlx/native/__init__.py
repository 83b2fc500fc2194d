"""The cpu target: a model as one native program, compiled for its shape and this machine.

    program = Program.of(model)
    buffers = program.buffers([(keys, values), ...])  # one pair a layer
    logits = program.prefill(tokens, buffers)  # (1, vocabulary)
    logits = program.decode(token, buffers, position=len(tokens))

NativeError says why there is none; the reference path then runs.
"""

from __future__ import annotations

from husky_mlx.native.errors import NativeError
from husky_mlx.native.program import Program

__all__ = ["NativeError", "Program"]
