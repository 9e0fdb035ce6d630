"""The judge, against a server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.rewards import ByMethod, LLMJudge, RewardSet, Scores, WeightedReward
from grpo_lightning.rewards import llm_judge as judge
from grpo_lightning.rewards.llm_judge import reply_text, score_in
from tests.marks import SLOW

pytest.importorskip("openai")

KEY = "GRPO_TEST_KEY"


class Server(ThreadingHTTPServer):
    """Accepts many connections at the same time."""

    request_queue_size = 64


class Endpoint:
    """A server of chat completions that replies as told, and notes what it is asked."""

    def __init__(self) -> None:
        self.reply: Callable[[str], Any] = lambda question: "Score: 1"
        """The text to reply to a question; an int is an HTTP status, bytes are a body sent as they are."""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._server = Server(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(endpoint) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint._lock:
                    endpoint.requests.append(body)
                    endpoint.keys.append(self.headers["Authorization"])
                    endpoint.at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint.at_once)
                reply = endpoint.reply(body["messages"][0]["content"])
                with endpoint._lock:
                    endpoint.at_once -= 1
                if isinstance(reply, str):
                    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
                    found = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                    reply = json.dumps(found).encode()
                with contextlib.suppress(ConnectionError):  # who asked has given up
                    self.send_response(200 if isinstance(reply, bytes) else reply)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(reply if isinstance(reply, bytes) else b"{}")

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in (KEY, "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    made = Endpoint()
    yield made
    made.close()


def judged(reward: LLMJudge, texts: list[str], solution: Any = "4", log: Any = None) -> list[float | None]:
    return asyncio.run(
        reward(prompts=["2 + 2?"] * len(texts), completions=texts, solution=[solution] * len(texts), log_metric=log)
    )


def graded(question: str) -> str:
    """The answer that a question asks to grade."""
    return question.rpartition("Answer to grade:\n")[2].partition("\n")[0]


def test_the_score_of_every_completion(endpoint: Endpoint):
    endpoint.reply = lambda question: f"Score: {graded(question)}"
    texts = ["<answer>1</answer>", "<answer>0</answer>", "<think>2</think><answer>0.25</answer>", r"\boxed{0.5}"]
    assert judged(LLMJudge("m", endpoint.url), texts) == [1, 0, 0.25, 0.5]
    assert len(endpoint.requests) == 4
    assert {request["model"] for request in endpoint.requests} == {"m"}
    assert {request["temperature"] for request in endpoint.requests} == {0}


def test_what_the_model_is_asked(endpoint: Endpoint):
    reward = LLMJudge("m", endpoint.url, prompt="{question} | {right} | {given} | {other}", answer_column="gold")
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    # What a completion says is text, also if it names a place.
    chat = [{"role": "assistant", "content": "<think>3</think><answer>{right} {question}</answer>"}]
    asyncio.run(reward(prompts=[prompt], completions=[chat], gold=["<answer>4</answer>"]))
    assert endpoint.requests[0]["messages"] == [
        {"role": "user", "content": "How many? | 4 | {right} {question} | {other}"}
    ]


def test_rows_without_an_answer_are_not_asked(endpoint: Endpoint):
    reward = LLMJudge("m", endpoint.url)
    assert judged(reward, ["a", "b"], None) == [None, None]
    found = asyncio.run(reward(prompts=["", ""], completions=["a", "b"], solution=["", "4"]))
    assert found == [None, 1]
    assert len(endpoint.requests) == 1


def test_without_the_ground_truth_in_the_prompt_every_row_is_asked(endpoint: Endpoint):
    pytest.importorskip("math_verify")
    reward = LLMJudge("m", endpoint.url, prompt="Is it polite? {given}")
    assert reward.required_columns == ()
    reward.check_row({"solution": ["no", "text"]}, [])
    assert asyncio.run(reward(prompts=["", ""], completions=["a", "b"])) == [1, 1]
    assert judged(reward, ["a", "b"], None) == judged(reward, ["a", "b"], ["no", "text"]) == [1, 1]
    rows = [group(["c"]), group(["d"], solution=None)]
    rewards = RewardSet([ByMethod({"llm": reward}, default="llm")])
    rewards.validate_prompts([row.prompt for row in rows[:1]])
    assert judged_early(rewards, rows, rows).total.tolist() == [[1], [1]]


def test_calls_run_together_up_to_the_limit(endpoint: Endpoint):
    def slowly(question: str) -> str:
        time.sleep(0.05)
        return "1"

    endpoint.reply = slowly
    assert judged(LLMJudge("m", endpoint.url, concurrency=3), ["a"] * 12) == [1] * 12
    assert 2 <= endpoint.most_at_once <= 3


def test_a_failed_call_is_not_scorable_and_said(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    endpoint.reply = lambda question: 500 if "bad" in question else "It does. Score: 1"
    logged = []
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        found = judged(
            LLMJudge("m", endpoint.url, max_retries=0), ["a", "bad 4", "4"], log=lambda *metric: logged.append(metric)
        )
    assert found == [1, None, 1]  # "bad 4" is no 0, and "4", which is the same text, is no 1 by itself
    assert "1 of 3 calls failed; their completions are not scorable. First error: InternalServerError" in caplog.text
    assert logged == [("llm_judge/failed", pytest.approx(1 / 3))]


def test_a_reply_without_a_score_is_not_scorable_and_said(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    replies = {"a": "Score: 1", "b": "I like it", "c": "Score: 10", "d": "", "e": b'{"choices": []}', "f": b'"hi"'}
    endpoint.reply = lambda question: replies[graded(question)]
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        assert judged(LLMJudge("m", endpoint.url), list(replies)) == [1, None, None, None, None, None]
    assert "5 of 6 replies have no score from 0 to 1" in caplog.text
    assert "'I like it'" in caplog.text


def test_no_score_at_all_is_an_error_unless_the_judge_has_given_scores_before(endpoint: Endpoint):
    """Otherwise, one prompt to which the judge never replies with a score could end a long run."""
    endpoint.reply = lambda question: 500 if "bad" in question else "I like it"
    reward = LLMJudge("m", endpoint.url, max_retries=0)
    for texts in (["a", "b"], ["a", "bad"]):
        with pytest.raises(RuntimeError, match=r"No reply of the judge 'm' has a score .* \"Score: x\".*: 'I like it'"):
            judged(reward, texts)
    assert judged(reward, ["a"], None) == [None]
    endpoint.reply = lambda question: "Score: 1" if graded(question) == "a" else "I like it"
    assert judged(reward, ["a", "b"]) == [1, None]
    assert judged(reward, ["b", "b"]) == [None, None]


def test_a_body_that_is_no_json_is_a_failed_call(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    endpoint.reply = lambda question: b"<html>" if "bad" in question else "1"
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        assert judged(LLMJudge("m", endpoint.url), ["a", "bad"]) == [1, None]
    assert "1 of 2 calls failed" in caplog.text


def test_it_tries_again(endpoint: Endpoint):
    endpoint.reply = lambda question: 503 if len(endpoint.requests) < 2 else "1"
    assert judged(LLMJudge("m", endpoint.url, max_retries=1), ["a"]) == [1]
    assert len(endpoint.requests) == 2


def test_a_slow_reply_is_given_up(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    release = threading.Event()

    def hang(question: str) -> str:
        if "bad" in question:
            release.wait(60)
        return "1"

    endpoint.reply = hang
    with caplog.at_level(logging.WARNING, "grpo_lightning"):
        found = judged(LLMJudge("m", endpoint.url, timeout_seconds=0.5, max_retries=0), ["a", "bad"])
    release.set()
    assert found == [1, None]
    assert "APITimeoutError" in caplog.text


def test_a_reply_that_never_ends_is_given_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The client's limit is for silence only: here a byte comes every 50 ms."""
    from openai.resources.chat.completions import AsyncCompletions

    async def drip(self: Any, **_: Any) -> None:
        while True:
            await asyncio.sleep(0.05)

    monkeypatch.setattr(AsyncCompletions, "create", drip)
    monkeypatch.setattr(judge, "LONGEST_PAUSE_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match=r"All 1 calls to the judge .* failed. First error: TimeoutError"):
        judged(LLMJudge("m", endpoint.url, timeout_seconds=0.1, max_retries=0), ["a"])


@pytest.mark.parametrize("status", [401, 404, 500])
def test_no_reply_at_all_is_an_error(endpoint: Endpoint, status: int):
    endpoint.reply = lambda question: status
    with pytest.raises(RuntimeError, match=rf"All 2 calls to the judge 'm' at {endpoint.url} failed. .*{status}"):
        judged(LLMJudge("m", endpoint.url, max_retries=0), ["a", "b"])
    endpoint.close()
    with pytest.raises(RuntimeError, match=r"All 2 calls to the judge .* failed. First error: APIConnectionError"):
        judged(LLMJudge("m", endpoint.url, max_retries=0), ["a", "b"])


def group(texts: list[str], **columns: Any) -> Group:
    return Group(Prompt("2 + 2?", columns=columns), [1], [Completion([1], [0.0], "stop", text) for text in texts])


def test_in_a_run_the_failure_policy_decides(endpoint: Endpoint):
    endpoint.reply = lambda question: 500 if "bad" in question else "1"
    reward = LLMJudge("m", endpoint.url, max_retries=0)
    scores = RewardSet([reward]).score([group(["a", "bad"], solution="4")])
    assert scores.by_reward["llm_judge"][0, 0] == 1
    assert scores.by_reward["llm_judge"][0, 1].isnan()
    assert scores.failures["llm_judge/not_scorable"] == 1
    assert scores.metrics == {"llm_judge/failed": 0.5}
    with pytest.raises(RuntimeError, match="'llm_judge' raised RuntimeError: All 2 calls to the judge 'm'"):
        RewardSet([reward]).score([group(["bad", "bad"], solution="4")])
    none = RewardSet([WeightedReward(reward, on_error="none")]).score([group(["bad", "bad"], solution="4")])
    assert none.total.isnan().all()
    assert none.failures["llm_judge/exception"] == 2


def test_it_is_a_method_of_rows(endpoint: Endpoint):
    pytest.importorskip("math_verify")
    endpoint.reply = lambda question: "0.5"
    rows = [
        group(["B"], solution="B", accu_reward_method="mcq"),
        group(["B"], solution="B", accu_reward_method="llm"),
    ]
    scores = RewardSet([ByMethod({"llm": LLMJudge("m", endpoint.url)})]).score(rows)
    assert scores.total.tolist() == [[1], [0.5]]


def test_the_key_comes_from_the_environment_when_it_is_needed(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    reward = LLMJudge("m", endpoint.url, api_key_env=KEY)
    judged(reward, ["a"])
    monkeypatch.setenv(KEY, "secret-1")
    judged(reward, ["a"])
    assert endpoint.keys == ["Bearer none", "Bearer secret-1"]
    assert b"secret-1" not in pickle.dumps(reward)


def test_a_missing_key_is_found_before_the_run(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    rewards = RewardSet([LLMJudge("m", api_key_env=KEY)])
    with pytest.raises(
        ValueError, match=f"'llm_judge': The environment variable {KEY} with the judge's API key is not set"
    ):
        rewards.check(64)
    monkeypatch.setenv(KEY, "secret-1")
    rewards.check(64)
    RewardSet([LLMJudge("m", endpoint.url)]).check(64)


def test_it_is_picklable_after_use(endpoint: Endpoint):
    reward = LLMJudge("m", endpoint.url)
    assert judged(reward, ["a"]) == judged(pickle.loads(pickle.dumps(reward)), ["a"]) == [1]


def test_scores_by_hand():
    for reply, score in [
        ("Score: 1", 1),
        ("score: 0.5.", 0.5),
        ("**Score:** 1", 1),
        ("**Score: 0**", 0),
        ("Score: 1\nIt says the same.", 1),
        ("Score: 0? No. Score: 1", 1),
        ("Reward: 0.85", 0.85),  # the form that ms-swift's genrm requests
        ("**Reward:** 1", 1),
        ("Score: 0\nReward: a good answer", 0),
        ("It has a high score: it is polite.\nReward: 0.85", 0.85),
        ("<think>Score: 0</think> 1.0", 1),
        ("<think>it is 7 or 8</think>\n1.0", 1),
        ("1", 1),
        (" 0.0\n", 0),
        ("'1.0'", 1),
        (".5", 0.5),
        ("Score: 1.5", None),
        ("Score: 10", None),
        ("Score: -1", None),
        ("Score: one", None),
        ("Score: 1/2", None),
        ("Score:", None),
        ("2", None),
        ("the answer 1 is right", None),
        ("yes", None),
        ("nan", None),
        ("1e0", None),
        ("", None),
    ]:
        assert score_in(reply) == score, reply


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": ""}, "model must be the name of a model, got ''"),
        ({"base_url": "localhost:8000"}, "base_url must be an http(s) address, got 'localhost:8000'"),
        ({"prompt": "Is it right?"}, "prompt must be a text with {given} where the answer goes"),
        ({"temperature": -1.0}, "temperature must be None or at least 0, got -1.0"),
        ({"timeout_seconds": 0}, "timeout_seconds must be positive, got 0"),
        ({"max_retries": -1}, "max_retries must be at least 0, got -1"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        LLMJudge(**{"model": "m"} | arguments)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"LLMJudge needs openai: pip install 'grpo-lightning\[judge\]'"):
        LLMJudge("m")


def test_replies_of_every_shape_have_a_text():
    for content, text in [("7", "7"), (None, ""), ([{"type": "text", "text": "7"}], "7"), (7, "7"), ([3], "")]:
        found = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content))])
        assert reply_text(found) == text, content
    for choices in ([], None, "abc", [SimpleNamespace()], [SimpleNamespace(message=None)], {"a": 1}):
        assert "choices" in reply_text(SimpleNamespace(choices=choices)), choices


