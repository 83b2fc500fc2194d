"""Settings of a tiny bench, and engines that only speak the protocol."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from husky_mlx import bench_run, shapes

ROOT = Path(__file__).resolve().parent.parent


TINY = shapes.llama_config(*(64, 3, 4, 2, 16, 96, 160), tied=True, context=512, rope_theta=10000.0)


SETTINGS = {
    "model": "tiny",
    "config": TINY,
    "bits": 4,
    "group_size": 32,
    "dtype": "bfloat16",
    "prompt_tokens": [5],
    "generation_tokens": [4],
    "batch": [1],
    "prompt_file": None,
    "num_trials": 3,
    "temp": 0.0,
    "top_p": 1.0,
    "seed": 0,
    "debug": False,
}


# An engine that speaks the protocol and logs every trial. Its n-th one takes n ms.
FAKE = """
import json, os, sys, time
name, fault, log = sys.argv[1:]
def reply(message):
    print(json.dumps(message), flush=True)
def note(message):
    with open(log, "a") as file:
        file.write(json.dumps({"name": name, "pid": os.getpid(), **message}) + "\\n")
specification = json.loads(input())
note({"specification": specification})
if fault == "load":
    reply({"error": "ValueError: no such model"})
    sys.exit(1)
reply({"target": "cpu", "versions": {"mlx": "1"},
       "machine": {"device": "d", "cores": 2, "os": "o", "memory_mb": 8000.0,
                   "available_mb": 4000.0, "power": "mains"},
       "model_class": "M", "plan": "p", "dtypes": ["float32"], "active_mb": 1.0, "load_s": 0.5,
       "quantized": fault != "dense", "gguf": fault == "gguf",
       "values": 1_000_000, "read_bytes": 100_000_000,
       "memory_limit_mb": 4.0 if fault == "small" else 100.0, "cache_bytes": 1_000_000,
       "vocab_size": 50 if name == "husky" else 40})
number = 0
for line in sys.stdin:
    request = json.loads(line)
    if "tokenize" in request:
        note(request)
        reply({"tokens": list(range(7, 7 + len(request["tokenize"].split())))})
        continue
    number += 1
    note({"request": request})
    if fault == "hang":
        time.sleep(60)
    if fault == "die":
        os._exit(7)
    if fault == "trial" and number == 2:
        reply({"error": "RuntimeError: out of luck"})
        sys.exit(1)
    reply({"first_token_ms": float(number), "prefill_tps": 2.0, "decode_tps": 10.0 * number,
           "total_s": 1.0, "peak_mb": 5.0, "rss_mb": 6.0, "calls": {},
           "prompt_operations": 10**9,
           "prompt_tokens": sum(map(len, request["prompts"])),
           "generation_tokens": len(request["prompts"]) * request["generation_tokens"]
           - (fault == "short")})
"""


def fake_engines(tmp_path, monkeypatch):
    """Replace every engine by FAKE; ``fake_engines(mlx_lm="die")`` sets faults, gives the log."""
    script, log = tmp_path / "fake.py", tmp_path / "log"
    script.write_text(FAKE)
    monkeypatch.setattr(bench_run, "roofs_apart", lambda: (20.0, 8.0))
    monkeypatch.setattr(bench_run, "TRIAL_SECONDS", 0.0)  # theirs are no real seconds

    def install(**faults):
        monkeypatch.setattr(
            bench_run,
            "engine_command",
            lambda name: [
                *(sys.executable, str(script), name),
                *(faults.get(name.replace("-", "_"), "none"), str(log)),
            ],
        )
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return install


TABLE = "bench --shape smollm2-135m -p 5 -g 4 --engines husky,mlx-lm"


def numpy_values(weights, stem, bits):
    """The float32 values of MLX's affine layout: 32 / bits quants a word from the low end up."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    words = np.array(weights[f"{stem}.weight"])
    quants = (words[..., None] >> shifts & (2**bits - 1)).reshape(len(words), -1)
    scales, biases = (
        np.array(weights[f"{stem}.{part}"].astype(mx.float32)) for part in ("scales", "biases")
    )
    group = quants.shape[1] // scales.shape[1]
    return quants * scales.repeat(group, axis=1) + biases.repeat(group, axis=1)
