"""SmolLM2's greedy tokens against files that mlx-lm made (golden/make_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from husky_mlx.errors import SourceError
from husky_mlx.generation import stream_generate
from husky_mlx.loading import load

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_float32.json").read_text())
CASES = GOLDEN["cases"]
# MLX's CPU build takes 0.2 s for each token of this model.
EAGER_TOKENS = 16


@pytest.fixture(scope="module", params=["fast", "eager"])
def smollm2(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HUSKY_EAGER", "0" if request.param == "fast" else "1")
        try:
            model, tokenizer = load("smollm2")
        except SourceError as error:
            pytest.skip(f"SmolLM2 cannot be had here: {error}")
    tokenizer.eos_token_ids = set()
    return request.param, model, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case["prompt"][:24] for case in CASES])
def test_smollm2_tokens_are_mlx_lms(case, smollm2):
    path, model, tokenizer = smollm2
    before = model.plan.counts["frozen"]
    wanted = case["tokens"][: EAGER_TOKENS if path == "eager" else None]
    count = len(wanted)
    responses = list(stream_generate(model, tokenizer, case["prompt"], max_tokens=count))
    assert [response.token for response in responses] == wanted
    assert responses[-1].prompt_tokens == len(case["prompt_ids"])
    frozen = model.plan.counts["frozen"] - before
    # The last prompt token and every reply token; a one-token prompt meets an empty cache.
    assert frozen == (count + 1 if path == "fast" else 0)
