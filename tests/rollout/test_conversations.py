"""Conversations: token-exact, the same on every path of the engine, within their limits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_lightning.core.types import Completion, Prompt, Turn
from grpo_lightning.environments import Environment, EnvironmentRunner, MultiTurnFunction, Step, Tools, calculator
from grpo_lightning.environments.tools import ToolCall
from grpo_lightning.functional import turn_credits
from grpo_lightning.policy.encoder import Encoder
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.turns import TRUNCATED, TurnTokens
from grpo_lightning.rewards.scoring import written_messages
from grpo_lightning.rollout.conversations import Conversation, Conversations, ConversationSettings, Game
from grpo_lightning.rollout.groups import GroupSource
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.environments.games import ByPromptLength, Counted, Ends, Faulty, double, later
from tests.helpers.conversation_runs import HERE, PROMPTS, SAMPLING, sample
from tests.helpers.module_runs import ScriptedEngine
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer
from tests.helpers.tiny_vlms import qwen_tokenizer
from tests.marks import SLOW, few


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_model("qwen2")


def plain(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.finish_reason, completion.mask


def flat(rows: list[list[Completion]]) -> list[Completion]:
    return [completion for row in rows for completion in row]


class Over(Environment):
    """Ends every conversation after its first turn."""

    def step(self, completion: str) -> Step:
        return Step(done=True, reward=1.0)


@SLOW
def test_one_turn_is_a_completion_without_environment(policy):
    alone, played = sample(policy, None), sample(policy, Over())
    for one, other in zip(flat(alone), flat(played), strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs, one.entropies, one.text) == (other.logprobs, other.entropies, other.text)
        assert other.mask is None
    # A completion that reached the maximum length is truncated, whatever the environment says.
    assert [c.finish_reason for c in flat(alone)] == [c.finish_reason for c in flat(played)]


class Forgetful(LocalEngine):
    """Computes the whole conversation again for each turn."""

    def generate(self, *args: Any, turns: Any = None, **more: Any) -> Any:
        return super().generate(*args, **more)


class Plain:
    """An engine without any of the optional arguments."""

    def __init__(self) -> None:
        self.inner = LocalEngine()

    def connect(self, *args: Any) -> None:
        self.inner.connect(*args)

    def generate(self, prompts: Any, num_generations: int, sampling: Any, seeds: Any, progress: Any = None) -> Any:
        return self.inner.generate(prompts, num_generations, sampling, seeds, progress)


def ways() -> list[Any]:
    engine = LocalEngine()
    connect = engine.connect

    def connect_and_repeat(*args: Any) -> None:
        connect(*args)
        engine.path = "repeated"

    engine.connect = connect_and_repeat  # type: ignore[method-assign]
    generates = LocalEngine()
    connect_first = generates.connect

    def connect_and_generate(*args: Any) -> None:
        connect_first(*args)
        generates.path = "generate"

    generates.connect = connect_and_generate  # type: ignore[method-assign]
    return [
        pytest.param(Forgetful, id="computed again"),
        pytest.param(lambda: LocalEngine(max_rows=4), id="rows join"),
        pytest.param(lambda: engine, id="repeated"),
        pytest.param(lambda: generates, id="generate"),
        pytest.param(Plain, id="no optional arguments"),
    ]


@few(2, slow=True)
@pytest.mark.parametrize("make", ways())
def test_every_way_of_the_engine_plays_the_same(policy, make):
    limits = {"max_turn_length": 5}
    expected = sample(policy, ByPromptLength(), **limits)
    found = sample(policy, ByPromptLength(), engine=make(), **limits)
    for one, other in zip(flat(expected), flat(found), strict=True):
        assert plain(one) == plain(other)
        assert torch.tensor(one.logprobs).allclose(torch.tensor(other.logprobs), atol=1e-5)
        assert [(t.role, t.start, t.end, t.reward) for t in one.turns] == [
            (t.role, t.start, t.end, t.reward) for t in other.turns
        ]
    assert {sum(turn.is_sampled for turn in row[0].turns) for row in expected} == {1, 2, 3, 5}


def test_logprobs_are_those_of_the_whole_sequence(policy):
    """Against one forward pass over prompt and conversation."""
    for prompt, row in zip(PROMPTS, sample(policy, ByPromptLength(), max_turn_length=5), strict=True):
        check_logprobs(policy, prompt + "!", row)


def check_logprobs(policy: Any, prompt: str, completions: list[Completion], suppressed: Any = ()) -> None:
    """Check log-probs against one forward pass over prompt and conversation."""
    before = tiny_tokenizer()(prompt)["input_ids"]
    for completion in completions:
        ids = torch.tensor([before + completion.token_ids])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(before) - 1 : -1]
        logits[:, [*range(97, logits.shape[1]), *suppressed]] = -torch.inf  # ids without a token are never sampled
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        mask = torch.tensor(completion.mask or [True] * len(completion.token_ids))
        assert torch.tensor(completion.logprobs)[mask].allclose(expected[mask], atol=1e-5)
        assert not torch.tensor(completion.logprobs)[~mask].any()


def test_the_cache_lives_on_between_turns(policy):
    """Without it, every turn runs prompt and conversation again."""

    def tokens_run(engine: LocalEngine) -> int:
        count = 0
        run = engine.forward

        def forward(ids: Any, **more: Any) -> Any:
            nonlocal count
            count += ids.numel()
            return run(ids, **more)

        engine.forward = forward  # type: ignore[method-assign]
        sample(policy, Counted(num_turns=5), ["x" * 60], engine=engine, max_turn_length=4)
        return count

    kept, again = tokens_run(LocalEngine()), tokens_run(Forgetful())
    assert kept < again / 3, (kept, again)


@SLOW
def test_a_part_of_a_group_is_the_same_as_in_the_whole(policy):
    whole = sample(policy, ByPromptLength(), num_generations=4, max_turn_length=5)
    part = sample(policy, ByPromptLength(), num_generations=4, max_turn_length=5, part=range(1, 4, 2))
    assert [[plain(c) for c in row[1::2]] for row in whole] == [[plain(c) for c in row] for row in part]


def test_groups_are_reported_as_soon_as_they_have_ended(policy):
    reported: list[Any] = []
    groups = sample(policy, ByPromptLength(), on_group=reported.append, max_turn_length=5)
    assert [group.prompt.content for group in reported] == [f"{prompt}!" for prompt in PROMPTS]
    assert [[plain(c) for c in group.completions] for group in reported] == [[plain(c) for c in g] for g in groups]


@pytest.mark.parametrize(
    ("limits", "length", "reason", "num_turns"),
    [
        ({"max_turns": 2, "max_turn_length": 4}, 60, "turns", 2),
        ({"max_turn_length": 4}, 60, "stop", 3),
        ({"max_turn_length": 4}, 13, "length", 2),
        ({}, 9, "length", 1),
    ],
)
def test_limits_of_turns_and_tokens(policy, limits, length, reason, num_turns):
    never_stops = replace(SAMPLING, max_completion_length=length, suppress_tokens=[EOS])
    for completion in flat(sample(policy, Counted(num_turns=3), sampling=never_stops, **limits)):
        assert completion.finish_reason == reason
        assert sum(turn.is_sampled for turn in completion.turns) == num_turns
        assert len(completion.token_ids) <= length
        assert completion.is_truncated == (reason != "stop")


@pytest.mark.parametrize(
    ("limits", "length", "reward", "reason"),
    [({"max_turns": 2}, 60, 21.0, "turns"), ({}, 9, 10.5, "length"), ({}, 14, 21.0, "length")],
)
def test_the_environment_gives_a_reward_when_a_limit_ends_the_conversation(policy, limits, length, reward, reason):
    never_stops = replace(SAMPLING, max_completion_length=length, suppress_tokens=[EOS])
    for completion in flat(sample(policy, Ends(), sampling=never_stops, max_turn_length=8, **limits)):
        assert (completion.finish_reason, completion.environment_reward) == (reason, reward)
        assert [turn.reward for turn in completion.turns if not turn.is_sampled] in ([], [None], [None, None])


def test_an_environment_that_is_done_is_not_asked_again(policy):
    class Done(Ends):
        def step(self, completion: str) -> Step:
            return Step(done=True, reward=1.0)

    cut = replace(SAMPLING, max_completion_length=5, suppress_tokens=[EOS])
    assert {c.environment_reward for c in flat(sample(policy, Done(), sampling=cut))} == {1.0}


def test_on_error_says_what_happens_to_an_end_that_fails(policy):
    def rows(**settings: Any) -> list[Completion]:
        return flat(sample(policy, Ends("raise"), ["p"], max_turn_length=3, max_turns=1, **settings))

    with pytest.raises(RuntimeError, match=r"Environment 'Ends' raised KeyError: 'gone'.* turn 1\)"):
        rows()
    assert [(c.ending.is_scorable, c.ending.failure, c.finish_reason) for c in rows(on_error="none")] == [
        (False, "exception", "turns")
    ] * 3
    assert [c.environment_reward for c in rows(on_error="value", error_value=-1.0)] == [-1.0] * 3


def test_observations_are_cut_and_counted(policy):
    (row,) = sample(policy, Faulty("megabytes"), ["p"], max_turn_length=3, max_observation_length=8, max_turns=3)
    for completion in row:
        long = completion.turns[3]
        assert long.text == "x" * 8 + " ... (truncated)"
        assert long.end - long.start == len(long.text)
        assert completion.ending.metrics["truncated_observations"] == 1


class Several(Environment):
    """Returns messages whose texts have 6, 6 and 0 characters, and a name."""

    observation_role = "tool"

    def step(self, completion: str) -> list[dict[str, str]]:
        return [{"role": "tool", "content": text, "name": "f"} for text in ("x" * 6, "y" * 6, "")]


def test_the_texts_of_an_observation_are_cut_to_the_limit_together(policy):
    (row,) = sample(policy, Several(), ["p"], max_turn_length=3, max_observation_length=8, max_turns=2)
    for completion in row:
        assert [turn.text for turn in completion.turns[1:4]] == ["x" * 6, "yy ... (truncated)", ""]
        assert completion.ending.metrics["truncated_observations"] == 1


@pytest.mark.parametrize(("limits", "count"), [({"max_turns": 2}, 5), ({"max_turns": 2, "length": 15}, 1)])
def test_rewards_do_not_get_an_observation_that_the_policy_has_not_seen(limits, count):
    completion = play_turns(Several(), tiny_tokenizer(), "ab", **limits)
    messages = written_messages(completion)
    assert len(completion.turns) == count + 3  # in the logs
    tools = [{"role": "tool", "content": text, "name": "f"} for text in ("x" * 6, "y" * 6, "")]
    of_policy = {"role": "assistant", "content": "ab"}
    assert messages == [of_policy, *tools, of_policy][:count]


def test_a_continuation_that_the_policy_has_not_seen_is_no_part_of_its_message():
    """The policy wrote `a>b` with the token `>b`, and the environment keeps `a>`."""
    completion = play_turns(Cuts(2), tokenizer_with(">b"), "a>bc", length=8)
    assert (completion.text, completion.finish_reason) == ("a>", "length")
    assert [(turn.text, turn.end - turn.start) for turn in completion.turns] == [("a", 1), (">", 1), ("[more]", 0)]
    assert written_messages(completion) == [{"role": "assistant", "content": "a>"}]


class Continue(Environment):
    """Goes on behind the first two characters of each turn."""

    def step(self, completion: str) -> Step:
        return Step("->", keep=2)


def test_a_turn_can_be_continued(policy):
    sampling = replace(SAMPLING, suppress_tokens=[EOS])
    (row,) = sample(policy, Continue(), ["p"], sampling=sampling, max_turn_length=5, max_turns=3)
    for completion in row:
        assert [turn.end - turn.start for turn in completion.turns] == [2, 2, 2, 2, 2]
        assert [turn.role for turn in completion.turns] == ["assistant", "", "assistant", "", "assistant"]
        assert completion.text[2:4] == completion.text[6:8] == "->"
        assert completion.mask == [True, True, False, False] * 2 + [True] * 2


class Cuts(Environment):
    """Cuts every turn, and continues it if it is not done."""

    def __init__(self, keep: int, *, done: bool = False, text: str = "[more]") -> None:
        self.keep, self.done, self.text = keep, done, text

    def step(self, completion: str) -> Step:
        return Step(self.text, keep=self.keep, done=self.done)


def tokenizer_with(token: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with one more token, whose id is 97."""
    inner = Tokenizer(models.WordLevel(tiny_tokenizer().get_vocab() | {token: 97}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(rf"<eos>|<pad>|{token}|[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def play_turns(environment: Environment, tokenizer: Any, turn: str, length: int = 60, **limits: Any) -> Completion:
    """A conversation in which every turn of the policy is the same."""
    conversations = Conversations(EnvironmentRunner(environment, HERE, 100), ConversationSettings(**limits))
    conversations.connect(TurnTokens(tokenizer, [EOS]))
    engine = ScriptedEngine([[*tokenizer(turn, add_special_tokens=False)["input_ids"], EOS]])
    engine.connect(None, tokenizer, None)
    source = GroupSource(engine, Encoder(tokenizer), Sharding(), 0, conversations)  # type: ignore[arg-type]
    sampling = replace(SAMPLING, max_completion_length=length)
    return source.sample([Prompt("p")], 1, sampling, [0])[0].completions[0]


def test_a_token_across_the_cut_is_given_back_as_text():
    """The policy wrote `a>b` with the token `>b`, and the environment keeps `a>`."""
    completion = play_turns(Cuts(2), tokenizer_with(">b"), "a>bc", max_turns=2)
    assert 97 not in completion.token_ids
    assert completion.text == "a>[more]a>"
    assert [(turn.role, turn.text) for turn in completion.turns] == [
        *(("assistant", "a"), ("", ">[more]")),
        *(("assistant", "a"), ("", ">")),
    ]
    assert completion.mask == [True] + [False] * 7 + [True, False]


@given(st.text("ab\N{EURO SIGN}\N{GRINNING FACE}", max_size=12), st.integers(0, 12))
def test_a_cut_keeps_all_tokens_before_it(text, characters):
    """One token per byte: every character before the cut keeps all its tokens."""
    tokenizer = qwen_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    each = Conversation(0, 0, None)  # type: ignore[arg-type]
    each.token_ids, each.logprobs, each.mask = list(ids), [0.0] * len(ids), [True] * len(ids)
    turn = Turn("assistant", text, 0, len(ids), is_sampled=True)
    each.turns = [turn]
    given_back = Game._keep(SimpleNamespace(tokens=TurnTokens(tokenizer, [1])), each, turn, characters)
    assert given_back == ""
    assert len(each.token_ids) == len(text[:characters].encode())


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like those of Llama 2 and Gemma: each byte of an unknown character is a token."""
    names = ["<eos>", *(f"<0x{i:02X}>" for i in range(256)), *"abdneo k"]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize("text", ["ok " + "\N{GRINNING FACE}" * 12 + " done", "\N{KHMER LETTER KA}" * 20])
def test_a_cut_between_characters_of_several_bytes(text):
    """While a character is incomplete, the decoder returns one replacement character per byte."""
    tokenizer = byte_fallback_tokenizer()
    for characters in range(len(text)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        each = Conversation(0, 0, None)  # type: ignore[arg-type]
        each.token_ids, each.logprobs, each.mask = list(ids), [0.0] * len(ids), [True] * len(ids)
        each.turns = [Turn("assistant", text, 0, len(ids), is_sampled=True)]
        game: Any = SimpleNamespace(tokens=TurnTokens(tokenizer, [0]))
        assert Game._keep(game, each, each.turns[0], characters) == ""
        assert each.token_ids == tokenizer(text[:characters], add_special_tokens=False)["input_ids"]


def test_a_cut_of_a_long_turn_decodes_a_few_times(monkeypatch):
    tokenizer, counts = qwen_tokenizer(), []
    ids = tokenizer("abc " * 500, add_special_tokens=False)["input_ids"]
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: counts.append(len(ids)) or decode(ids, **options))
    each = Conversation(0, 0, None)  # type: ignore[arg-type]
    each.token_ids, each.logprobs, each.mask = list(ids), [0.0] * len(ids), [True] * len(ids)
    each.turns = [Turn("assistant", "abc " * 500, 0, len(ids), is_sampled=True)]
    Game._keep(SimpleNamespace(tokens=TurnTokens(tokenizer, [1])), each, each.turns[0], 100)
    assert len(each.token_ids) == 100
    assert len(counts) < 30


def test_characters_that_are_given_back_are_no_part_of_the_observations_limit():
    completion = play_turns(Cuts(2), tokenizer_with(">b"), "a>bc", max_turns=2, max_observation_length=6)
    assert completion.text.startswith("a>[more]a")


def repeats_the_reason(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A multi-turn function."""
    for each in inputs:
        each["messages"].append({"role": "user", "content": each["finish_reason"]})
        each["finished"] = False
    return inputs


@pytest.mark.parametrize(("max_turn_length", "reason"), [(2, "length"), (3, "stop")])
def test_a_multi_turn_function_gets_the_reason_why_the_turn_ended(max_turn_length, reason):
    environment = MultiTurnFunction(repeats_the_reason)
    completion = play_turns(environment, tiny_tokenizer(), "ab", max_turns=2, max_turn_length=max_turn_length)
    assert completion.turns[1].text == reason


@pytest.mark.parametrize(("done", "max_turns", "reason"), [(True, 8, "stop"), (False, 1, "turns")])
@pytest.mark.parametrize(("token", "mask"), [("xx", None), ("kj", [True, False])])
def test_the_last_turn_is_cut_too(done, max_turns, reason, token, mask):
    completion = play_turns(Cuts(2, done=done), tokenizer_with(token), "okjunk", max_turns=max_turns)
    assert (completion.text, completion.finish_reason, completion.mask) == ("ok", reason, mask)
    assert "".join(message["content"] for message in written_messages(completion)) == "ok"


def test_a_turn_that_reached_the_maximum_length_is_cut_too():
    completion = play_turns(Cuts(2), tokenizer_with("kj"), "okjunk", length=5)
    assert (completion.text, completion.finish_reason) == ("ok", "length")


def test_a_turn_without_a_call_that_was_cut_is_truncated():
    """What `Tools` take for the answer is the beginning of a longer turn. Games know when they are done."""
    for environment, reason in ((Tools([double]), "length"), (Over(), "stop")):
        assert play_turns(environment, tiny_tokenizer(), "It is 6", max_turn_length=4).finish_reason == reason
        assert play_turns(environment, tiny_tokenizer(), "It is 6", max_turn_length=9).finish_reason == "stop"


class Submits(Tools):
    """A call of `double` ends the conversation."""

    def step(self, completion: str) -> Step:
        called = [call.name for call in self.read_calls(completion)]
        return Step(done=True, reward=1.0) if "double" in called else super().step(completion)


def test_a_call_that_ends_the_conversation_is_not_truncated():
    completion = play_turns(Submits([double]), tiny_tokenizer(), "[double(number=3)]xyz", max_turn_length=18)
    assert (completion.finish_reason, completion.environment_reward) == ("stop", 1.0)


def test_an_environment_that_reads_calls_in_its_own_step_is_not_refused():
    check_template(CALLS_AS.replace("CALL", GEMMA_CALL), Submits([double]))


def test_characters_that_are_given_back_stay_if_the_conversation_ends():
    """The observation does not fit, and the policy keeps `a>`."""
    completion = play_turns(Cuts(2), tokenizer_with(">b"), "a>bc", max_turns=2, length=8)
    assert (completion.text, completion.finish_reason, completion.mask) == ("a>", "length", [True, False])


class Interrupt(Environment):
    """Goes on behind the first two characters of each turn, with more tokens than it drops."""

    def step(self, completion: str) -> Step:
        return Step("-> wait, ", keep=2)


def test_what_was_computed_of_dropped_tokens_is_not_used(policy):
    sampling = replace(SAMPLING, suppress_tokens=[EOS])
    for prompt in ("p", "a longer prompt"):
        limits = {"sampling": sampling, "max_turn_length": 5, "max_turns": 3}
        (row,) = sample(policy, Interrupt(), [prompt], **limits)
        assert [turn.end - turn.start for turn in row[0].turns] == [2, 9, 2, 9, 2]
        assert [plain(c) for c in row] == [
            plain(c) for c in sample(policy, Interrupt(), [prompt], engine=Forgetful(), **limits)[0]
        ]
        check_logprobs(policy, prompt, row, suppressed=[EOS])


class RecordedEngine(ScriptedEngine):
    """Remembers with which lengths it was called."""

    samples_in_background = True
    """Can sample in a background thread. Called in the main thread, it is collective."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.lengths: list[int] = []

    def generate(self, prompts: Any, num_generations: int, sampling: Any, *args: Any, **more: Any) -> Any:
        self.lengths.append(sampling.max_completion_length)
        return super().generate(prompts, num_generations, sampling, *args, **more)


def test_a_rank_without_prompts_makes_the_calls_of_the_others(monkeypatch):
    """It has no conversation, and calls the engine with the others' length as long as one of them has."""
    engine, tokenizer = RecordedEngine([]), tiny_tokenizer()
    engine.connect(None, tokenizer, None)
    conversations = Conversations(EnvironmentRunner(Counted(), HERE, 100), ConversationSettings(max_turn_length=7))
    conversations.connect(TurnTokens(tokenizer, [EOS]))
    others = iter([True, True, False])
    monkeypatch.setattr("grpo_lightning.core.ranks.world_size", lambda: 2)
    monkeypatch.setattr("grpo_lightning.core.ranks.any_over_ranks", lambda own: next(others))
    assert conversations.play(engine, [], [], [], 2, SAMPLING, []) == []
    assert engine.lengths[0] == 7
    assert len(engine.lengths) == 2
    with pytest.raises(StopIteration):
        next(others)


def test_what_is_decoded_and_encoded_anew_has_other_tokens():
    """The tokenizer has a token for `ab`, and the policy wrote `a` and `b`: its tokens stay what they are."""
    tokenizer = tokenizer_with("ab")
    a, b = tokenizer.convert_ids_to_tokens([67, 68]), [67, 68, EOS]
    assert a == ["a", "b"]
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [97]
    conversations = Conversations(EnvironmentRunner(Counted(num_turns=2), HERE, 100), ConversationSettings())
    conversations.connect(TurnTokens(tokenizer, [EOS]))
    engine = ScriptedEngine([b])
    engine.connect(None, tokenizer, None)
    source = GroupSource(engine, Encoder(tokenizer), Sharding(), 0, conversations)  # type: ignore[arg-type]
    (group,) = source.sample([Prompt("p")], 1, SAMPLING, [0])
    assert group.completions[0].token_ids == [*b, *tokenizer(" 1:", add_special_tokens=False)["input_ids"], *b]
    assert group.completions[0].mask == [True] * 3 + [False] * 3 + [True] * 3
    assert group.completions[0].turns[0].text == "ab"


@pytest.mark.parametrize("way", ["raise", "wrong"])
def test_on_error_says_what_happens_to_a_conversation(policy, way, caplog):
    with pytest.raises(RuntimeError, match=r"Environment 'Faulty' .* turn 2\)\. Fix it, or set model\.conversation"):
        sample(policy, Faulty(way), ["p"], max_turn_length=3)
    (row,) = sample(policy, Faulty(way), ["p"], max_turn_length=3, on_error="none")
    assert [(c.ending.is_scorable, c.ending.failure) for c in row] == [
        (False, "exception" if way == "raise" else "invalid_value")
    ] * 3
    assert caplog.text.count("The conversation ends (model.conversation.on_error: none)") == 1
    (row,) = sample(policy, Faulty(way), ["p"], max_turn_length=3, on_error="value", error_value=-1.0)
    assert [(c.ending.is_scorable, c.environment_reward, c.finish_reason) for c in row] == [(True, -1.0, "stop")] * 3


class Answers(Faulty):
    """Answers failures."""

    def on_failure(self, kind: str, problem: str) -> Step:
        return Step(f"failed: {kind}")


def test_an_answered_failure_is_counted_and_the_conversation_continues(policy):
    for completion in flat(sample(policy, Answers("raise"), ["p"], max_turn_length=3, max_turns=3)):
        assert (completion.ending.failure, completion.ending.is_scorable) == ("exception", True)
        assert [turn.text for turn in completion.turns[1::2]] == ["on", "failed: exception", "on"]


def test_settings_are_checked():
    for wrong, message in [
        ({"max_turns": 0}, "conversation.max_turns must be at least 1, got 0"),
        ({"on_error": "skip"}, "conversation.on_error must be raise, none or value, got 'skip'"),
        ({"error_value": 1.0}, "conversation.error_value must be 0 unless on_error is value, got 1.0"),
        ({"turn_discount": 2.0}, "conversation.turn_discount must be from 0 to 1, got 2.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ConversationSettings(**wrong)


CALLS_AS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or () %}CALL{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that describes tools, and writes a call in the way that replaces `CALL`."""


def check_template(template: str, environment: Environment) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    Conversations(EnvironmentRunner(environment, HERE, 100), ConversationSettings()).check(tokenizer, is_chat=True)


GEMMA_CALL = "<|tool_call>call:{{ call.function.name }}<tool_call|>"


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{{ call.function | tojson }}</tool_call>",
        "[{{ call.function.name }}(expression={{ call.function.arguments.expression | tojson }})]",
        "",  # the template does not render calls, so that nothing is known about them
        "{{ 'calls: ' + call.function.arguments }}",  # an error: this template wants the arguments as text
    ],
)
def test_templates_whose_calls_are_read_or_unknown(call):
    check_template(CALLS_AS.replace("CALL", call), Tools([calculator]))


@pytest.mark.parametrize("tool", [double, calculator, later])
def test_a_template_whose_calls_are_not_read_is_refused(tool):
    with pytest.raises(ValueError, match=r"writes a call as '<\|tool_call>call:.*`read_calls` for this format"):
        check_template(CALLS_AS.replace("CALL", GEMMA_CALL), Tools([tool]))
    json_call = CALLS_AS.replace("CALL", "<tool_call>{{ call.function | tojson }}</tool_call>")
    with pytest.raises(ValueError, match="Set the argument `format` to auto, or use"):
        check_template(json_call, Tools([tool], format="python"))


class GemmaTools(Tools):
    """Reads the calls of another format."""

    def read_calls(self, completion: str) -> list[ToolCall]:
        found = re.findall(r"<\|tool_call>call:(\w+){(.*)}<tool_call\|>", completion)
        return [ToolCall(name, {"expression": expression}) for name, expression in found]


class OwnTools(Over):
    """Describes tools, and reads their calls itself."""

    tools = (double,)


def test_an_environment_that_reads_the_calls_itself_is_not_refused():
    call = "<|tool_call>call:{{ call.function.name }}{{ '{' }}{{ call.function.arguments.expression }}}<tool_call|>"
    template = CALLS_AS.replace("CALL", call)
    check_template(template, GemmaTools([calculator]))
    check_template(template, OwnTools())
    step = GemmaTools([calculator]).step("<|tool_call>call:calculator{3+4}<tool_call|>")
    assert [message["content"] for message in step.observation] == ["7"]  # type: ignore[union-attr]


READ = ["lfm2_2_5", "llama3_1", "llama3_2", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_6", "qwen3_instruct_2507"]


def test_calls_of_real_templates():
    """The chat templates are those that TRL brings."""
    folder = Path(pytest.importorskip("trl", minversion="1.16").__file__).parent / "chat_templates"
    for name in [*READ, "qwen3_5_think", "qwen3_5_nothink", "qwen3_vl", "lfm2", "lfm2_2_5_vl", "glm4moe"]:
        check_template((folder / f"{name}.jinja").read_text(), Tools([double, calculator]))
        check_template((folder / f"{name}.jinja").read_text(), Tools([calculator]))
    with pytest.raises(ValueError, match="`read_calls` for this format"):
        check_template((folder / "gemma4.jinja").read_text(), Tools([double]))


def test_a_first_observation_ends_the_prompt(policy):
    class Says(Over):
        def reset(self, prompt: Any) -> str:
            return "begin"

    tokenizer = tiny_tokenizer()
    conversations = Conversations(EnvironmentRunner(Says(), HERE, 100), ConversationSettings())
    conversations.connect(TurnTokens(tokenizer, [EOS]))
    chat = [{"role": "user", "content": "hello"}]
    prompts, states = conversations.begin([Prompt("text:"), Prompt(chat), Prompt([])], [1, 2, 3])
    assert [prompt.content for prompt in prompts] == [
        "text:begin",
        [{"role": "user", "content": "hello\n\nbegin"}],
        [{"role": "user", "content": "begin"}],
    ]
    assert len(states) == 3


def test_a_first_observation_has_the_limits_of_the_others():
    class Says(Over):
        def reset(self, prompt: Any, answer: Any) -> Any:
            return answer

    tokenizer = tiny_tokenizer()
    conversations = Conversations(EnvironmentRunner(Says(), HERE, 100), ConversationSettings(max_observation_length=8))
    conversations.connect(TurnTokens(tokenizer, [EOS]))
    chat = [{"role": "user", "content": "hello"}]
    answers: list[Any] = ["x" * 300, "ab<eos>cd", [{"role": "system", "content": "y" * 300}]]
    prompts = [
        Prompt(content, columns={"answer": each}) for content, each in zip(["t:", chat, chat], answers, strict=True)
    ]
    text, escaped, messages = (prompt.content for prompt in conversations.begin(prompts, [1, 2, 3])[0])
    assert text == "t:" + "x" * 8 + TRUNCATED
    last = escaped[-1]["content"].partition("hello\n\n")[2]
    assert "<eos>" not in last
    assert last.startswith("ab<")
    assert messages[-1] == {"role": "system", "content": "y" * 8 + TRUNCATED}


# -------------------------------------------------------------------------------------------------------------- credit


def test_credits_by_hand():
    # Returns of the first turn: 3, 1; of the second: 2, 0. Both have mean 2 or 1 and std sqrt(2).
    credits = turn_credits([[1.0, 2.0], [1.0, 0.0]], eps=0.0)
    half = 0.5**0.5
    assert torch.tensor(credits).allclose(torch.tensor([[half, half], [-half, -half]]))
    # Only one conversation has a second turn.
    (first, second), (other,) = turn_credits([[0.0, 5.0], [1.0]], discount=0.0, eps=0.0)
    assert (first, second, other) == pytest.approx((-half, 0.0, half))
    assert turn_credits([[1.0], [1.0]]) == [[0.0], [0.0]]
    assert turn_credits([[], []]) == [[], []]


@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=4), min_size=1, max_size=5),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_credits_of_a_turn_sum_to_zero(rewards, discount):
    credits = turn_credits(rewards, discount=discount)
    assert [len(row) for row in credits] == [len(row) for row in rewards]
    for turn in range(max(map(len, rewards))):
        assert abs(sum(row[turn] for row in credits if len(row) > turn)) < 1e-6
