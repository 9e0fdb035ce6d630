"""A reward model gives every completion the score that its sequence has alone, and is no part of what is trained."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_lightning.core.types import Completion, Group, Prompt, Turn
from grpo_lightning.rewards import ByMethod, Cosine, Reward, RewardModel, RewardSet, WeightedReward, reward
from grpo_lightning.rewards.reward_model import score_chunk
from tests.environments.games import Counted
from tests.helpers.module_runs import PROMPTS, SMALL, are_equal, fit, make_module, make_source, make_trainer, weights_of
from tests.helpers.tiny_models import EOS, PAD, tiny_classifier, tiny_model, tiny_tokenizer
from tests.marks import SLOW, few

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
PAIRS = [
    ("one plus one?", "2"),
    ("a much longer question, of many words", "and so is the answer to it, as it happens"),
    ("short", ""),
    ("ends in a pad token", "42<pad>"),
    ("ends in several eos tokens", "<eos><eos>"),
    ("one plus one?", "3"),
    ("one plus one?", "2"),
]
"""Prompts and completions; the last is the first once more."""


def as_chat(prompt: str, completion: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    return [{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}]


def save(folder: Path, model: Any, max_shard_size: str = "1GB", **changes: Any) -> str:
    """A folder with a model, and a tokenizer changed as said."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model whose config names no pad token."""
    return save(tmp_path_factory.mktemp("qwen2"), tiny_classifier(**SMALL))


def plain(folder: str, pairs: Any) -> list[float]:
    """The scores as transformers gives them: one sequence at a time, no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, completion in pairs:
        if isinstance(prompt, str):
            inputs = tokenizer(prompt + completion, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template([*prompt, *completion], return_tensors="pt", return_dict=True)
        with torch.no_grad():
            scores.append(model(**inputs).logits[0, 0].item())
    return scores


def scored(model: RewardModel, pairs: Any, **more: Any) -> list[float | None]:
    prompts, completions = zip(*pairs, strict=True)
    return model(prompts=list(prompts), completions=list(completions), **more)


def group(prompt: Any, *texts: str) -> Group:
    return Group(Prompt(prompt), [5], [Completion([5], [0.0], "stop", text) for text in texts])


# -------------------------------------------------------------------------------------------------------------- scores


@SLOW
@pytest.mark.parametrize(
    "family", ["qwen2", "gpt2", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "gemma3"))]
)
def test_scores_are_those_of_each_sequence_alone(tmp_path, family):
    for pad_of_model in (None, PAD, EOS, -1):
        folder = save(tmp_path / str(pad_of_model), tiny_classifier(family, pad_token_id=pad_of_model))
        for pairs in (PAIRS, [as_chat(*pair) for pair in PAIRS]):
            expected = plain(folder, pairs)
            assert len(set(expected)) > 4
            for batch_size in (1, 3, 16):
                found = scored(RewardModel(folder, batch_size=batch_size), pairs)
                assert found == pytest.approx(expected, abs=1e-5), (pad_of_model, batch_size, pairs[0])


def test_an_answer_that_the_prompt_starts_is_scored_as_one(folder):
    (prompt, completion) = as_chat("1 + 1", " 2")
    started = [*prompt, {"role": "assistant", "content": "It is"}]
    assert scored(RewardModel(folder), [(started, completion)]) == pytest.approx(
        plain(folder, [(prompt, [{"role": "assistant", "content": "It is 2"}])]), abs=1e-5
    )


ASKED = [{"role": "user", "content": "1 + 1?"}]
CALL = {"role": "assistant", "content": "<call>add</call>"}
CONVERSATIONS = [
    [CALL, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}],
    [CALL, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 2."}],
    [CALL, {"role": "tool", "content": "2"}],
]
"""The first two differ only in an observation; the last ends with one."""


def test_every_message_of_a_conversation_is_scored(folder):
    pairs = [(ASKED, conversation) for conversation in CONVERSATIONS]
    expected = plain(folder, pairs)
    assert len(set(expected)) == 3
    assert scored(RewardModel(folder), pairs) == pytest.approx(expected, abs=1e-5)
    started = [*ASKED, {"role": "assistant", "content": "Well: "}]
    first, *others = CONVERSATIONS[0]
    assert scored(RewardModel(folder), [(started, CONVERSATIONS[0])]) == pytest.approx(
        plain(folder, [(ASKED, [first | {"content": "Well: <call>add</call>"}, *others])]), abs=1e-5
    )


def test_the_turns_of_a_run_are_scored(folder):
    turns = [
        Turn(message["role"], message["content"], 0, 1, is_sampled=message["role"] == "assistant")
        for message in CONVERSATIONS[0]
    ]
    completion = Completion([5], [0.0], "stop", "text", turns=turns)
    found = RewardSet([RewardModel(folder)]).score([Group(Prompt(ASKED), [5], [completion])]).total.item()
    assert found == pytest.approx(plain(folder, [(ASKED, CONVERSATIONS[0])])[0], abs=1e-5)


def test_reasoning_that_the_template_removes_is_not_scored(tmp_path):
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    )
    model = RewardModel(save(tmp_path, tiny_classifier(**SMALL), chat_template=template))
    reasoned = CALL | {"content": f"<think>so</think>{CALL['content']}"}
    with_reasoning, without = ([first, *CONVERSATIONS[0][1:]] for first in (reasoned, CALL))
    assert model.tokens(ASKED, with_reasoning) == model.tokens(ASKED, without)
    assert CALL["content"] in model.tokenizer.decode(model.tokens(ASKED, without))
    assert model.tokens(ASKED, [reasoned]) != model.tokens(ASKED, [CALL])


@pytest.mark.parametrize(
    "changes", [{"padding_side": "left"}, {"pad_token": None}, {"pad_token": "x"}, {"pad_token": "<eos>"}], ids=str
)
def test_the_tokenizers_padding_does_not_matter(tmp_path, changes):
    folder = save(tmp_path, tiny_classifier(**SMALL), **changes)
    assert scored(RewardModel(folder), PAIRS) == pytest.approx(plain(folder, PAIRS), abs=1e-5)


def test_the_usual_padding_gives_other_scores(folder):
    """Eos as pad token, and a pad token that is not in the model's config, fail the test above."""
    expected, tokenizer = plain(folder, PAIRS), AutoTokenizer.from_pretrained(folder)
    texts = [prompt + completion for prompt, completion in PAIRS]

    def padded(pad: int, pad_of_config: int) -> list[float]:
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        model.config.pad_token_id, tokenizer.pad_token_id = pad_of_config, pad
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            return model(**inputs).logits[:, 0].tolist()

    free = tokenizer.convert_tokens_to_ids("~")
    assert padded(free, free) == pytest.approx(expected, abs=1e-5)
    for pad, pad_of_config, wrong in ((EOS, EOS, [4]), (free, PAD, [0, 2, 3, 4, 5, 6]), (PAD, PAD, [3])):
        off = (torch.tensor(padded(pad, pad_of_config)) - torch.tensor(expected)).abs() > 1e-4
        assert off.nonzero().flatten().tolist() == wrong


