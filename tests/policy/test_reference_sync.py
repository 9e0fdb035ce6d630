"""The reference follows the policy."""

import itertools

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.policy.reference import SyncReference
from tests.helpers.module_runs import SMALL, fit, make_module
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW


def moving(**options):
    return make_module(
        objective=Objective(beta=0.04), sync_reference=SyncReference(every_n_steps=2, mixup_alpha=0.6), **options
    )


class Snapshots:
    """The policy and the reference after every optimizer step."""

    def __init__(self):
        import lightning as L

        taken = self.taken = []

        class Take(L.Callback):
            def on_train_batch_start(self, trainer, pl_module, *args):
                taken.append(tuple(copies(model) for model in (pl_module.policy, pl_module.reference.model)))

            on_train_end = on_train_batch_start

        self.callback = Take()


def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@SLOW
def test_it_moves_every_n_steps_by_alpha():
    snapshots = Snapshots()
    fit(moving(), max_steps=4, max_epochs=-1, callbacks=[snapshots.callback])
    (start, _), (_, after_1), (policy_2, after_2), (_, after_3), (policy_4, after_4) = snapshots.taken
    for i, first in enumerate(start):
        assert torch.equal(after_1[i], first)
        assert torch.equal(after_2[i], torch.lerp(first, policy_2[i], 0.6))
        assert torch.equal(after_3[i], after_2[i])
        assert torch.equal(after_4[i], torch.lerp(after_2[i], policy_4[i], 0.6))
    assert any(not torch.equal(one, other) for one, other in zip(after_2, start, strict=True))


def test_accumulated_micro_batches_are_one_step():
    snapshots = Snapshots()
    fit(moving(), max_steps=2, max_epochs=-1, accumulate_grad_batches=2, callbacks=[snapshots.callback])
    references = [reference for _, reference in snapshots.taken]
    moved = [not torch.equal(one[0], other[0]) for one, other in itertools.pairwise(references)]
    assert moved == [False, False, False, True]


@SLOW
def test_a_moved_reference_is_in_the_checkpoint_and_one_that_stands_is_not(tmp_path):
    module = moving()
    trainer = fit(module, max_steps=2, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "moved.ckpt")
    content = torch.load(tmp_path / "moved.ckpt", weights_only=True)
    assert not [name for name in content["state_dict"] if name.startswith("reference")]
    saved = content["grpo"]["reference"]
    assert all(torch.equal(saved[name], weight) for name, weight in module.reference.model.named_parameters())
    resumed = moving()
    fit(resumed, max_steps=2, max_epochs=-1, ckpt_path=str(tmp_path / "moved.ckpt"))
    for one, other in zip(resumed.reference.model.parameters(), module.reference.model.parameters(), strict=True):
        assert torch.equal(one, other)

    still = make_module(objective=Objective(beta=0.04))
    fit(still, max_steps=2, max_epochs=-1).save_checkpoint(tmp_path / "still.ckpt")
    assert torch.load(tmp_path / "still.ckpt", weights_only=True)["grpo"]["reference"] is None


@SLOW
def test_a_moved_reference_needs_a_place(tmp_path):
    fit(moving(), max_steps=2, max_epochs=-1).save_checkpoint(tmp_path / "moved.ckpt")
    with pytest.raises(ValueError, match=r"has a reference that was updated .* this run has no reference"):
        fit(make_module(), max_steps=3, max_epochs=-1, ckpt_path=str(tmp_path / "moved.ckpt"))


@SLOW
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_reference_that_has_moved_in_memory_cannot_go_back(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(module := moving(), max_steps=3, max_epochs=-1, callbacks=[saving], enable_checkpointing=True)
    run = {"max_steps": 3, "max_epochs": -1}
    with pytest.raises(ValueError, match=r"earlier trainer\.fit has updated the reference of this module: create a"):
        fit(module, **run, ckpt_path=str(tmp_path / "step=1.ckpt"))
    fit(module, **run, ckpt_path=str(tmp_path / "step=2.ckpt"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        ({"mixup_alpha": 0}, "mixup_alpha must be above 0 and at most 1, got 0"),
        ({"mixup_alpha": 1.5}, "mixup_alpha must be above 0 and at most 1, got 1.5"),
    ],
)
def test_ranges(settings, message):
    with pytest.raises(ValueError, match=message):
        SyncReference(**settings)


def test_no_reference_to_move():
    with pytest.raises(ValueError, match=r"there is no reference: model\.objective\.beta is 0"):
        make_module(sync_reference=SyncReference())


def test_adapters_have_nothing_in_between():
    loader = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), lora=LoRA())
    with pytest.raises(ValueError, match=r"trains LoRA adapters.*export the run merged"):
        make_module(policy=loader, tokenizer=None, objective=Objective(beta=0.04), sync_reference=SyncReference())


def test_settings_may_be_a_mapping():
    module = make_module(objective=Objective(beta=0.04), sync_reference={"every_n_steps": 7})
    assert module.sync_reference == SyncReference(every_n_steps=7)
