"""The grounding quickstart's tokenizer, processor, model, warm-up and cache."""

import importlib.util
import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_lightning.demo import grounding
from grpo_lightning.demo.grounding import (
    NOTHING,
    GroundingModel,
    GroundingQuickstart,
    GroundingRecipe,
    GroundingWarmUp,
    _Corpus,
    build_model,
    build_processor,
    build_tokenizer,
    labels_of,
    learning_rate_share,
    multiplied_patches,
    patches_of,
    prompt_ids,
    teach_tower,
    warm_up,
    word_embeddings,
)
from grpo_lightning.demo.grounding_scenes import COLORS, SceneTask, Thing, namings
from tests.marks import SLOW

TINY = GroundingRecipe(
    task=SceneTask(num_cells=4, sides=(1, 2), num_train=3, num_heldout=2),
    model=GroundingModel(hidden_size=16, num_layers=1, num_vision_layers=1, num_heads=1),
    warm_up=GroundingWarmUp(
        batch_size=4, num_tower_images=4, num_tower_steps=2, num_images=3, num_worked_steps=2, num_lazy_steps=2
    ),
)


def built(recipe: GroundingRecipe = TINY) -> tuple[Any, Any]:
    """(A model, its processor), before the warm-up."""
    processor = build_processor(recipe.task, build_tokenizer(recipe.task))
    return build_model(recipe.task, processor.tokenizer, recipe.model), processor


def scenes(number: int, task: SceneTask = TINY.task) -> list[Any]:
    return list(itertools.islice(task.scenes("test"), number))


# --- tokenizer and processor


def test_every_word_and_number_is_a_token() -> None:
    task = SceneTask()
    tokenizer = build_tokenizer(task)
    for thing, place in itertools.product((scene[0] for scene in scenes(20, task)), range(3)):
        naming = namings(thing)[place]
        text = task.worked_completion(thing, naming)
        ids = tokenizer.encode(text)
        # <think> word number, number </think> <answer> [ number, number, number, number ] </answer>
        assert len(ids) == 6 + 1 + 9 + 1
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.encode(task.question(thing, naming))) == 5
    assert tokenizer.decode(tokenizer.encode("What is 1234567? ~")) == "What is 1234567? ~"


def test_prompts_are_those_of_the_processor() -> None:
    _, processor = built()
    (scene,) = scenes(1)
    question = TINY.task.question(scene[0])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(messages, tokenize=False)
    encoded = processor(text=[text], images=[TINY.task.picture(scene)], return_tensors="pt")
    assert encoded["input_ids"].tolist() == [prompt_ids(question, processor.tokenizer, TINY.task)]
    assert encoded["image_grid_thw"].tolist() == [list(grounding.patch_grid(TINY.task))]
    torch.testing.assert_close(patches_of([scene], TINY.task, processor)[0], encoded["pixel_values"])


# --- warm-up


def test_labels_by_hand() -> None:
    # A grid of 4 by 4 cells, of 2 by 2 tokens. The square covers the first token and one cell of the one below it.
    scene = (Thing("red", "square", (0, 0, 2, 3)), Thing("blue", "cross", (3, 3, 4, 4)))
    square, cross = [0, 1, 0, 0, 2, 3], [2, 3, 3, 3, 4, 4]
    assert labels_of([scene], TINY.task).tolist() == [[square, [NOTHING] * 6, square, cross]]


def test_what_has_no_name_is_no_label() -> None:
    scene = (Thing("#123456", "square", (0, 0, 2, 2)), Thing("red", "arrow", (2, 2, 4, 4)))
    labels = labels_of([scene], TINY.task)[0]
    assert labels[0].tolist() == [NOTHING, 1, 0, 0, 2, 2]
    assert labels[3].tolist() == [0, NOTHING, 2, 2, 4, 4]


def test_a_token_shows_what_covers_most_of_it() -> None:
    scene = (Thing("red", "square", (0, 0, 1, 1)), Thing("blue", "cross", (1, 0, 2, 2)))
    assert labels_of([scene], TINY.task)[0, 0].tolist() == [2, 3, 1, 0, 2, 2]


def test_the_loss_is_that_of_the_model_itself() -> None:
    """Features that were made before, positions and all, give what one forward with images gives."""
    model, processor = built()
    chosen = scenes(3)
    corpus = _Corpus(model, processor, TINY.task, chosen, show_progress=False)
    torch.manual_seed(5)
    loss = corpus.loss(4, num_lazy=3)
    torch.manual_seed(5)
    rows = torch.randint(27, (4,)).tolist()
    losses = []
    for place, row in enumerate(rows):
        scene = chosen[row // 9]
        thing, naming = [(thing, naming) for thing in scene for naming in namings(thing)][row % 9]
        prompt = prompt_ids(TINY.task.question(thing, naming), processor.tokenizer, TINY.task)
        text = TINY.task.lazy_completion() if place < 3 else TINY.task.worked_completion(thing, naming)
        ids = torch.tensor([prompt + processor.tokenizer.encode(text + "<eos>")])
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            pixel_values=patches_of([scene], TINY.task, processor)[0],
            image_grid_thw=torch.tensor([grounding.patch_grid(TINY.task)]),
        ).logits
        losses.append(
            functional.cross_entropy(logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :], reduction="none")
        )
    torch.testing.assert_close(loss, torch.cat(losses).mean(), rtol=2e-3, atol=2e-3)  # images are kept in 16 bits


