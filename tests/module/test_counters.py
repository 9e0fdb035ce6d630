"""A step runs N prompts per pass through the model, never N x G."""

from collections import Counter

import lightning as L
import pytest

from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from tests.helpers.module_runs import SMALL, fit, make_module
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few

LENGTH = 20
PROMPTS = [f"{i}".center(LENGTH, ".") for i in range(8)]  # longer than any completion of the tests


class CountPrompts(L.Callback):
    """Prompts embedded, by model and phase of the step."""

    def __init__(self) -> None:
        self.prompts: Counter[tuple[str, str]] = Counter()
        self.phase = ""

    def on_fit_start(self, trainer, pl_module) -> None:
        for name in ("policy", "reference"):
            model = getattr(pl_module, name)
            model = getattr(model, "model", None) if name == "reference" else model
            if model is not None:
                model.get_input_embeddings().register_forward_pre_hook(
                    lambda _, inputs, name=name: self.count(name, *inputs)
                )

    def count(self, model, ids) -> None:
        if ids.shape[1] >= LENGTH:
            self.prompts[model, self.phase] += len(ids)

    def on_phase(self, trainer, name) -> None:
        self.phase = name


def prompts_embedded(accumulate=1, num_prompts=8, steps=None, policy=None, **options):
    """Count the prompts that one cycle embeds."""
    loader = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), **(policy or {}))
    module = make_module(policy=loader, **options)
    counter = CountPrompts()
    fit(
        module,
        PROMPTS[:num_prompts],
        batch_size=num_prompts,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[counter],
    )
    return dict(counter.prompts)


@few(1)
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"chunk_size": 5},
        {"activation_checkpointing": "chunks", "chunk_size": 5},
        {"activation_checkpointing": "layers"},
    ],
    ids=["plain", "chunks", "checkpointed chunks", "checkpointed layers"],
)
def test_every_pass_runs_a_prompt_once(policy):
    counts = prompts_embedded(policy=policy, objective=Objective(beta=0.04), num_iterations=2)
    assert counts == {
        ("policy", "rollout"): 8,
        ("reference", "ref_logprobs"): 8,
        ("policy", "update"): 2 * 8,  # two iterations
    }


def test_the_dense_path_runs_it_with_every_completion():
    """The counter can tell the difference."""
    counts = prompts_embedded(policy={"scoring": "dense"}, objective=Objective(beta=0.04))
    assert counts == {("policy", "rollout"): 8, ("reference", "ref_logprobs"): 8 * 4, ("policy", "update"): 8 * 4}


def test_without_a_reference_there_is_no_pass_for_it():
    module = make_module(objective=Objective(beta=0.0))
    module.configure_model()
    assert module.reference is None
    assert prompts_embedded(objective=Objective(beta=0.0)).keys() == {("policy", "rollout"), ("policy", "update")}


@SLOW
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_only_later_updates_need_a_pass_for_old_logprobs(num_iterations):
    counts = prompts_embedded(objective=Objective(beta=0.04), updates_per_rollout=4, num_iterations=num_iterations)
    assert counts == {
        ("policy", "rollout"): 8,
        ("policy", "old_logprobs"): 8 - 2,  # the first update's own forward passes give them
        ("reference", "ref_logprobs"): 8,
        ("policy", "update"): num_iterations * 8,
    }


def test_old_logprobs_of_the_engine_need_no_pass():
    counts = prompts_embedded(updates_per_rollout=4, old_logprobs="rollout")
    assert counts.keys() == {("policy", "rollout"), ("policy", "update")}


def test_whole_groups_share_micro_batches():
    """Completions of one length: nothing is gained by sorting them, so no prompt runs twice."""
    counts = prompts_embedded(accumulate=4, objective=Objective(beta=0.04), length=1)
    assert counts[("policy", "update")] == counts[("reference", "ref_logprobs")] == 8


def test_groups_without_advantages_are_not_trained():
    """Every completion has the same reward. One masked token runs in place of the update's 8 prompts."""
    counts = prompts_embedded(rewards=[lambda completions, **_: [1.0] * len(completions)])
    assert counts == {("policy", "rollout"): 8, ("policy", "update"): 1}
