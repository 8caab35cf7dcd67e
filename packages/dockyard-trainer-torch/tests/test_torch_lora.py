"""LoRA: the base at step 0, independent gradients, exact merging, and shards that add up to one process."""

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_core.errors import ConfigError
from dockyard_trainer_torch import LoraConfig, lora
from dockyard_trainer_torch.loading import load_weights
from dockyard_trainer_torch.ranks import whole

CONFIG = LoraConfig(rank=3, alpha=6.0)  # two ranks cannot halve 3 rows
FAMILIES = [("qwen2", True), ("qwen3", True), ("llama", False)]


def load(model_dir: Path, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa").eval()


def adapted(model_dir: Path, config: LoraConfig = CONFIG, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = load(model_dir, dtype=dtype)
    lora.apply_lora(model, config, seed=3)
    return model


def fill_b(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in lora.lora_layers(model):
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) * 0.1)


def token_ids(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 64, (rows, 10), generator=torch.Generator().manual_seed(seed))


def logprobs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Masked NLL and a pull to the base, whose forward pass comes between forward and backward."""
    current = logprobs(model, ids)
    with torch.no_grad(), lora.adapters_disabled(model):
        reference = logprobs(model, ids)
    return -current.mean() + 0.1 * (current - reference).square().mean()


def train(model: nn.Module, *, rows: slice = slice(None)) -> torch.optim.AdamW:
    params = [param for param in model.parameters() if param.requires_grad]
    # A smaller eps would turn the rounding of a gradient near 0 into a full step.
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.01, foreach=True)
    for step in range(3):
        loss_of(model, token_ids(step)[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if lora.is_adapter(name)}


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    parents = lora.lora_parents(model)
    return {
        name: lora.merged_weight(parents[name]) if name in parents else whole(param).detach()
        for name, param in model.named_parameters()
        if not lora.is_adapter(name)
    }


def trained(model: nn.Module, *, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    """Merged weights after some steps, and the adapters' next gradients, which AdamW would not let us see."""
    train(model, rows=rows)
    loss_of(model, token_ids(8)[rows]).backward()
    gradients = {f"gradient.{name}": whole(param.grad) for name, param in adapters(model).items()}
    assert len(gradients) == sum(param.grad is not None for param in model.parameters())
    return {name: tensor.contiguous() for name, tensor in (merged(model) | gradients).items()}


def explicit_gradients(model_dir: Path, model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of A and B by autograd of W + s B A in float64, through a model that knows no adapters."""
    base = load(model_dir, dtype=torch.float64)
    leaves = {name: param.detach().double().requires_grad_() for name, param in adapters(model).items()}
    weights = {}
    for name, weight in base.named_parameters():
        stem = name.removesuffix("weight")
        weights[name] = weight.detach()
        if f"{stem}lora_A" in leaves:
            weights[name] = weights[name] + CONFIG.scale * leaves[f"{stem}lora_B"] @ leaves[f"{stem}lora_A"]
    logits = torch.func.functional_call(base, weights, (ids,)).logits
    nll = -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).mean()
    return dict(zip(leaves, torch.autograd.grad(nll, list(leaves.values())), strict=True))


@pytest.mark.parametrize(("family", "is_tied"), FAMILIES)
def test_the_first_forward_pass_is_the_base_bit_for_bit(tiny_model, family, is_tied) -> None:
    base, model = load(tiny_model(family, is_tied=is_tied)), adapted(tiny_model(family, is_tied=is_tied))
    ids = token_ids(0)
    assert torch.equal(model(ids).logits, base(ids).logits)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids).logits, base(ids).logits)
    held = dict(base.named_parameters())
    assert [name for name, _ in model.named_parameters() if not lora.is_adapter(name)] == list(held)
    assert list(lora.lora_parents(model)) == [name for name in held if "_proj.weight" in name]
    assert all(torch.equal(tensor, held[name]) for name, tensor in merged(model).items())


@pytest.mark.parametrize(("family", "is_tied"), FAMILIES)
def test_a_merged_model_computes_what_the_adapters_learnt(tiny_model, family, is_tied) -> None:
    model_dir = tiny_model(family, is_tied=is_tied)
    model, fresh, ids = adapted(model_dir), load(model_dir), token_ids(9)
    untouched = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = model(ids).logits.detach()
    optimizer = train(model)
    assert (model(ids).logits - before).abs().max() > 1e-2, "training moved the policy"
    for name, param in model.named_parameters():
        assert param.requires_grad == lora.is_adapter(name)
        assert name in adapters(model) or torch.equal(param, untouched[name])
    assert {id(param) for param in optimizer.state} == {id(param) for param in adapters(model).values()}
    assert is_tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert fresh.load_state_dict(merged(model), strict=False) == (["lm_head.weight"] if is_tied else [], [])
    torch.testing.assert_close(fresh(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    with lora.adapters_disabled(model):
        assert torch.equal(model(ids).logits, before), "the base is still there"


@pytest.mark.parametrize(("family", "is_tied"), FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradients_are_those_of_the_explicit_sum(tiny_model, family, is_tied, dtype, tolerance) -> None:
    model_dir = tiny_model(family, is_tied=is_tied)
    model, ids = adapted(model_dir, dtype=dtype), token_ids(1)
    fill_b(model)
    (-logprobs(model, ids).mean()).backward()
    for name, wanted in explicit_gradients(model_dir, model, ids).items():
        assert (adapters(model)[name].grad - wanted).norm() <= tolerance * wanted.norm(), name
    assert [n for n, p in model.named_parameters() if p.grad is not None] == list(adapters(model))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft, the oracle of this test, is not installed")
def test_peft_computes_the_same_logits_and_gradients(tiny_model) -> None:
    import peft

    model, ids = adapted(tiny_model("qwen2")), token_ids(1)
    fill_b(model)
    config = peft.LoraConfig(r=CONFIG.rank, lora_alpha=CONFIG.alpha, target_modules=list(CONFIG.target_modules))
    oracle = peft.get_peft_model(load(tiny_model("qwen2")), config).eval()
    theirs = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): param
        for name, param in oracle.named_parameters()
        if "lora_" in name
    }
    with torch.no_grad():
        for name, param in adapters(model).items():
            theirs[name].copy_(param)
    for each in (model, oracle):
        (-logprobs(each, ids).mean()).backward()
    torch.testing.assert_close(model(ids).logits, oracle(ids).logits, rtol=0, atol=1e-5)
    for name, param in adapters(model).items():
        torch.testing.assert_close(param.grad, theirs[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_activation_checkpointing_recomputes_with_the_adapters(tiny_model) -> None:
    plain, wrapped, ids = adapted(tiny_model("qwen3")), adapted(tiny_model("qwen3")), token_ids(2)
    for layer in wrapped.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for model in (plain, wrapped):
        fill_b(model)
        loss_of(model, ids).backward()
    for name, param in adapters(plain).items():
        assert torch.equal(adapters(wrapped)[name].grad, param.grad), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_computes_with_float32_adapters(tiny_model, dtype) -> None:
    plain, model = adapted(tiny_model("qwen2")), adapted(tiny_model("qwen2"), dtype=dtype)
    for each in (plain, model):
        fill_b(each)
        with torch.autocast("cpu", torch.bfloat16, enabled=each is model):
            loss = -logprobs(each, token_ids(2)).mean()
        loss.backward()
    for name, param in adapters(model).items():
        wanted = adapters(plain)[name].grad
        assert param.dtype == torch.float32
        assert (param.grad - wanted).norm() <= 0.1 * wanted.norm(), name


def test_disabling_adapters_nests_and_survives_errors(tiny_model) -> None:
    base, model, ids = load(tiny_model("qwen2")), adapted(tiny_model("qwen2")), token_ids(3)
    fill_b(model)
    with_adapters, without = model(ids).logits, base(ids).logits
    assert not torch.allclose(with_adapters, without, atol=1e-2)
    with pytest.raises(KeyError), lora.adapters_disabled(model):
        raise KeyError("inside")
    assert torch.equal(model(ids).logits, with_adapters)
    with lora.adapters_disabled(model):
        with lora.adapters_disabled(model):
            pass
        assert torch.equal(model(ids).logits, without), "the outer context still holds"
    assert torch.equal(model(ids).logits, with_adapters)


def test_the_seed_alone_decides_the_adapters(tiny_model) -> None:
    first, second = adapted(tiny_model("qwen2")), adapted(tiny_model("qwen2"))
    for name, param in adapters(first).items():
        assert torch.equal(param, adapters(second)[name])
        assert param.any() == name.endswith("lora_A")
    layers = [layer.lora_A for layer in lora.lora_layers(first) if layer.in_features == 32]
    assert all(lora_A.abs().max() <= 32**-0.5 for lora_A in layers)
    assert len({lora_A.sum().item() for lora_A in layers}) == len(layers), "each layer has its own draw"
    lora.initialise_adapters(second, seed=4)
    assert not torch.equal(next(lora.lora_layers(second)).lora_A, layers[0])


def test_only_named_targets_are_adapted_and_biases_kept(tiny_model) -> None:
    model = adapted(tiny_model("qwen2"), LoraConfig(rank=2, alpha=4.0, target_modules=("v_proj", "q_proj")))
    assert {name.split(".")[-2] for name in adapters(model)} == {"q_proj", "v_proj"}
    layer = model.model.layers[1].self_attn.q_proj
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "lora_A", "lora_B"]
    assert torch.equal(layer.bias, load(tiny_model("qwen2")).model.layers[1].self_attn.q_proj.bias)


def test_refusals_say_the_rule_the_value_and_the_way_out(tiny_model) -> None:
    for targets in ((), ("lm_head",), ("q_proj", "q_proj")):
        with pytest.raises(ValidationError, match=r"must be one or more of q_proj.*got \[.*leave it out"):
            LoraConfig(target_modules=targets)
    assert [LoraConfig(rank=16, alpha=32, use_rslora=is_root).scale for is_root in (False, True)] == [2.0, 8.0]
    model = adapted(tiny_model("qwen2"))
    with pytest.raises(ConfigError, match=r"plain linear layers.*'down_proj'.*'qwen2' lacks; leave them out"):
        lora.apply_lora(model, CONFIG, seed=0)  # a second time


def work(rank: int, world_size: int, directory: Path, args: Sequence[str]) -> None:
    """Meta device, shard, materialise, load, draw; then steps on this rank's half of each batch."""
    model_dir = Path(args[0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir)).eval()
    lora.apply_lora(model, CONFIG, seed=3)
    mesh = distributed.init_device_mesh("cpu", (world_size,))
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh)
    model.to_empty(device="cpu")
    for name, buffer in load(model_dir).named_buffers():  # rotary frequencies are in no checkpoint
        model.get_buffer(name).copy_(buffer)
    load_weights(model, model_dir)
    model.requires_grad_(True)  # what a careless loader leaves behind
    lora.initialise_adapters(model, seed=3)
    save_file(trained(model, rows=slice(2 * rank, 2 * rank + 2)), directory / f"rank{rank}.safetensors")


@pytest.mark.ci
@pytest.mark.parametrize(("family", "is_tied"), FAMILIES)
def test_two_ranks_from_the_meta_device_train_as_one(tiny_model, tmp_path, family, is_tied) -> None:
    model_dir = tiny_model(family, is_tied=is_tied)
    wanted = trained(adapted(model_dir))
    run_ranks(__file__, 2, tmp_path, str(model_dir))
    for rank in (0, 1):
        got = load_file(tmp_path / f"rank{rank}.safetensors")
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5, msg=name)


if __name__ == "__main__":
    rank_main(work)
