"""LoRA, DoRA, fusing and training by mlx-lm's tuner: the frozen step sees each change at once."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
import pytest
from fixtures import FIX_A, FIX_B, PROMPT, mlx_weights, quantize_weights, write_folder
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner import trainer
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters, remove_lora_layers
from mlx_lm.utils import dequantize_model

from husky_mlx.loading import build_model, load

LORA = {"rank": 8, "scale": 20.0, "dropout": 0.0}
KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


def model_of(backend: str = "husky", seed: int = 0, bits: int | None = None):
    weights = mlx_weights(FIX_A, seed)
    if bits is not None:
        weights = quantize_weights(weights, bits)
    return build_model(FIX_A, weights, backend=backend)


def reply(model, prompt=PROMPT) -> list[mx.array]:
    """Logprobs of a prefill and five decode calls on fixed tokens."""
    caches = mlx_lm.models.cache.make_prompt_cache(model)
    calls = [prompt[:-5], *([token] for token in prompt[-5:])]
    return [model(mx.array([call]), cache=caches)[0, -1] for call in calls]


def differ(a: list[mx.array], b: list[mx.array]) -> float:
    return max(mx.abs(x - y).max().item() for x, y in zip(a, b, strict=True))


def write_adapter(folder, parameters=None, *, model=None, keys=KEYS, **config):
    """An adapter of random factors for a model like ours, made with mlx-lm's tuner."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {**LORA, "keys": keys, **(parameters or {})}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model = model or model_of("mlx")
    linear_to_lora_layers(model, 2, parameters, use_dora=config["fine_tune_type"] == "dora")
    random = np.random.default_rng(5)
    leaves = [
        (name, mx.array(random.normal(0, 0.03, value.shape).astype(np.float32)))
        for name, value in tree_flatten(model.parameters())
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
    ]
    model.load_weights(leaves, strict=False)
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(leaves))
    return folder


def fuse(model, dequantize: bool = False) -> None:
    """What mlx_lm.fuse does with a loaded model."""
    fused = [
        (name, module.fuse(dequantize=dequantize))
        for name, module in model.named_modules()
        if hasattr(module, "fuse")
    ]
    assert fused
    model.update_modules(tree_unflatten(fused))


@pytest.mark.parametrize("bits", [None, 4])
def test_adapter_load_swap_fuse_and_removal_are_seen_at_once_C107(bits, tmp_path):
    adapter = write_adapter(tmp_path / "adapter")
    base, adapted = model_of("mlx", bits=bits), model_of("mlx", bits=bits)
    load_adapters(adapted, str(adapter))
    adapted.eval()
    plain, with_adapter = reply(base), reply(adapted)
    assert differ(plain, with_adapter) > 0.1

    model = model_of(bits=bits)
    assert differ(reply(model), plain) < 1e-4
    steps = model.plan.counts["frozen"]
    assert steps == 5
    load_adapters(model, str(adapter))
    model.eval()
    assert differ(reply(model), with_adapter) < 1e-4
    assert "not fused: layers.0.qkv" in str(model.plan) and "LoRALinear" in str(model.plan)
    remove_lora_layers(model)
    assert differ(reply(model), plain) < 1e-4
    assert "not fused" not in str(model.plan)

    load_adapters(model, str(adapter))
    model.eval()
    reply(model)
    fuse(model, dequantize=True)
    assert differ(reply(model), with_adapter) < 2e-3
    # A fused module of another storage than its neighbours stays apart from them.
    assert ("not fused" in str(model.plan)) == (bits is not None)
    assert model.plan.counts["frozen"] == 5 * steps, "each of these ran on the frozen step"


def test_other_weights_and_a_swapped_adapter_equal_a_fresh_model_C107(tmp_path):
    model = model_of()
    reply(model)
    model.load_weights(list(mlx_weights(FIX_A, seed=1).items()))
    assert differ(reply(model), reply(model_of("mlx", seed=1))) < 1e-4
    first = write_adapter(tmp_path / "first")
    load_adapters(model, str(first))
    model.eval()
    reply(model)
    other = {
        name: value * -2 for name, value in mx.load(str(first / "adapters.safetensors")).items()
    }
    model.load_weights(list(other.items()), strict=False)
    fresh = model_of("mlx", seed=1)
    load_adapters(fresh, str(first))
    fresh.load_weights(list(other.items()), strict=False)
    fresh.eval()
    assert differ(reply(model), reply(fresh)) < 1e-4


def test_a_weight_set_to_zero_gives_zero_C107():
    """The unit form. Assigned by hand, so seen when the next prompt begins, of one token too."""
    model = model_of()
    reply(model)
    model.lm_head.weight = mx.zeros((96, 64))
    caches = model.make_cache()
    for token in (5, 7):
        assert not model(mx.array([[token]]), cache=caches).any()
    assert model.plan.counts["frozen"] == 6


