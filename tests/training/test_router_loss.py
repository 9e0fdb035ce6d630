"""The load-balancing loss of a run is that of all tokens of an optimizer step, however the step is cut."""

from __future__ import annotations

import logging

import lightning as L
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel, load_balancing_loss_func

from grpo_lightning.functional.routing import load_balancing_loss, total_load
from grpo_lightning.objective import Objective
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.training.router_loss import RouterLoss, make_router_loss, router_coefficient
from tests.helpers.module_runs import SMALL, History, are_equal, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW
from tests.module.test_own_verbs import OwnUpdate
from tests.module.test_updates import gradients_of_the_first_step, relative_difference

LOSS, LOAD = "policy/router_aux_loss", "policy/max_expert_load"


def experts(**changes):
    return tiny_model("qwen3_moe", **(SMALL | changes))


def make_experts(coefficient=1.0, policy=None, objective=None, **options):
    """A module around a small mixture of experts."""
    loader = PolicyLoader(model=experts(), tokenizer=tiny_tokenizer(), **(policy or {}))
    objective = Objective(**({"beta": 0.0, "router_aux_loss_coef": coefficient} | (objective or {})))
    return make_module(policy=loader, tokenizer=None, objective=objective, **options)


def logged(module, **trainer):
    """The metrics of every step."""
    history = History()
    fit(module, shuffle=False, callbacks=[history], **({"max_epochs": 1} | trainer))
    return history


@SLOW
@pytest.mark.parametrize(
    "policy",
    [
        {},
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in (
                {"scoring": "dense"},
                {"chunk_size": 2, "activation_checkpointing": "chunks"},
                {"activation_checkpointing": "layers", "head_chunk_size": 3},
            )
        ),
    ],
)
def test_the_gradient_does_not_depend_on_micro_batches_chunks_and_path(policy):
    want = gradients_of_the_first_step(make_experts(), shuffle=False)
    without = gradients_of_the_first_step(make_experts(0.0), shuffle=False)
    assert relative_difference(want, without) > 0.1
    for accumulate in (1, 2, 4) if policy else (3,):
        module = make_experts(policy=policy)
        got = gradients_of_the_first_step(module, shuffle=False, accumulate_grad_batches=accumulate)
        assert relative_difference(got, want) < 1e-5


@pytest.mark.slow
def test_a_mean_of_micro_batch_losses_turns_it_red(monkeypatch):
    """As in TRL: f and P of every micro-batch alone."""

    def own_share(self, load):
        self.step = load
        share = load_balancing_loss(load.routed, load.probs, load.num_tokens) / 4
        self.latest = share.detach()
        return self.coefficient * share

    want = gradients_of_the_first_step(make_experts(), shuffle=False)
    monkeypatch.setattr(RouterLoss, "share", own_share)
    got = gradients_of_the_first_step(make_experts(), shuffle=False, accumulate_grad_batches=4)
    assert relative_difference(got, want) > 1e-3


@pytest.mark.slow
def test_every_update_counts_with_its_own_weights():
    """Two epochs of two updates: with one micro-batch, the routing is that of the forward pass that is trained on."""
    steps = [
        logged(make_experts(num_iterations=2, updates_per_rollout=2), accumulate_grad_batches=accumulate)
        for accumulate in (1, 2)
    ]
    for name in (LOSS, LOAD):
        assert steps[1].of(name)[:4] == pytest.approx(steps[0].of(name)[:4], rel=1e-4)
    assert len(set(steps[0].of(LOSS)[:4])) == 4  # the weights move
    assert not any("time/routing" in step for step in steps[0].steps)
    assert all("time/routing" in step for step in steps[1].steps)


@SLOW
def test_the_logged_loss_is_that_of_transformers_on_all_rows():
    """All completions count, whatever their advantage."""
    module = make_experts(lr=0.0)
    history = logged(module, max_steps=1, accumulate_grad_batches=2)
    rows = [
        [*group.prompt_ids, *completion.token_ids[:-1]]
        for group in module.rollout.groups
        for completion in group.completions
    ]
    with torch.no_grad():
        logits = [module.policy(torch.tensor([row]), output_router_logits=True).router_logits for row in rows]
    layers = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    assert len(layers[0]) == sum(map(len, rows))
    assert history.of(LOSS) == pytest.approx([load_balancing_loss_func(layers, 4, 2).item()], rel=1e-5)
    by_layer = [layer.topk(2).indices.flatten().bincount(minlength=4) for layer in layers]
    assert history.of(LOAD) == pytest.approx([max(4 * int(c.max()) / int(c.sum()) for c in by_layer)])


@pytest.mark.slow
def test_the_loss_contains_it_with_its_coefficient():
    steps = {c: logged(make_experts(c, lr=0.0), max_steps=1) for c in (0.0, 0.5, 2.0)}
    plain = steps[0.0].of("policy/loss")[0]
    for coefficient in (0.5, 2.0):
        aux = steps[coefficient].of(LOSS)[0]
        assert steps[coefficient].of("policy/loss")[0] == pytest.approx(plain + coefficient * aux, abs=1e-5)
    gradients = {c: gradients_of_the_first_step(make_experts(c), shuffle=False) for c in (0.0, 0.5, 2.0)}
    difference = {c: {n: g - gradients[0.0][n] for n, g in gradients[c].items()} for c in (0.5, 2.0)}
    assert relative_difference({n: 4 * g for n, g in difference[0.5].items()}, difference[2.0]) < 1e-4


