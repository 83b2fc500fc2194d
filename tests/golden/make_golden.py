"""Write smollm2_float32.json: mlx-lm's own greedy tokens on SmolLM2 in float32.

    python tests/golden/make_golden.py

Only mlx-lm computes here: its Llama class, its attention, its generation loop. husky_mlx reads the
GGUF file (checked by its own tests) and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step

from husky_mlx.loading import load

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Question: What is 17 times 3? Answer:",
    "请用一句话介绍中国的首都。",
    "春天来了，",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM users",
    "I love 🍕 and 🎉 because",
)
TOKENS = 64
FILE = Path(__file__).with_name("smollm2_float32.json")


def main() -> None:
    model, tokenizer = load("smollm2", backend="mlx")
    model.set_dtype(mx.float32)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        tokens = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=TOKENS)]
        cases.append({"prompt": prompt, "prompt_ids": ids, "tokens": tokens})
        print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}")
    made_with = {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "dtype": "float32"}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    FILE.write_text(f'{{"made_with": {json.dumps(made_with)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