def test_an_adapter_swapped_in_the_middle_of_a_reply_C107(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", keys=["mlp.down_proj"])
    ours, stock = model_of(), model_of("mlx")
    caches = [mlx_lm.models.cache.make_prompt_cache(model) for model in (ours, stock)]
    for tokens in (PROMPT, [5], [6]):
        for model, cache in zip((ours, stock), caches, strict=True):
            mx.eval(model(mx.array([tokens]), cache=cache))
    for model in (ours, stock):
        load_adapters(model, str(adapter))
        model.eval()
    found, expected = (
        model(mx.array([[7]]), cache=cache)
        for model, cache in zip((ours, stock), caches, strict=True)
    )
    assert mx.abs(found - expected).max() < 1e-4
    assert ours.plan.counts["frozen"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_weights([("lm_head.weight", mx.ones((96, 64)))], strict=False),
        lambda model: model.update({"model": {"norm": {"weight": mx.full((64,), 0.3)}}}),
        lambda model: remove_lora_layers(model),
    ],
    ids=["load_weights", "update", "remove the adapter"],
)
def test_every_bulk_change_in_the_middle_of_a_reply_is_seen_C107(change, tmp_path):
    """No prompt comes between, at which changed weights would be noticed anyway."""
    adapter = write_adapter(tmp_path / "adapter", keys=["mlp.down_proj"])
    ours, stock = model_of(), model_of("mlx")
    results = []
    for model in (ours, stock):
        load_adapters(model, str(adapter))
        model.eval()
        caches = mlx_lm.models.cache.make_prompt_cache(model)
        for tokens in (PROMPT, [5], [6]):
            before = model(mx.array([tokens]), cache=caches)
        change(model)
        results.append((before, model(mx.array([[6]]), cache=caches)))
    (before, found), (_, expected) = results
    assert mx.abs(found - expected).max() < 1e-4 < 0.01 < mx.abs(found - before).max()
    assert ours.plan.counts["frozen"] == 3


@pytest.mark.parametrize("bits", [None, 4])
def test_load_with_an_adapter_path(bits, tmp_path):
    weights = mlx_weights(FIX_B)
    if bits is not None:
        weights = quantize_weights(weights, bits)
    extra = {} if bits is None else {"quantization": {"group_size": 64, "bits": bits}}
    folder = write_folder(tmp_path / "base", FIX_B, weights, tokenizer=True, **extra)
    base, _ = mlx_lm.load(str(folder))
    adapter = write_adapter(tmp_path / "adapter", model=base)
    expected, _ = mlx_lm.load(str(folder), adapter_path=str(adapter))
    model, _ = load(str(folder), adapter_path=str(adapter))
    assert differ(reply(model), reply(expected)) < 1e-4
    assert model.plan.counts["frozen"] == 5
    lazy, _ = load(str(folder), adapter_path=str(adapter), lazy=True)
    assert differ(reply(lazy), reply(expected)) < 1e-4


def failure(backend: str, adapter) -> Exception:
    with pytest.raises(Exception) as found:
        load_adapters(model_of(backend), str(adapter))
    return found.value


def check_same_failure(adapter, *words: str) -> None:
    """mlx-lm reads adapters for us: its message, with the names in it, reaches the user."""
    ours, theirs = failure("husky", adapter), failure("mlx", adapter)
    assert (type(ours), str(ours)) == (type(theirs), str(theirs))
    assert all(word in str(ours) for word in words)