@pytest.mark.slow
def test_coefficient_0_changes_nothing(monkeypatch):
    """Bit for bit, what a run without any of it does: no pass, no hook, no completion of advantage 0."""
    runs = []
    for coefficient in (0.0, None):
        if coefficient is None:
            monkeypatch.setattr("grpo_lightning.module.make_router_loss", lambda *args: None)
        module = make_experts(coefficient, updates_per_rollout=2)
        history = logged(module, accumulate_grad_batches=2)
        assert not any({LOSS, LOAD, "time/routing"} & step.keys() for step in history.steps)
        runs.append(weights_of(module))
    assert are_equal(*runs)


@SLOW
def test_null_is_the_coefficient_of_the_config(caplog):
    with caplog.at_level(logging.INFO, "grpo_lightning"):
        history = logged(make_experts(None), max_steps=1)
    assert "weight 0.001 (the policy's config), 2 routers, 2 experts per token" in caplog.text
    assert history.of(LOSS)[0] > 0
    assert router_coefficient(None, experts().config) == 0.001
    assert router_coefficient(0.0, experts().config) == 0
    assert router_coefficient(0.3, experts().config) == 0.3
    assert router_coefficient(None, experts(router_aux_loss_coef=0.0).config) == 0
    dense = tiny_model("qwen2").config
    assert router_coefficient(None, dense) == router_coefficient(0.0, dense) == 0
    dense.router_aux_loss_coef = 0.5  # left over from another model
    assert router_coefficient(None, dense) == 0


def test_a_dense_policy_with_a_coefficient_is_refused_before_weights_are_loaded(monkeypatch):
    monkeypatch.setattr(PolicyLoader, "load", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    module = make_module(objective=Objective(router_aux_loss_coef=0.01))
    with pytest.raises(ValueError, match=r"coef is 0.01, but a policy of model type qwen2 has no routers .* null or 0"):
        fit(module, max_steps=1)


def test_routing_that_cannot_be_recorded(caplog, monkeypatch):
    model = experts()
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_can_record_outputs", {})
    with pytest.raises(ValueError, match=r"is 0.5, but the routing of Qwen3MoeForCausalLM cannot be recorded: it decl"):
        make_router_loss(model, Scorer(), 0.5)
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        assert make_router_loss(model, Scorer(), None) is None
    assert "router_aux_loss_coef 0.001, but this run trains without the load" in caplog.text
    caplog.clear()
    assert make_router_loss(model, Scorer(), 0.0) is None
    assert not caplog.text


def test_completions_of_advantage_0_have_it_too(caplog):
    """Their tokens are routed like all others."""

    def equal(completions):
        return [0.5] * len(completions)

    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        gradients = gradients_of_the_first_step(make_experts(rewards=[equal]), shuffle=False, accumulate_grad_batches=2)
    assert any(gradient.any() for gradient in gradients.values())
    assert "no gradient apart from the load of the experts" in caplog.text


class Loads(L.Callback):
    """Compares the routing of the step with that of the passes that are trained on."""

    def on_train_start(self, trainer, pl_module):
        self.own, self.num_steps = [], 0
        share = pl_module.router_loss.share

        def watched(load):
            self.own.append(load)
            return share(load)

        pl_module.router_loss.share = watched

    def on_train_batch_end(self, trainer, pl_module, *args):
        if len(self.own) == trainer.accumulate_grad_batches:
            assert torch.equal(total_load(self.own).routed, pl_module.router_loss.step.routed)
            self.own, self.num_steps = [], self.num_steps + 1


@pytest.mark.slow
def test_the_routing_is_that_of_the_passes_with_gradients():
    loads = Loads()
    module = make_experts(policy={"lora": LoRA(rank=2)}, lr=0.1, updates_per_rollout=2)
    fit(module, max_epochs=1, accumulate_grad_batches=3, callbacks=[loads])
    assert loads.num_steps == 4


@pytest.mark.slow
def test_a_pass_that_selects_tokens_counts_their_routing_too():
    objective = {"top_entropy_fraction": 0.5}
    module = make_experts(objective=objective)
    loads, history = Loads(), History()
    fit(module, shuffle=False, max_steps=1, accumulate_grad_batches=2, callbacks=[loads, history])
    assert loads.num_steps == 1
    assert "time/token_selection" in history.steps[0]
    assert "time/routing" not in history.steps[0]
    assert history.of(LOSS) == pytest.approx(logged(make_experts(objective=objective), max_steps=1).of(LOSS), rel=1e-5)


@SLOW
def test_an_own_update_that_leaves_the_loss_out_is_refused():
    module = make_experts(0.5, module_class=OwnUpdate)
    with pytest.raises(ValueError, match=r"has the weight 0\.5, but your `update` leaves it out"):
        logged(module)
    logged(make_experts(0.0, module_class=OwnUpdate))