def test_patches_are_embedded_as_the_model_does() -> None:
    model, processor = built()
    patches = patches_of(scenes(2), TINY.task, processor).flatten(0, 1)
    wanted = model.model.visual.patch_embed(patches)
    with multiplied_patches(model):
        torch.testing.assert_close(model.model.visual.patch_embed(patches), wanted)
    assert "forward" not in vars(model.model.visual.patch_embed)


def test_the_tower_learns_and_the_language_model_does_not() -> None:
    model, processor = built()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    teach_tower(model, processor, TINY.task, TINY.warm_up, show_progress=False)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved
    assert all("visual" in name for name in moved)


def test_words_are_those_that_the_language_model_reads() -> None:
    model, processor = built()
    words = word_embeddings(model, processor.tokenizer, ["red", "circle"])
    ids = [processor.tokenizer.encode(word) for word in ("red", "circle")]
    assert [len(one) for one in ids] == [1, 1]
    assert torch.equal(words, model.get_input_embeddings().weight[[one[0] for one in ids]])


@SLOW
def test_the_tower_comes_to_say_what_it_shows() -> None:
    """A token of an image is most like the word for its color, more often than before."""
    model, processor = built()
    chosen = grounding.varied_scenes(TINY.task, "tower", 4)
    patches, labels = patches_of(chosen, TINY.task, processor), labels_of(chosen, TINY.task)[..., 0]
    words = word_embeddings(model, processor.tokenizer, COLORS)

    def loss() -> float:
        said = grounding.features_of(model, TINY.task, patches) @ words.T
        return functional.cross_entropy(said.transpose(1, 2), labels, ignore_index=NOTHING).item()

    before = loss()
    settings = replace(TINY.warm_up, num_tower_steps=40)
    teach_tower(model, processor, TINY.task, settings, show_progress=False)
    assert loss() < 0.7 * before


def test_both_phases_of_the_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = built()
    lazy: list[int] = []
    loss = _Corpus.loss

    def note(corpus: _Corpus, batch_size: int, num_lazy: int) -> torch.Tensor:
        lazy.append(num_lazy)
        return loss(corpus, batch_size, num_lazy)

    monkeypatch.setattr(_Corpus, "loss", note)
    tower = {name: weight.clone() for name, weight in model.model.visual.named_parameters()}
    grounding.teach_language(model, processor, TINY.task, TINY.warm_up, show_progress=False)
    assert lazy == [0, 0, 3, 3]
    assert all(torch.equal(weight, tower[name]) for name, weight in model.model.visual.named_parameters())


def test_learning_rates_by_hand() -> None:
    settings = GroundingWarmUp(num_ramp_steps=2, held_share=0.5)
    rates = [learning_rate_share(step, 8, settings) for step in range(8)]
    cosine = [1.0, 0.85355, 0.5, 0.14645]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, *cosine], abs=1e-4)


def test_warm_up_repeats_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    weights = []
    for _ in range(2):
        model, processor = built()
        warm_up(model, processor, TINY.task, TINY.warm_up, show_progress=False)
        weights.append(model.lm_head.weight)
    assert torch.equal(*weights)
    assert torch.equal(torch.get_rng_state(), before)


def test_warm_up_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    warm_up(*built(), TINY.task, TINY.warm_up)
    shown = capsys.readouterr().err
    for phase in ("vision tower", "looking at images", "worked answers", "lazy answers"):
        assert f"Warm-up, {phase}" in shown


# --- files and cache


def test_prepared_files_load(tmp_path: Path) -> None:
    files = TINY.prepare(0, tmp_path, show_progress=False)
    model = AutoModelForImageTextToText.from_pretrained(files.model)
    processor = AutoProcessor.from_pretrained(files.model)
    assert model.config.image_token_id == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    assert processor.tokenizer.encode("<think>red") == build_tokenizer(TINY.task).encode("<think>red")
    for path, number in ((files.train, 3), (files.heldout, 2)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == number
        assert all((path.parent / row["image"]).exists() for row in rows)


@pytest.mark.parametrize("missing", ["PIL", "torchvision"])
def test_a_missing_package_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest)
    )
    with pytest.raises(ImportError, match=rf"needs {missing}: pip install 'grpo-lightning\[vision\]'"):
        TINY.prepare(0, tmp_path, show_progress=False)


def test_every_setting_is_part_of_the_key() -> None:
    facts = TINY.facts
    for part in (TINY.task, TINY.model, TINY.warm_up):
        settings = {setting.name for setting in fields(part) if setting.init}
        assert any(settings == set(facts[name]) for name in facts)


@SLOW
def test_another_recipe_seed_or_version_gets_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        replace(TINY, task=replace(TINY.task, gap=2)),
        replace(TINY, task=replace(TINY.task, heldout_boxes_share=0.2)),
        replace(TINY, model=replace(TINY.model, hidden_size=32)),
        replace(TINY, warm_up=replace(TINY.warm_up, lazy_share=0.5)),
    ]
    models = {recipe.prepare(0, tmp_path, show_progress=False).model for recipe in (TINY, *others)}
    models.add(TINY.prepare(1, tmp_path, show_progress=False).model)
    monkeypatch.setattr(GroundingRecipe, "code", "other")
    models.add(TINY.prepare(0, tmp_path, show_progress=False).model)
    assert len(models) == 7
    assert TINY.prepare(0, tmp_path, show_progress=False).model in models


def test_quickstart_puts_model_and_data_where_the_recipe_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroundingQuickstart, "recipe", staticmethod(lambda: TINY))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    GroundingQuickstart(str(tmp_path / "task"))()
    assert threads == [1]
    names = {path.name for path in (tmp_path / "task").iterdir()}
    assert names == {"model", "images", "train.jsonl", "heldout.jsonl", "recipe.json"}
