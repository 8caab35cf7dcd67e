"""AdamW against torch, the schedule, clipping, skipped steps, and moments that are handed over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from dockyard_core.checkpoint_format import MOMENTS
from dockyard_core.optimizer_config import learning_rate_at
from dockyard_trainer_jax.optim import AdamState, apply_gradients, dotted_name, init_state, state_shardings
from dockyard_trainer_torch import TorchPolicyConfig

SHAPES = {"model.embed.weight": (40, 8), "model.norm.weight": (8,), "lm_head.weight": (40, 8), "adapter.weight": (8, 4)}


def make_params(seed: int = 0) -> dict[str, np.ndarray]:
    """Random but for one that starts at 0, as half of an adapter does: its distance is all movement."""
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return params | {"adapter.weight": np.zeros(SHAPES["adapter.weight"], np.float32)}


def make_grads(seed: int, scale: float = 1e-3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1000 + seed)
    return {name: (rng.normal(size=shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


step = jax.jit(apply_gradients, static_argnames="config", donate_argnames=("params", "state"))


def placed(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    # On a device that was asked for, as a policy's parameters are: it is part of what a function is compiled for.
    return {name: jax.device_put(array.copy(), jax.devices()[0]) for name, array in arrays.items()}


def moments_of(state: AdamState) -> dict[str, np.ndarray]:
    """Copies under the names of a checkpoint."""
    return {f"{kind}.{name}": np.array(array) for kind in MOMENTS for name, array in getattr(state, kind).items()}


def state_of(params: dict[str, jax.Array], moments: dict[str, np.ndarray], count: int) -> AdamState:
    """The state whose `moments_of` these are, beside its parameters."""
    trees = (
        {name: jax.device_put(moments[f"{kind}.{name}"].copy(), param.sharding) for name, param in params.items()}
        for kind in MOMENTS
    )
    return AdamState(jax.device_put(np.asarray(count, np.int32), state_shardings(params).count), *trees)


class Torch:
    """torch.optim.AdamW as its trainer uses it, on the same parameters."""

    def __init__(self, config: TorchPolicyConfig) -> None:
        self.config = config
        self.params = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in make_params().items()}
        groups = [
            {
                "params": [param for param in self.params.values() if param.ndim >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [param for param in self.params.values() if param.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)

    def step(self, grads: dict[str, np.ndarray], learning_rate: float) -> None:
        norm = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in grads.values()))
        share = min(1.0, self.config.max_grad_norm / norm)
        for name, param in self.params.items():
            param.grad = torch.from_numpy(grads[name] * np.float32(share))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def moments(self) -> dict[str, np.ndarray]:
        state = self.optimizer.state
        return {f"{kind}.{name}": state[param][kind].numpy() for kind in MOMENTS for name, param in self.params.items()}


def distance(ours, theirs) -> float:
    """Of one array from another, relative to its norm."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


RUNS = [(b, e, n) for b in ((0.9, 0.95), (0.9, 0.999), (0.0, 0.5)) for e in (1e-8, 1e-4) for n in (0.01, 1.0)]
DEFAULT = [((0.9, 0.999), 1e-8, 0.01), ((0.0, 0.5), 1e-4, 1.0)]


@pytest.mark.parametrize(
    ("betas", "eps", "max_grad_norm"),
    [pytest.param(*run, marks=() if run in DEFAULT else pytest.mark.ci) for run in RUNS],
)
def test_twenty_steps_are_those_of_torch(betas, eps, max_grad_norm) -> None:
    config = TorchPolicyConfig(
        learning_rate=2e-3,
        betas=betas,
        eps=eps,
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
        schedule="cosine",
        warmup_steps=3,
        total_steps=15,
        min_lr_ratio=0.1,
    )
    theirs, params = Torch(config), placed(make_params())
    state = init_state(params)
    for version in range(20):
        grads, learning_rate = make_grads(version), learning_rate_at(config, version)
        assert (np.sqrt(sum((grad**2).sum() for grad in grads.values())) > max_grad_norm) == (max_grad_norm == 0.01)
        params, state, report = step(params, placed(grads), state, config, learning_rate=learning_rate, loss=0.5)
        theirs.step(grads, learning_rate)
        assert not report.is_skipped
        for name, param in theirs.params.items():
            assert distance(params[name], param.detach()) < 1e-6, (version, name)
    moments = moments_of(state)
    for name, moment in theirs.moments().items():
        assert distance(moments[name], moment) < 1e-6, name
    assert int(state.count) == 20


def test_only_matrices_decay() -> None:
    config = TorchPolicyConfig(weight_decay=0.5)
    params, nothing = placed(make_params()), placed(make_grads(0, scale=0.0))
    moved, _, _ = step(params, nothing, init_state(params), config, learning_rate=0.1, loss=0.0)
    for name, before in make_params().items():
        share = 0.95 if before.ndim >= 2 else 1.0
        np.testing.assert_allclose(moved[name], before * share, rtol=1e-7)


