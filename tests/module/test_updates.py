"""The loss and its gradient: exact ratios, micro-batches that change nothing, who is in which mode."""

import lightning as L
import pytest
import torch

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from tests.helpers.module_runs import PROMPTS, SMALL, History, fit, make_module, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few


@few(4, slow=True)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, "32-true"),
        (torch.bfloat16, "32-true"),
        (torch.bfloat16, "bf16-true"),
        (torch.float32, "bf16-mixed"),
    ],
)
@pytest.mark.parametrize(
    "policy", [{}, {"chunk_size": 3}, {"activation_checkpointing": "layers"}, {"scoring": "dense"}]
)
def test_the_ratio_of_unmoved_weights_is_exactly_one(dtype, precision, policy, monkeypatch):
    monkeypatch.setattr(
        "grpo_lightning.training.checks.check_masters", lambda *args, **kwargs: None
    )  # nothing is to move here
    loader = PolicyLoader(model=tiny_model("qwen2", dtype=dtype, **SMALL), tokenizer=tiny_tokenizer(), **policy)
    module = make_module(policy=loader, tokenizer=None, lr=0.0, num_iterations=2, updates_per_rollout=2)
    history = History()
    fit(module, batch_size=8, max_epochs=1, accumulate_grad_batches=2, precision=precision, callbacks=[history])
    assert history.of("policy/ratio") == [1.0] * 4
    for name in ("policy/clip_fraction", "policy/clip_fraction_low", "policy/clip_fraction_high"):
        assert history.of(name) == [0.0] * 4


