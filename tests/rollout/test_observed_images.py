"""Images in observations: what the policy sees in the next turns, and its log-probs when they are scored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Completion, Group, SamplingParams
from grpo_lightning.environments import Environment, Step, Tools
from grpo_lightning.environments.tools import ToolCall
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.turns import TurnTokens
from grpo_lightning.rollout.local_engine import LocalEngine
from grpo_lightning.training.micro_batches import give_images, plan_micro_batches
from tests.helpers import tiny_vlms
from tests.helpers.conversation_runs import sample
from tests.helpers.observed_images import SIZES, Shows, plain_logprobs, source_of
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_vlms import picture
from tests.helpers.vision_prompts import encoder_of, prompt_of
from tests.marks import SLOW

SAMPLING = SamplingParams(max_completion_length=160, temperature=0.8)
SEEN = ["qwen2_5_vl", "internvl"]
OTHERS = [pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2_vl", "qwen3_vl", "glm4v", "gemma3")]
PROMPTS = [["none, only words"], ["look"], [picture(0), "where?"]]
"""Without images at all; with images in observations alone; with images in the prompt, too."""


def sampled(vlm: Any, prompts: Any = PROMPTS, environment: Any = None, **limits: Any) -> tuple[Any, list[Group]]:
    encoder, engine = encoder_of(vlm), LocalEngine()
    engine.connect(vlm.model, encoder.tokenizer, Sharding())
    source = source_of(vlm, encoder, engine, environment or Shows(), **({"max_turn_length": 6} | limits))
    given = [prompt_of(*parts, index=i) for i, parts in enumerate(prompts)]
    return encoder, source.sample(given, 2, SAMPLING, list(range(len(given))))


def images_of(group: Group, completion: Completion) -> list[Any]:
    """The images that the policy has seen, from the data and the environment themselves."""
    shown = [picture(turn, *SIZES[turn % 3]) for turn in range(1, len(completion.images) + 1)]
    return [image.read() for image in group.prompt.images] + shown


@torch.no_grad()
def expected(vlm: Any, encoder: Any, group: Group, number: int) -> torch.Tensor:
    images = images_of(group, group.completions[number])
    if images:
        return plain_logprobs(vlm, encoder, group, number, images, SAMPLING.temperature)
    ids = torch.tensor([group.prompt_ids + group.completions[number].token_ids])
    with torch.no_grad():
        logits = vlm.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(group.prompt_ids) - 1 : -1]
    logits[:, [token for token in encoder.never_sampled if token < logits.shape[1]]] = -torch.inf
    chosen = torch.tensor(group.completions[number].token_ids)
    return (logits / SAMPLING.temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]


@SLOW
@pytest.mark.parametrize("family", [*SEEN, *OTHERS])
def test_sampled_and_scored_log_probs_are_those_of_a_plain_loop(family):
    """Each conversation in one forward pass with all its images, made by the processor."""
    vlm = tiny_vlms.build(family)
    encoder, groups = sampled(vlm)
    assert [len(c.images) for group in groups for c in group.completions] == [0, 0, 2, 2, 2, 2]
    for path in ("extended", "dense"):
        for chunk_size in (None, 1):
            scorer = Scorer(path, chunk_size=chunk_size, never=encoder.never_sampled)
            check_logprobs(vlm, encoder, groups, scorer)


def check_logprobs(vlm: Any, encoder: Any, groups: list[Group], scorer: Scorer) -> None:
    """Check log-probs of sampling and of scoring against a plain loop over the conversations."""
    found = scored(vlm, encoder, groups, scorer)
    for i, group in enumerate(groups):
        for number, completion in enumerate(group.completions):
            mask = torch.tensor(completion.mask)
            want = expected(vlm, encoder, group, number)[mask]
            assert torch.tensor(completion.logprobs)[mask].allclose(want, atol=1e-5)
            assert found[i, number][: len(mask)][mask].allclose(want, atol=1e-5)


def test_a_family_without_a_record(monkeypatch):
    """The model computes positions itself, and everything runs densely."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    monkeypatch.setattr("grpo_lightning.policy.families.FAMILIES", {})
    encoder, groups = sampled(vlm)
    check_logprobs(vlm, encoder, groups, Scorer("dense", never=encoder.never_sampled))