# ------------------------------------------------------------------------------------------------- while others decode


def by_prompt(count: int, size: int, solution: str | None = "4") -> list[Group]:
    """Groups whose completions have texts of their own, except for the last two."""
    texts = [[f"{number}-{g}" for g in range(size - 1)] for number in range(count)]
    return [group([*own, own[-1]], solution=solution) for own in texts]


def judged_early(rewards: RewardSet, batch: list[Group], early: list[Group]) -> Scores:
    """Score a batch after early queries for some groups."""
    with rewards.early_calls([each.prompt for each in batch]):
        for each in early:
            assert rewards.early is not None
            rewards.early.start(each)
        return rewards.score(batch)


@pytest.mark.parametrize("method", [False, True])
def test_queries_of_a_group_start_while_others_are_sampled(endpoint: Endpoint, method: bool):
    if method:
        pytest.importorskip("math_verify")
    batch = by_prompt(3, 4)
    for each in batch:
        each.prompt.columns = {**each.prompt.columns, **({"accu_reward_method": "llm"} if method else {})}
    judge = LLMJudge("m", endpoint.url)
    rewards = RewardSet([ByMethod({"llm": judge}) if method else judge])
    with rewards.early_calls([each.prompt for each in batch]):
        for number, each in enumerate(batch[:2], 1):
            assert rewards.early is not None
            rewards.early.start(each)
            deadline = time.monotonic() + 30
            while len(endpoint.requests) < 4 * number and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(endpoint.requests) == 4 * number
        assert rewards.score(batch).total.tolist() == [[1] * 4] * 3
    assert len(endpoint.requests) == 12, "each completion is asked for once"