def drawn(rollouts=2, **options):
    """The completions of the first rollouts, weights unmoved and prompts always the same."""
    ids = []

    class Collect(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            ids.append(pl_module.run.cycle.micro_batches[0].completion_ids.tolist())

    module = make_module(lr=0.0, **options)
    fit(module, PROMPTS[:4], max_epochs=rollouts, shuffle=False, callbacks=[Collect()])
    return ids


@SLOW
def test_every_rollout_draws_anew_and_the_seed_says_what():
    first, second = drawn()
    assert first != second
    assert drawn() == [first, second]
    assert drawn(seed=1) != [first, second]


@SLOW
def test_the_seed_is_seed_everythings_by_default(monkeypatch):
    assert drawn(seed=None) == drawn(seed=0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert drawn(seed=None) == drawn(seed=3)


def test_the_ratio_of_moved_weights_is_not_one():
    history = History()
    fit(make_module(num_iterations=2), max_epochs=1, callbacks=[history])
    ratios = history.of("policy/ratio")
    assert ratios[0] == ratios[2] == 1
    assert ratios[1] != 1
    assert ratios[3] != 1


def test_old_logprobs_of_the_rollout_are_the_engines():
    history = History()
    module = make_module(lr=0.0, old_logprobs="rollout")
    fit(module, max_steps=1, callbacks=[history])
    batch = module.run.cycle.micro_batches[0]
    assert torch.equal(batch.old_logprobs, batch.rollout_logprobs)
    assert history.of("policy/ratio") == pytest.approx([1.0], abs=1e-4)  # the engine rounds in another order


def gradients_of_the_first_step(module, **trainer):
    """Return the gradient of every parameter, before clipping."""
    gradients = {}

    class Collect(History):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            gradients.update({name: p.grad.clone() for name, p in pl_module.policy.named_parameters()})

    fit(module, max_steps=1, callbacks=[Collect()], **trainer)
    return gradients


def relative_difference(got, want):
    """Largest difference between two sets of tensors, each relative to the norm of all."""
    assert got.keys() == want.keys()
    whole = torch.stack([tensor.norm() for tensor in want.values()]).norm()
    assert whole > 0
    return float(max((got[name] - want[name]).norm() for name in want) / whole)


@SLOW
def test_autocast_gives_every_weight_its_gradient():
    """Sampling casts weights without gradients; autocast must not hand those to the loss."""
    want = gradients_of_the_first_step(make_module(objective=Objective(beta=0.04), updates_per_rollout=2))
    got = gradients_of_the_first_step(
        make_module(objective=Objective(beta=0.04), updates_per_rollout=2), precision="bf16-mixed"
    )
    assert all(got[name].norm() > 0 for name in want if want[name].norm() > 0)


@few(2)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_accumulation_changes_memory_only(aggregate, beta):
    """One clipped SGD step on the same rollout, cut into 1, 2 and 4 micro-batches."""
    moved, norms = {}, {}
    for accumulate in (1, 2, 4):
        module = make_module(
            objective=Objective(aggregate=aggregate, beta=beta),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            length=12,
            num_generations=5,
        )
        module.configure_model()
        before = weights_of(module)
        trainer = fit(module, batch_size=3, max_steps=1, accumulate_grad_batches=accumulate, gradient_clip_val=0.05)
        norms[accumulate] = trainer.callback_metrics["policy/grad_norm"].item()  # before clipping
        assert len(module.run.cycle.micro_batches) == accumulate
        moved[accumulate] = {name: weights - before[name] for name, weights in weights_of(module).items()}
        size = torch.stack([change.norm() for change in moved[accumulate].values()]).norm()
        assert size == pytest.approx(0.05, rel=1e-3)  # it was clipped
    for accumulate in (2, 4):
        assert relative_difference(moved[accumulate], moved[1]) < 1e-5
        assert norms[accumulate] == pytest.approx(norms[1], rel=1e-5)


@SLOW
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_skipping_what_teaches_nothing_changes_nothing(aggregate, monkeypatch):
    def half_equal(completions):
        values = [float(len(text) + text.count("e")) for text in completions]
        return [0.0] * (len(values) // 2) + values[len(values) // 2 :]

    half_equal.in_process = True  # half of the whole batch

    def run():
        module = make_module(rewards=[half_equal], objective=Objective(beta=0.0, aggregate=aggregate), length=12)
        return module, gradients_of_the_first_step(module, accumulate_grad_batches=2)

    module, skipped = run()
    assert sum(len(batch.completion_ids) for batch in module.run.cycle.micro_batches) < 16
    monkeypatch.setattr(Objective, "trains_on_zero_advantages", True)
    module, whole = run()
    assert sum(len(batch.completion_ids) for batch in module.run.cycle.micro_batches) == 16
    assert relative_difference(skipped, whole) < 1e-5


class Spoil(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, *args):
        pl_module.policy.eval()  # as after loading a checkpoint inside a cycle


def test_modes_and_frozen_parameters():
    """The policy samples in eval mode and trains in train mode; the reference is in eval mode, without gradients."""
    seen = []

    class Watched(GRPOLightningModule):
        def configure_model(self):
            super().configure_model()
            if not seen:
                seen.append("configured")
                for model, name in ((self.policy, "policy"), (self.reference.model, "reference")):
                    model.register_forward_pre_hook(
                        lambda m, inputs, name=name: seen.append((self.now, name, m.training))
                    )

        now = ""

        def sample(self, prompts):
            self.now = "sample"
            assert all(p.grad is None for p in self.policy.parameters())  # the last step's would take up memory
            return super().sample(prompts)

        def score_rewards(self, rollout):
            self.now = "reward"
            return super().score_rewards(rollout)

        def start_cycle(self, rollout):
            self.now = "plan"
            super().start_cycle(rollout)

        def update(self, micro_step):
            self.now = "update"
            return super().update(micro_step)

    model = tiny_model("qwen2", **SMALL)
    model.model.layers[0].requires_grad_(False)
    module = make_module(Watched, policy=model, objective=Objective(beta=0.04), updates_per_rollout=2)
    module.configure_model()
    before = weights_of(module)
    reference = {name: parameter.clone() for name, parameter in module.reference.named_parameters()}
    fit(module, max_epochs=1, callbacks=[Spoil()])
    assert set(seen[1:]) == {
        ("sample", "policy", False),
        ("reward", "reference", False),
        ("plan", "policy", True),
        ("update", "policy", True),
    }
    assert all(not module.training for module in module.reference.modules())
    assert all(torch.equal(p, reference[name]) and p.grad is None for name, p in module.reference.named_parameters())
    for name, parameter in module.policy.named_parameters():
        if "layers.0" in name:
            assert parameter.grad is None
            assert torch.equal(parameter, before[name])
        else:
            assert not torch.equal(parameter, before[name])