def batch_of(vlm: Any, encoder: Any, groups: list[Group]) -> Any:
    (batch,), _ = plan_micro_batches(
        groups, torch.ones(len(groups), 2), updates=1, accumulate=1, pad_id=0, skip_zero_advantages=False
    )
    give_images([batch], encoder.vision_inputs([group.vision for group in groups], needs_blank=False), encoder.blank)
    return batch


def scored(vlm: Any, encoder: Any, groups: list[Group], scorer: Scorer) -> dict[tuple[int, int], torch.Tensor]:
    batch = batch_of(vlm, encoder, groups)
    with torch.no_grad():
        logprobs = scorer(vlm.model, batch, temperature=SAMPLING.temperature).logprobs
    names = zip(batch.prompt_index.tolist(), batch.numbers, strict=True)
    return {(batch.groups[prompt], number): row for (prompt, number), row in zip(names, logprobs, strict=True)}


def test_another_image_changes_the_log_probs_behind_it():
    """The same tokens, scored with another image: what the policy wrote before it stays as it is."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, groups = sampled(vlm, [["look"]])
    scorer = Scorer(never=encoder.never_sampled)
    before = scored(vlm, encoder, groups, scorer)
    for completion in groups[0].completions:
        shown = completion.images[0].vision
        shown.images = {name: t + 1.0 if name == "pixel_values" else t for name, t in shown.images.items()}
    after = scored(vlm, encoder, groups, scorer)
    for (_, number), logprobs in before.items():
        first, second, *_ = [turn for turn in groups[0].completions[number].turns if turn.is_sampled]
        difference = (logprobs - after[0, number]).abs()
        assert difference[first.start : first.end].max() == 0
        assert difference[second.start : second.end].min() > 1e-4


def test_the_next_turn_sees_the_image():
    """With another image, the policy goes on in another way; its first turn is the same."""
    vlm = tiny_vlms.build("qwen2_5_vl")

    class Other(Shows):
        def reset(self, prompt: Any) -> None:
            super().reset(prompt, seed=3)

    _, (one,) = sampled(vlm, [["look"]])
    _, (other,) = sampled(vlm, [["look"]], Other())
    for a, b in zip(one.completions, other.completions, strict=True):
        turns = [[c.token_ids[turn.start : turn.end] for turn in c.turns if turn.is_sampled] for c in (a, b)]
        assert turns[0][0] == turns[1][0]
        assert turns[0][1:] != turns[1][1:]


@pytest.mark.parametrize("family", SEEN)
def test_tokens_are_those_of_the_processor(family):
    """An observation is what the chat template and the processor make of it, and has no place in the mask."""
    vlm = tiny_vlms.build(family)
    encoder, groups = sampled(vlm)
    for group in groups[1:]:
        for completion in group.completions:
            observed = [turn for turn in completion.turns if not turn.is_sampled and turn.end > turn.start]
            for number, (turn, images) in enumerate(zip(observed, completion.images, strict=True), start=1):
                assert (images.start, images.end) == (turn.start, turn.end)
                assert not any(completion.mask[turn.start : turn.end])
                one = encoder.template([{"role": "user", "content": [{"type": "image"}]}], {})
                text = one.replace("user: ", f"user: now {number}: ").replace("assistant: ", " what?assistant: ")
                want = encoder.process(text, [picture(number, *SIZES[number % 3])], "")["input_ids"][0].tolist()
                assert completion.token_ids[turn.start : turn.end] == want
                assert turn.text == f"now {number}: <image> what?"
            assert completion.text.count("<image>") == len(completion.images) == 2


def test_completions_without_images_stay_on_the_extended_path(monkeypatch):
    """The group without images runs its prompt once; each conversation of the two others is a row of its own."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, groups = sampled(vlm)
    batch, scorer = batch_of(vlm, encoder, groups), Scorer(chunk_size=2, never=encoder.never_sampled)
    plain, shown = scorer.parts(batch)
    assert (plain.scorer.path, plain.rows, len(plain.batch.prompt_ids)) == ("extended", [0, 1], 1)
    assert (shown.scorer.path, shown.rows) == ("dense", [2, 3, 4, 5])
    assert (scorer.num_chunks(batch), scorer.num_image_chunks(batch)) == (1, 2)
    (alone,) = scorer.parts(batch_of(vlm, encoder, groups[:1]))
    assert alone.scorer is scorer