@SLOW
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text("abc <", min_size=1, max_size=30), min_size=1, max_size=9), size=st.integers(1, 5))
def test_neither_chunks_nor_order_change_a_score(folder, texts, size):
    pairs = [("say: ", text) for text in texts]
    one, other = RewardModel(folder, batch_size=64), RewardModel(folder, batch_size=size)
    expected = scored(one, pairs)
    assert scored(other, pairs) == pytest.approx(expected, abs=1e-5)
    assert scored(one, pairs[::-1]) == expected[::-1]  # bit for bit: the chunks are the same


def test_a_chunk_that_has_every_token_is_scored_row_by_row():
    model = tiny_classifier(vocab_size=8, **SMALL)
    chunk = [(0, 1, 2, 3), (4, 5, 6), (7,)]
    alone = [score_chunk(model, [tokens], torch.device("cpu"))[0] for tokens in chunk]
    assert score_chunk(model, chunk, torch.device("cpu")) == pytest.approx(alone, abs=1e-6)
    assert model.config.pad_token_id is None


def test_text_parts_are_read_and_images_are_refused(folder):
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "plus"}]}]
    answer = [{"role": "assistant", "content": "2"}]
    assert scored(RewardModel(folder), [(parts, answer)]) == scored(RewardModel(folder), [as_chat("one plus", "2")])
    parts[0]["content"].append({"type": "image"})
    with pytest.raises(ValueError, match="supports text only, but a message of the role user has parts of type image"):
        scored(RewardModel(folder), [(parts, answer)])
    with pytest.raises(ValueError, match="the prompt has 1 images"):
        RewardModel(folder).check_row({}, [None])


def test_too_long_is_not_scorable_and_said(folder, caplog):
    limit = AutoModelForSequenceClassification.from_pretrained(folder).config.max_position_embeddings
    pairs = [("a" * (limit - 1), "b"), ("a" * limit, "b"), ("", "")]
    logged = []
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        found = scored(RewardModel(folder), pairs, log_metric=lambda *metric: logged.append(metric))
    assert found == [pytest.approx(plain(folder, pairs[:1])[0], abs=1e-5), None, None]
    assert f"1 of 3 sequences exceed the model's limit of {limit} tokens (longest: {limit + 1})" in caplog.text
    assert logged == [("reward_model/too_long", pytest.approx(1 / 3))]