def test_norms_and_biases_of_stacked_layers_do_not_decay() -> None:
    names = ("layers.input_layernorm.weight", "layers.q_proj.bias", "layers.q_norm.weight", "layers.q_proj.weight")
    params = placed({name: np.ones((3, 4), np.float32) for name in names})
    nothing = placed({name: np.zeros((3, 4), np.float32) for name in names})
    config = TorchPolicyConfig(weight_decay=0.5)
    moved, _, _ = step(params, nothing, init_state(params), config, learning_rate=0.1, loss=0.0)
    for name in names:
        np.testing.assert_allclose(moved[name], 0.95 if name.endswith("proj.weight") else 1.0, rtol=1e-7)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_the_reported_norm_is_from_before_clipping(scale) -> None:
    grads, params = make_grads(0, scale), placed(make_params())
    wanted = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in grads.values()))
    config = TorchPolicyConfig(max_grad_norm=0.5, betas=(0.0, 0.0))
    _, state, report = step(params, placed(grads), init_state(params), config, learning_rate=0.0, loss=0.0)
    assert float(report.grad_norm) == pytest.approx(wanted, rel=1e-6)
    # With betas of 0 the first moment is the clipped gradient itself.
    clipped = np.sqrt(sum(float((moment**2).sum()) for moment in state.exp_avg.values()))
    assert clipped == pytest.approx(min(wanted, 0.5), rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_is_as_if_it_had_not_been(bad, where) -> None:
    config = TorchPolicyConfig(weight_decay=0.1)
    results = []
    for has_bad_step in (False, True):
        params = placed(make_params())
        state = init_state(params)
        for number in range(3):
            if number == 2 and has_bad_step:
                before = jax.tree.map(np.array, (params, state))
                grads, loss = make_grads(9), 1.0
                if where == "gradient":
                    grads["model.norm.weight"][3] = bad
                else:
                    loss = bad
                params, state, report = step(params, placed(grads), state, config, learning_rate=1e-2, loss=loss)
                assert report.is_skipped
                jax.tree.map(np.testing.assert_array_equal, (params, state), before)
            grads = placed(make_grads(number))
            params, state, report = step(params, grads, state, config, learning_rate=1e-2, loss=1.0)
            assert not report.is_skipped
        results.append((params, state))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert int(state.count) == 3


def test_another_learning_rate_or_loss_runs_what_was_compiled_for_the_first() -> None:
    step.clear_cache()
    config, params = TorchPolicyConfig(), placed(make_params())
    state = init_state(params)
    for number in range(3):
        grads = placed(make_grads(number))
        params, state, _ = step(params, grads, state, config, learning_rate=0.1 * number, loss=float(number))
    assert step._cache_size() == 1


def test_a_run_handed_over_from_torch_and_back_takes_the_same_next_steps() -> None:
    config = TorchPolicyConfig(weight_decay=0.1, betas=(0.9, 0.999))
    there, back = Torch(config), Torch(config)
    for number in range(5):
        there.step(make_grads(number), 1e-2)
    params = placed({name: param.detach().numpy() for name, param in there.params.items()})
    state = state_of(params, there.moments(), 5)
    for number in (5, 6):
        params, state, _ = step(params, placed(make_grads(number)), state, config, learning_rate=1e-2, loss=0.0)
        there.step(make_grads(number), 1e-2)
    arrays = moments_of(state)
    for name, param in back.params.items():
        param.data = torch.from_numpy(np.array(params[name]))
        moments = {kind: torch.from_numpy(arrays[f"{kind}.{name}"]) for kind in MOMENTS}
        back.optimizer.state[param] = {"step": torch.tensor(float(state.count)), **moments}
    for one in (there, back):
        one.step(make_grads(7), 1e-2)
    for name, param in there.params.items():
        assert distance(back.params[name].detach(), param.detach()) < 1e-6, name


def test_names_are_dotted_paths() -> None:
    tree = {
        "model": {"layers": {0: {"weight": jnp.ones(1)}, 1: {"weight": jnp.ones(1)}}},
        "lm_head.weight": jnp.ones(1),
    }
    names = [dotted_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert names == ["lm_head.weight", "model.layers.0.weight", "model.layers.1.weight"]


SPECS = {"matrix": PartitionSpec("fsdp", "tp"), "rows": PartitionSpec("tp"), "norm": PartitionSpec()}
SPREAD_SHAPES = {"matrix": (8, 6), "rows": (4, 3), "norm": (5,)}


def three_steps(place) -> tuple[dict[str, jax.Array], AdamState, object]:
    """Three steps, the last of them from a state that was saved whole, and goes on as one that was not."""
    rng = np.random.default_rng(0)
    arrays = [{n: rng.normal(size=s).astype(np.float32) for n, s in SPREAD_SHAPES.items()} for _ in range(4)]
    config = TorchPolicyConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=0.5)
    params = place(arrays[0])
    state = init_state(params)
    spread = {n: p.sharding for n, p in params.items()}
    step = jax.jit(
        lambda p, g, s, lr: apply_gradients(p, g, s, config, learning_rate=lr, loss=0.0),
        donate_argnums=(0, 2),
        out_shardings=(spread, state_shardings(params), None),
    )
    for grads in arrays[1:3]:
        params, state, report = step(params, place(grads), state, 1e-2)
    state = state_of(params, moments_of(state), int(state.count))
    params, state, report = step(params, place(arrays[3]), state, 1e-2)
    assert step._cache_size() == 1
    return params, state, report


def test_moments_stay_beside_sharded_parameters_and_steps_are_equal() -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def spread(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {n: jax.device_put(a.copy(), NamedSharding(mesh, SPECS[n])) for n, a in arrays.items()}

    one, many = three_steps(placed), three_steps(spread)
    params = many[0]
    for made in (init_state(params), many[1]):
        for moment in (made.exp_avg, made.exp_avg_sq):
            for name, array in moment.items():
                assert array.sharding == params[name].sharding, (name, array.sharding)
        assert made.count.sharding == NamedSharding(mesh, PartitionSpec())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), one, many)