@SLOW
@pytest.mark.parametrize("path", ["extended", "dense"])
def test_dummy_passes_change_nothing(path):
    """Other ranks may need more passes of each kind: gradients and log-probs stay the same."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, groups = sampled(vlm)
    scorer = Scorer(path, chunk_size=2, never=encoder.never_sampled)
    for of_rank in (groups[:1], groups[1:2], groups):
        found = []
        for numbers in ((None, None), (3, 4)):
            batch = batch_of(vlm, encoder, of_rank)
            batch.num_chunks, batch.num_image_chunks = numbers
            vlm.model.zero_grad()
            passes: list[Any] = []
            handle = vlm.model.register_forward_pre_hook(lambda *call, passes=passes: passes.append(call))
            logprobs = scorer(vlm.model, batch, temperature=1.0).logprobs
            handle.remove()
            (logprobs * batch.completion_mask).sum().backward()
            grads = {name: p.grad.clone() for name, p in vlm.model.named_parameters() if p.grad is not None}
            found.append((logprobs.detach(), grads))
        assert len(passes) == 3 + 4 + (path == "extended")
        (one, grads), (other, more_grads) = found
        assert one.allclose(other, atol=1e-5)
        for name, grad in grads.items():
            assert grad.allclose(more_grads[name], atol=2e-5), name


def test_the_plain_loop_s_gradient():
    """The gradient covers the trained tokens of all conversations, the vision tower's weights included."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, groups = sampled(vlm, PROMPTS[1:])
    batch, scorer = batch_of(vlm, encoder, groups), Scorer(checkpoint_chunks=True, never=encoder.never_sampled)
    vlm.model.zero_grad()
    logprobs = scorer(vlm.model, batch, temperature=SAMPLING.temperature).logprobs
    (logprobs * batch.completion_mask).sum().backward()
    found = {name: p.grad.clone() for name, p in vlm.model.named_parameters() if p.grad is not None}
    vlm.model.zero_grad()
    for group in groups:
        for number, completion in enumerate(group.completions):
            images = images_of(group, completion)
            logprobs = plain_logprobs(vlm, encoder, group, number, images, SAMPLING.temperature)
            (logprobs * torch.tensor(completion.mask)).sum().backward()
    for name, parameter in vlm.model.named_parameters():
        if parameter.grad is not None:
            assert found[name].allclose(parameter.grad, atol=2e-4, rtol=1e-4), name


class Long(Environment):
    """Shows an image with long texts around it."""

    def step(self, completion: str) -> Step:
        text = {"type": "text", "text": "long " * 20}
        return Step({"role": "user", "content": [text, {"type": "image", "image": picture(1)}, text]})


def test_only_the_text_of_an_observation_is_cut():
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, (group,) = sampled(vlm, [["look"]], Long(), max_observation_length=10, max_turns=2)
    image = encoder.config.image_token_id
    for completion in group.completions:
        (images,) = completion.images
        assert completion.token_ids.count(image) == images.vision.num_image_tokens == 6
        assert completion.turns[1].text == "long long  ... (truncated)<image> ... (truncated)"
        assert completion.ending.metrics["truncated_observations"] == 1


def test_an_observation_without_room_is_warned_of(caplog):
    vlm = tiny_vlms.build("qwen2_5_vl")
    _, (group,) = sampled(vlm, [["look"]], Long())
    assert {c.finish_reason for c in group.completions} == {"length"}
    assert "tokens, 6 of them of images, leaves no room for another turn" in caplog.text


def show() -> Any:
    """Show an image."""
    return picture(1)


class AlwaysShows(Tools):
    """Reads a call in every turn."""

    def read_calls(self, completion: str) -> list[ToolCall]:
        return [ToolCall("show", {})]


def test_the_policy_sees_an_image_that_a_tool_returns():
    encoder, (group,) = sampled(tiny_vlms.build("qwen2_5_vl"), [["look"]], AlwaysShows([show]), max_turns=2)
    for completion in group.completions:
        (images,) = completion.images
        assert completion.token_ids.count(encoder.config.image_token_id) == images.vision.num_image_tokens == 6
        assert completion.turns[1].text == "<image>"
    with pytest.raises(ValueError, match="returned an image in an observation, and the policy is text-only"):
        sample(tiny_model("qwen2"), AlwaysShows([show]), ["look"], max_turn_length=3)


def test_an_image_that_cannot_be_read_is_a_failure_of_the_environment():
    class Missing(Environment):
        def step(self, completion: str) -> Step:
            return Step({"role": "user", "content": [{"type": "image", "image": "/nowhere/a.png"}]})

    with pytest.raises(RuntimeError, match=r"an observation: image /nowhere/a\.png: no such file"):
        sampled(tiny_vlms.build("qwen2_5_vl"), [["look"]], Missing())