@SLOW
def test_scores_warnings_and_metrics_are_those_of_late_queries(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    def reply(question: str) -> Any:
        number, _, g = graded(question).partition("-")
        return 500 if number == "1" or g == "2" else "?" if g == "1" else f"0.{number}"

    endpoint.reply = reply
    batch = [*by_prompt(4, 5), *by_prompt(1, 5, None)]
    rewards = RewardSet([LLMJudge("m", endpoint.url, max_retries=0)])
    found = []
    for early in ([], batch, batch[2:0:-1], [*by_prompt(1, 3), batch[0]]):
        caplog.clear()
        scores = judged_early(rewards, batch, early)
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        found.append((scores.total.nan_to_num(-1).tolist(), scores.metrics, scores.failures, messages))
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][1] == {"llm_judge/failed": pytest.approx((5 + 3 * 2) / 20)}


@SLOW
def test_failed_queries_are_not_repeated_and_stop_the_run_only_if_all_of_the_batch_fail(endpoint: Endpoint):
    batch = by_prompt(2, 3)
    rewards = RewardSet([LLMJudge("m", endpoint.url, max_retries=1)])
    endpoint.reply = lambda question: 503 if graded(question).startswith("0") else "1"
    scores = judged_early(rewards, batch, batch)
    assert scores.by_reward["llm_judge"][0].isnan().all()
    assert len(endpoint.requests) == 2 * 3 + 3
    endpoint.reply = lambda question: 503
    with pytest.raises(RuntimeError, match=r"All 6 calls to the judge 'm' .* failed"):
        judged_early(rewards, batch, batch)
    assert len(endpoint.requests) == 2 * 3 + 3 + 2 * 6


