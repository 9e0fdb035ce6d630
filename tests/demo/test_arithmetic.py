"""The quickstart's task, tokenizer, model and cache."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2ForCausalLM

from grpo_lightning.demo import arithmetic
from grpo_lightning.demo.arithmetic import (
    DemoModel,
    DemoRecipe,
    DemoTask,
    WarmUp,
    build_model,
    build_tokenizer,
    warm_up,
)
from grpo_lightning.demo.build import DemoFiles

TINY = DemoRecipe(
    task=DemoTask(num_digits=4, num_warm_up=20, num_train=10, num_heldout=5),
    model=DemoModel(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2),
    warm_up=WarmUp(batch_size=4, target_loss=100.0, max_worked_steps=2, num_short_steps=2),
)


def build(cache: Path, recipe: DemoRecipe = TINY, seed: int = 0) -> DemoFiles:
    return recipe.prepare(seed, cache, show_progress=False)


# --- the task


def test_truth_by_hand() -> None:
    # 3+1+2+0+4+2+1+5 = 18 = 3 * 6
    assert DemoTask().truth((3, 1, 2, 0, 4, 2, 1, 5)) == 0
    # 5+5+5+5+5+5+5+0 = 35 = 5 * 6 + 5
    assert DemoTask().truth((5, 5, 5, 5, 5, 5, 5, 0)) == 5


def test_texts_by_hand() -> None:
    task = DemoTask()
    digits = (3, 1, 2, 0, 4, 2, 1, 5)
    assert task.question(digits) == "31204215="
    # running sums: 3, 4, 6=0, 0, 4, 6=0, 1, 6=0
    assert task.worked_completion(digits) == "<think>34004010</think><answer>0</answer>"
    assert task.short_completion(digits) == "<answer>5</answer>"


def test_worked_is_always_right_and_short_seldom() -> None:
    task = DemoTask()
    heldout = task.split().heldout
    assert all(f"<answer>{task.truth(digits)}</answer>" in task.worked_completion(digits) for digits in heldout)
    right = sum(task.short_completion(digits) == f"<answer>{task.truth(digits)}</answer>" for digits in heldout)
    assert 0.05 < right / len(heldout) < 0.3  # one in six


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_sequence_is_in_two_sets(seed: int) -> None:
    task = DemoTask(seed=seed)
    split = task.split()
    sizes = [len(split.warm_up), len(split.train), len(split.heldout)]
    assert sizes == [task.num_warm_up, task.num_train, task.num_heldout]
    every = [*split.warm_up, *split.train, *split.heldout]
    assert len({task.question(digits) for digits in every}) == sum(sizes)
    assert {len(digits) for digits in every} == {task.num_digits}
    assert {digit for digits in every for digit in digits} == set(range(task.modulus))


def test_the_seed_decides_the_split() -> None:
    assert DemoTask(seed=1).split() == DemoTask(seed=1).split()
    assert DemoTask(seed=1).split() != DemoTask(seed=2).split()


def test_impossible_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="modulus must be 2 to 10"):
        DemoTask(modulus=11)
    with pytest.raises(ValueError, match="there are only 36"):
        DemoTask(num_digits=2)


# --- tokenizer and model


def test_tokenizer_round_trip() -> None:
    tokenizer = build_tokenizer()
    task = DemoTask()
    digits = (3, 1, 2, 0, 4, 2, 1, 5)
    for text in (task.question(digits) + task.worked_completion(digits), " a  b?\n\tC'~ n't .", ""):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.encode("1<eos><pad>")[1:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(tokenizer.encode("1<eos><pad>"), skip_special_tokens=True) == "1"
    assert tokenizer.padding_side == "left"


def test_model_knows_the_special_tokens() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, TINY.model)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.vocab_size == len(tokenizer)


def test_the_seed_decides_the_weights_and_leaves_the_generator_alone() -> None:
    tokenizer = build_tokenizer()
    before = torch.get_rng_state()
    first, again, other = (build_model(tokenizer, TINY.model, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# --- warm-up


def test_warm_up_loss_is_the_mean_over_completion_tokens() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, TINY.model)
    task = TINY.task
    corpus = arithmetic._Corpus(tokenizer, task, TINY.warm_up)
    loss = corpus.loss(model, num_short=3)

    rows = torch.randint(20, (4,), generator=torch.Generator().manual_seed(task.seed)).tolist()
    nll = []
    for place, row in enumerate(rows):
        digits = task.split().warm_up[row]
        completion = (task.short_completion(digits) if place < 3 else task.worked_completion(digits)) + "<eos>"
        prompt = tokenizer.encode(task.question(digits))
        ids = prompt + tokenizer.encode(completion)
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for position in range(len(prompt), len(ids)):
            nll.append(-logprobs[position - 1, ids[position]].item())
    torch.testing.assert_close(loss.item(), sum(nll) / len(nll), rtol=1e-5, atol=1e-5)


def test_warm_up_repeats() -> None:
    tokenizer = build_tokenizer()
    weights = []
    for _ in range(2):
        model = build_model(tokenizer, TINY.model)
        warm_up(model, tokenizer, TINY.task, TINY.warm_up, show_progress=False)
        weights.append(model.lm_head.weight)
    assert torch.equal(*weights)


def test_a_warm_up_that_fails_says_so() -> None:
    tokenizer = build_tokenizer()
    hopeless = replace(TINY.warm_up, target_loss=0.0)
    with pytest.raises(RuntimeError, match=r"not learned: their loss is .* after 2 steps"):
        warm_up(build_model(tokenizer, TINY.model), tokenizer, TINY.task, hopeless, show_progress=False)


def test_warm_up_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer()
    warm_up(build_model(tokenizer, TINY.model), tokenizer, TINY.task, TINY.warm_up)
    shown = capsys.readouterr().err
    assert "worked answers" in shown
    assert "short answers" in shown
    assert "loss=" in shown


# --- files and cache


def test_prepared_files_load(tmp_path: Path) -> None:
    files = build(tmp_path)
    assert len({path.stat().st_mode for path in files.folder.rglob("*") if path.is_file()}) == 1, "the umask's mode"
    model = Qwen2ForCausalLM.from_pretrained(files.model)
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    assert GenerationConfig.from_pretrained(files.model).eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.decode(tokenizer.encode("3 =<answer>")) == "3 =<answer>"
    split = TINY.task.split()
    for path, sequences in ((files.train, split.train), (files.heldout, split.heldout)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["prompt"] for row in rows] == [TINY.task.question(digits) for digits in sequences]
        assert [row["answer"] for row in rows] == [str(TINY.task.truth(digits)) for digits in sequences]


def test_second_call_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("built twice")

    monkeypatch.setattr(arithmetic, "warm_up", refuse)
    assert build(tmp_path) == first


def test_another_recipe_seed_or_version_gets_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = replace(TINY, warm_up=replace(TINY.warm_up, num_short_steps=3))
    smaller = replace(TINY, task=replace(TINY.task, num_heldout=4))
    models = {build(tmp_path).model, build(tmp_path, longer).model, build(tmp_path, smaller).model}
    models.add(build(tmp_path, seed=1).model)
    monkeypatch.setattr(DemoRecipe, "code", 2)
    models.add(build(tmp_path).model)
    assert len(models) == 5


def test_interrupted_build_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(arithmetic, "warm_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path)
    (tmp_path / "unfinished-killed" / "demo" / "model").mkdir(parents=True)  # what a killed process leaves
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished-killed"]
    assert (build(tmp_path).model / "model.safetensors").exists()


def test_two_processes_building_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = arithmetic.warm_up

    def overtaken(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(arithmetic, "warm_up", original)
        build(tmp_path)
        original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(arithmetic, "warm_up", overtaken)
    files = build(tmp_path)
    assert files.heldout.exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_environment_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "here"))
    files = TINY.prepare(show_progress=False)
    assert files.model.is_relative_to(tmp_path / "here")


def test_quickstart_puts_model_and_data_where_the_recipe_reads_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arithmetic.Quickstart, "recipe", staticmethod(lambda: TINY))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    threads = torch.get_num_threads()
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "theirs").touch()
    with pytest.raises(ValueError, match="holds other files"):
        arithmetic.Quickstart(str(tmp_path / "task"))()
    (tmp_path / "task" / "theirs").rename(tmp_path / "task" / "recipe.json")
    (tmp_path / "task" / "stale").touch()
    try:
        arithmetic.Quickstart(str(tmp_path / "task"), num_threads=1)()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [TINY.with_seed(3).key]
    assert {path.name for path in (tmp_path / "task").iterdir()} == {
        "model",
        "train.jsonl",
        "heldout.jsonl",
        "recipe.json",
    }