def test_a_file_may_be_overwritten_and_an_image_drawn_on(tmp_path):
    """The policy has seen what there was when the environment answered."""
    path = tmp_path / "screen.png"

    class Screen(Environment):
        def __init__(self) -> None:
            self.canvas, self.turn = picture(0), 0

        def step(self, completion: str) -> Step:
            self.turn += 1
            picture(self.turn).save(path)
            self.canvas.paste(picture(5 + self.turn))
            both: list[Any] = [{"type": "image", "image": str(path)}, {"type": "image", "image": self.canvas}]
            return Step({"role": "user", "content": both})

    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, (group,) = sampled(vlm, [["look"]], Screen(), max_turns=3)
    for number, completion in enumerate(group.completions):
        files = [source.read() for each in completion.images for source in each.vision.sources]
        # One copy of the environment per conversation writes to the same file, in turns of the same number.
        want = [picture(1), picture(6), picture(2), picture(7)]
        assert [image.tobytes() for image in files] == [image.tobytes() for image in want]
        logprobs = plain_logprobs(vlm, encoder, group, number, want, SAMPLING.temperature).detach()
        mask = torch.tensor(completion.mask)
        assert torch.tensor(completion.logprobs)[mask].allclose(logprobs[mask], atol=1e-5)


def test_a_template_that_leaves_the_image_out_is_an_error():
    vlm = tiny_vlms.build("qwen2_5_vl")
    template = vlm.processor.tokenizer.chat_template or vlm.processor.chat_template
    plain = template.replace("{% if c['type'] == 'image' %}", "{% if c['type'] == 'image' and m['role'] == 'user' %}")
    plain = plain.replace("{{ c['text'] }}", "{{ c['text'] or '' }}")
    vlm.processor.chat_template = vlm.processor.tokenizer.chat_template = plain

    class Tool(Environment):
        def step(self, completion: str) -> Step:
            return Step({"role": "tool", "content": [{"type": "image", "image": picture(0)}]})

    with pytest.raises(ValueError, match=r"renders 1 image\(s\) with 0 image tokens instead of 3"):
        sampled(vlm, [["look"]], Tool())


def test_a_stop_token_is_not_repeated():
    """Where the template ends a message with the token that the policy's turn has ended with."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.processor.chat_template = tiny_vlms.QWEN_TEMPLATE.replace("{% endfor %}", "<eos>{% endfor %}", 2)
    vlm.processor.chat_template = vlm.processor.chat_template.replace("<eos>{% endfor %}", "{% endfor %}", 1)
    encoder = encoder_of(vlm)
    tokens = TurnTokens(encoder.tokenizer, [1], encoder)
    message: Any = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<|image_pad|> and <eos>"}]}
    behind_stop, other = (tokens.with_images([message], [ImageRef(picture(0))], last, {}, "here") for last in (1, 5))
    assert other[0] == [1, *behind_stop[0]]
    image = encoder.config.image_token_id
    for ids, images in (behind_stop, other):
        assert ids.count(1) == 1 + (ids is other[0])  # what the observation spells is text
        assert ids.count(image) == images.vision.num_image_tokens
        assert images.unexpanded_ids.count(image) == 1
        assert [token == image for token in ids] == [bool(t) for t in images.vision.token_types["mm_token_type_ids"]]


def test_the_limits_of_the_policys_images_hold():
    vlm = tiny_vlms.build("qwen2_5_vl")
    vlm.processor.image_processor.size["longest_edge"] = 4 * 28 * 28
    _, (group,) = sampled(vlm, [["look"]])
    assert all(each.vision.num_image_tokens <= 4 for c in group.completions for each in c.images)


@pytest.mark.slow
def test_the_engine_samples_the_same_without_shared_prompts():
    vlm = tiny_vlms.build("qwen2_5_vl")
    encoder, found = encoder_of(vlm), []
    for each in ("shared", "repeated"):
        engine = LocalEngine(max_rows=4)
        engine.connect(vlm.model, encoder.tokenizer, Sharding())
        engine.path = each
        source = source_of(vlm, encoder, engine, Shows(), max_turn_length=6)
        groups = source.sample([prompt_of(*parts) for parts in PROMPTS], 2, SAMPLING, [0, 1, 2])
        found.append([completion for group in groups for completion in group.completions])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.tensor(one.logprobs).allclose(torch.tensor(other.logprobs), atol=1e-5)