def test_the_limit_of_concurrent_queries_holds_for_all_groups_together(endpoint: Endpoint):
    def slowly(question: str) -> str:
        time.sleep(0.03)
        return "1"

    endpoint.reply = slowly
    batch = by_prompt(6, 4)
    judged_early(RewardSet([LLMJudge("m", endpoint.url, concurrency=3)]), batch, batch[:5])
    assert 2 <= endpoint.most_at_once <= 3
    assert len(endpoint.requests) == 24


def test_queries_of_no_use_are_cancelled(endpoint: Endpoint):
    release = threading.Event()

    def hang(question: str) -> str:
        release.wait(20)
        return "1"

    endpoint.reply = hang
    judge = LLMJudge("m", endpoint.url)
    rewards, batch = RewardSet([judge]), by_prompt(2, 3)
    with contextlib.suppress(ZeroDivisionError), rewards.early_calls([each.prompt for each in batch]):
        assert rewards.early is not None
        rewards.early.start(batch[0])
        while not endpoint.requests:
            time.sleep(0.01)
        raise ZeroDivisionError
    release.set()
    deadline = time.monotonic() + 30
    while judge._queries is None or judge._queries.early:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    endpoint.reply = lambda question: "0.5"
    assert judged_early(rewards, batch, batch[1:]).total.tolist() == [[0.5] * 3] * 2


def test_the_queries_of_a_batch_share_a_client(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    """With a client per prompt, each would open connections of its own."""
    import openai

    made = []

    class Counted(openai.AsyncOpenAI):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(openai, "AsyncOpenAI", Counted)
    batch = by_prompt(5, 3)
    judged_early(RewardSet([LLMJudge("m", endpoint.url)]), batch, batch[:4])
    assert len(made) == 1
    deadline = time.monotonic() + 30
    while not made[0].is_closed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