def test_a_tokenizer_of_another_model_is_found(folder):
    model = tiny_classifier(vocab_size=60, **SMALL)
    with pytest.raises(ValueError, match="returned token 87, but the model's vocabulary has 60"):
        scored(RewardModel(model, tiny_tokenizer()), [("uu", "")])


def test_mixed_precision_is_off(folder):
    expected = scored(RewardModel(folder), PAIRS)
    with torch.autocast("cpu", torch.bfloat16):
        assert scored(RewardModel(folder), PAIRS) == expected != plain(folder, PAIRS)


# ---------------------------------------------------------------------------------------------- before any weights load


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where weights are loaded."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", refuse)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_model("llama"), "must be a sequence-classification model, .*architecture LlamaForCausalLM"),
        (lambda: tiny_classifier(num_labels=2), "has 2 labels"),
        (lambda: tiny_model("mamba2"), r"must be a sequence-classification model, .*type mamba2"),
    ],
)
def test_other_models_are_refused(tmp_path, model, message):
    folder = save(tmp_path, model())
    for given_as in (RewardModel(folder), RewardModel(model(), tiny_tokenizer())):
        with pytest.raises(ValueError, match=f"'reward_model': RewardModel.model .*{message}"):
            RewardSet([given_as]).check(8)


def test_missing_weights_are_refused_where_they_load(tmp_path):
    model = tiny_classifier(**SMALL)
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    tiny_tokenizer().save_pretrained(tmp_path)
    RewardModel(tmp_path).check(8)
    with pytest.raises(ValueError, match=r"lacks 3 weights, first 'model.layers.1.mlp.down_proj.weight'"):
        RewardModel(tmp_path).connect(torch.device("cpu"))


def test_a_causal_model_under_another_name_is_refused_where_it_loads(tmp_path):
    """Its config says that it is a classifier, and its files have no head."""
    folder = save(tmp_path, tiny_model("llama"))
    path = tmp_path / "config.json"
    labels = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | labels))
    with pytest.raises(ValueError, match=r"lacks 1 weights, first 'score.weight'; they would be initialized randomly"):
        RewardModel(folder).connect(torch.device("cpu"))