def test_alpha_in_place_of_scale_is_explained_C109(tmp_path):
    adapter = write_adapter(tmp_path / "adapter")
    config = {"num_layers": 2, "lora_parameters": {"rank": 8, "alpha": 16, "dropout": 0.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    check_same_failure(adapter, "scale", "alpha")


def test_a_missing_dropout_is_named_C109(tmp_path):
    adapter = write_adapter(tmp_path / "adapter")
    config = {"num_layers": 2, "lora_parameters": {"rank": 8, "scale": 2.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    check_same_failure(adapter, "dropout")


def test_a_peft_adapter_is_refused_as_by_mlx_lm_C110(tmp_path):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), {name: mx.zeros((8, 64))})
    check_same_failure(tmp_path, "num_layers")


def test_rank_and_key_mismatches_are_listed_C111(tmp_path):
    adapter = write_adapter(tmp_path / "rank")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["lora_parameters"]["rank"] = 4
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    check_same_failure(adapter, "layers.0.self_attn.q_proj.lora_a", "(64, 8)", "(64, 4)")
    config["lora_parameters"] |= {"rank": 8, "keys": ["self_attn.qq_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    check_same_failure(adapter, "layers.0.self_attn.q_proj.lora_a", "not an adapter parameter")


@pytest.mark.parametrize("case", ["too many layers", "layer 0 only", "half a pair"])
def test_sparse_adapters_work_as_in_mlx_lm_C111(case, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", num_layers=16)
    file = str(adapter / "adapters.safetensors")
    tensors = dict(mx.load(file).items())
    if case == "layer 0 only":
        tensors = {name: value for name, value in tensors.items() if ".layers.0." in name}
    if case == "half a pair":
        tensors = {name: value for name, value in tensors.items() if name.endswith("lora_a")}
    mx.eval(tensors)
    mx.save_safetensors(file, tensors)
    models = [model_of(), model_of("mlx")]
    for model in models:
        load_adapters(model, str(adapter))
        model.eval()
    ours, theirs = map(reply, models)
    assert differ(ours, theirs) < 1e-4
    changed = differ(ours, reply(model_of("mlx"))) > 0.01
    assert changed == (case != "half a pair")


def test_dora_on_a_quantized_base_runs_and_fuses_as_in_mlx_lm_C113(tmp_path):
    adapter = write_adapter(tmp_path / "dora", model=model_of("mlx", bits=4), fine_tune_type="dora")
    ours, stock = model_of(bits=4), model_of("mlx", bits=4)
    plain = reply(ours)
    for model in (ours, stock):
        load_adapters(model, str(adapter))
        model.eval()
    running, expected = reply(ours), reply(stock)
    assert differ(running, expected) < 1e-4 < 0.1 < differ(running, plain)
    assert "DoRALinear" in str(ours.plan)
    for model in (ours, stock):
        fuse(model)
    packed = reply(ours)
    assert differ(packed, reply(stock)) < 1e-4
    assert 0 < differ(packed, running) < 1.0, "within what packing again costs"


def test_dora_fused_without_packing_is_exact_C113(tmp_path):
    adapter = write_adapter(tmp_path / "dora", model=model_of("mlx", bits=4), fine_tune_type="dora")
    model = model_of(bits=4)
    load_adapters(model, str(adapter))
    model.eval()
    running = reply(model)
    fuse(model, dequantize=True)
    model = dequantize_model(model)
    assert differ(reply(model), running) < 1e-4
    assert "not fused" not in str(model.plan)


def test_dropped_buffers_are_freed_when_an_adapter_is_fused(tmp_path):
    adapter = write_adapter(tmp_path / "adapter")
    model = model_of()
    reply(model)
    mx.clear_cache()
    before = mx.get_active_memory()
    load_adapters(model, str(adapter))
    model.eval()
    reply(model)
    fuse(model)
    reply(model)
    mx.clear_cache()
    fused_projections = 2 * (64 * 64 + 2 * 32 * 64 + 128 * 64) * 4
    assert mx.get_active_memory() - before < fused_projections // 4


def test_training_leaves_the_step_and_decode_sees_the_new_weights():
    ours, stock = model_of(), model_of("mlx")
    reply(ours)
    batch = mx.array([PROMPT])

    def loss(model, batch):
        return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")

    for model in (ours, stock):
        model.train()
        optimizer = optim.SGD(learning_rate=0.5)
        for _ in range(3):
            _, gradients = nn.value_and_grad(model, loss)(model, batch)
            optimizer.update(model, gradients)
            mx.eval(model.parameters())
    frozen = ours.plan.counts["frozen"]
    in_training = reply(ours)
    assert ours.plan.counts["frozen"] == frozen, "the reference path while training"
    ours.eval()
    stock.eval()
    assert differ(reply(ours), reply(stock)) < 1e-4
    assert differ(reply(ours), in_training) < 1e-4
    assert differ(reply(ours), reply(model_of())) > 0.1
    assert ours.plan.counts["frozen"] == frozen + 3 * 5


def test_mlx_lms_trainer_and_decoding_in_between(tmp_path, capsys):
    """Its compiled training step writes new weights without calling the model's update."""
    dataset = [(PROMPT[start : start + 20], 0) for start in range(0, 20, 5)]

    def trained(model, between: bool):
        linear_to_lora_layers(model, 2, {**LORA, "keys": KEYS})
        model.freeze()
        for _, module in model.named_modules():
            if isinstance(module, LoRALinear):
                module.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
                module.lora_a = mx.full(module.lora_a.shape, 0.02)
        replies = []

        class Callback(trainer.TrainingCallback):
            def on_train_loss_report(self, info):
                model.eval()
                replies.append([t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=5)])
                model.train()

        arguments = trainer.TrainingArgs(
            batch_size=2,
            iters=6,
            val_batches=0,
            steps_per_report=2,
            steps_per_eval=100,
            steps_per_save=100,
            max_seq_length=64,
            adapter_file=str(tmp_path / "adapters.safetensors"),
        )
        np.random.seed(0)
        trainer.train(
            model,
            optim.Adam(learning_rate=1e-2),
            dataset,
            args=arguments,
            training_callback=Callback() if between else None,
        )
        model.eval()
        return replies, reply(model)

    expected_replies, expected = trained(model_of("mlx"), between=True)
    model = model_of()
    found_replies, found = trained(model, between=True)
    assert found_replies == expected_replies and len(found_replies) == 3
    assert differ(found, expected) < 1e-3
    assert model.plan.counts["frozen"] == 3 * 6 + 5
    assert differ(trained(model_of(), between=False)[1], expected) < 1e-3