@pytest.mark.usefixtures("no_weights")
def test_names_and_arguments_are_checked(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"RewardModel.model './nowhere': there is no folder"):
        RewardModel("./nowhere").check(8)
    tiny_classifier().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: set RewardModel.tokenizer"):
        RewardModel(tmp_path).check(8)
    RewardModel(tmp_path, folder).check(8)
    with pytest.raises(ValueError, match="max_length is 999, but the model takes 256 tokens"):
        RewardModel(folder, max_length=999).check(8)
    for arguments, message in [
        ({"model": 7}, "must be a hub name, a folder or a Transformers model, got 7"),
        ({"model": tiny_classifier()}, "needs its tokenizer"),
        ({"model": tiny_classifier(), "tokenizer": folder, "revision": "v2"}, r"revision \(v2\) and dtype"),
        ({"model": folder, "dtype": "int8"}, "dtype must be one of auto"),
        ({"model": folder, "device": "gpu"}, "device must be like 'cpu'"),
        ({"model": folder, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"model": folder, "max_length": -1}, "max_length must be at least 1, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            RewardModel(**arguments)


@pytest.mark.usefixtures("no_weights")
def test_chat_without_a_template_is_refused_before_the_run(tmp_path):
    rewards = [RewardModel(save(tmp_path, tiny_classifier(), chat_template=None))]
    chats = [Prompt([{"role": "user", "content": "1 + 1"}]), Prompt("text")]
    module = make_module(rewards=rewards)
    module.reward_set.check_rows(chats[1:])
    with pytest.raises(ValueError, match=r"1 rows cannot be scored(.|\n)*has no chat template: set RewardModel"):
        module.reward_set.check_rows(chats)


@pytest.mark.usefixtures("no_weights")
def test_roles_that_the_template_refuses_are_found_before_the_run(tmp_path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    rewards = RewardSet([RewardModel(save(tmp_path, tiny_classifier(), chat_template=template))])
    user = {"role": "user", "content": "1 + 1"}
    rewards.check_rows([Prompt([user])])
    with pytest.raises(
        ValueError, match="does not accept messages with the roles system, user, assistant: System role not supported"
    ):
        rewards.check_rows([Prompt([{"role": "system", "content": "s"}, user])])


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.usefixtures("no_weights")
def test_observations_that_the_template_refuses_are_found_before_the_run(tmp_path):
    model = RewardModel(save(tmp_path, tiny_classifier(), chat_template=ALTERNATING))
    chats = [Prompt(ASKED, index=7)]
    for rewards in (RewardSet([model]), RewardSet([ByMethod({"default": model})]), RewardSet([Cosine(accuracy=model)])):
        rewards.check_rows(chats)
        rewards.check_rows(chats, observation_role="user")
        rewards.check_rows([Prompt("text")], observation_role="tool")
        with pytest.raises(
            ValueError,
            match=r"1 rows cannot be scored(.|\n)*roles user, assistant, tool, assistant: Conversation roles must "
            r"alternate\. Set another `observation_role` in the environment, or set another `tokenizer.chat_template`",
        ):
            rewards.check_rows(chats, observation_role="tool")


@pytest.mark.usefixtures("no_weights")
def test_a_run_whose_observations_the_template_refuses_does_not_start(tmp_path):
    environment = Counted()
    environment.observation_role = "tool"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    model = RewardModel(save(tmp_path, tiny_classifier(), chat_template=ALTERNATING))
    module = make_module(rewards=[model], environment=environment, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="Set another `observation_role`"):
        fit(module, [Prompt(ASKED)] * 4, max_steps=1)


# ------------------------------------------------------------------------------------------------------------- in a run


class Place(Reward):
    """Notes where it is connected."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []

    def connect(self, device: torch.device) -> None:
        self.devices.append(device)

    def __call__(self, completions: Any) -> list[float]:
        assert len(self.devices) == 1
        return [float(len(text)) for text in completions]


@few(1)
@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_rewards_are_connected_with_the_policy(run):
    place, inner, inside = Place(), Place(), Place()
    rewards = [WeightedReward(place, name="a"), ByMethod({"default": inner}), Cosine(accuracy=inside)]
    module = make_module(rewards=rewards)
    trainer = make_trainer(max_steps=1)
    getattr(trainer, run)(module, make_source(module))
    module.configure_model()  # as Lightning does for every run
    assert place.devices == inner.devices == inside.devices == [torch.device("cpu")]


def test_inner_rewards_say_that_they_stay_in_the_process(folder):
    model = RewardModel(folder)
    for one in (model, WeightedReward(model), ByMethod({"default": model}), Cosine(accuracy=model)):
        assert one.in_process
    assert WeightedReward(Place()).in_process, "it connects"
    assert not ByMethod().in_process


@SLOW
@pytest.mark.parametrize("offload", [False, True])
def test_a_run_is_rewarded_by_it_and_trains_only_the_policy(folder, tmp_path, offload):
    model = RewardModel(folder, offload=offload)
    module = make_module(rewards=[model])
    trainer = fit(module, max_steps=3, default_root_dir=tmp_path)
    assert model._loaded is not None
    frozen = tiny_classifier(**SMALL).state_dict()
    assert all(torch.equal(weight, frozen[name]) for name, weight in model._loaded.state_dict().items())
    assert not any(weight.requires_grad for weight in model._loaded.parameters())
    assert not model._loaded.training
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    kept = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    ids = {id(weight) for weight in model._loaded.parameters()}
    assert not ids & {id(weight) for weight in module.parameters()}
    assert not [name for name in kept["state_dict"] if "score" in name]
    assert not are_equal(weights_of(module), dict(tiny_model("qwen2", **SMALL).named_parameters()))
    groups, scores = module.rollout.groups, module.rollout.scores
    pairs = [(group.prompt.content, completion.text) for group in groups for completion in group.completions]
    assert scores.by_reward["reward_model"].flatten().tolist() == pytest.approx(plain(folder, pairs), abs=1e-5)


def test_it_is_there_in_every_run(folder):
    module = make_module(rewards=[RewardModel(folder, offload=True)])
    logged = make_trainer().validate(module, make_source(module), verbose=False)[0]
    assert "val/reward_model" in logged
    records = make_trainer().predict(module, make_source(module, PROMPTS[:4]))[0]
    pairs = [(record["prompt"], record["completion"]) for record in records]
    assert [record["rewards"]["reward_model"] for record in records] == pytest.approx(plain(folder, pairs), abs=1e-5)


def test_copies_and_pickles_have_no_weights(folder):
    model = RewardModel(folder)
    size = len(pickle.dumps(model))
    expected = scored(model, PAIRS)
    assert len(pickle.dumps(model)) == size < 5000
    assert scored(pickle.loads(pickle.dumps(model)), PAIRS) == expected
    assert copy.deepcopy(model)._loaded is model._loaded


def test_it_has_a_short_name(folder):
    assert RewardSet([reward("reward_model", model=folder)]).score([group("1 + 1", "2")]).total.shape == (1, 1)
