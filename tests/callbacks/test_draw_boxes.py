"""Pictures of boxes: what is drawn on which image, when, and where it goes."""

import io

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from grpo_lightning.callbacks import DrawBoxes
from grpo_lightning.callbacks import draw_boxes as pictures
from grpo_lightning.callbacks.draw_boxes import Answer, Panel, caption, draw_grid, draw_panel, question, thumbnail
from grpo_lightning.core.images import ImageRef
from grpo_lightning.data.prompt_source import PromptSource
from tests.helpers.grounding_runs import Answers, box_prompt, grounding_module, text_prompt
from tests.helpers.module_runs import make_source, make_trainer
from tests.helpers.tiny_vlms import picture
from tests.marks import SLOW

RIGHT = [(0, 0, 40, 40), (10, 10, 50, 50), (4, 4, 80, 52)]
PROMPTS = [
    box_prompt(RIGHT[0], index=0, seed=0),
    text_prompt(index=1),
    box_prompt(None, index=2, seed=3),
    *[box_prompt(box, index=3 + n, seed=1 + n) for n, box in enumerate(RIGHT[1:])],
]
"""Three of the five ask for a box."""


@pytest.fixture
def drawn(monkeypatch):
    """The panels of every picture, by its name; the pictures are drawn, too."""
    found = {}

    def note(panels, title, path):
        found.setdefault(path.stem, []).append((list(panels), title))
        draw_grid(panels, title, path)

    monkeypatch.setattr("grpo_lightning.callbacks.draw_boxes.draw_grid", note)
    return found


class Learning(Answers):
    """Answers another box once two completions were drawn, which training alone does."""

    def generate(self, prompts, num_generations, *args, **options):
        groups = super().generate(prompts, num_generations, *args, **options)
        if num_generations > 1:
            self.say("[0, 0, 40, 40]", "[1, 1, 2, 2]")
        return groups


def train(callback, tmp_path, *, engine=None, prompts=PROMPTS, steps=2, callbacks=(), ckpt_path=None, **options):
    module = grounding_module(engine or Answers("[0, 0, 20, 40]", "-"), num_generations=2)
    options = {"max_steps": steps, "max_epochs": -1, "num_sanity_val_steps": 1, "val_check_interval": 1} | options
    trainer = make_trainer(callbacks=[callback, *callbacks], default_root_dir=str(tmp_path), **options)
    source = make_source(module, prompts[:1], batch_size=1, shuffle=False)
    trainer.fit(module, source, PromptSource(prompts, 2, shuffle=False), ckpt_path=ckpt_path)
    return trainer


@SLOW
def test_before_at_validations_and_after(tmp_path, drawn, capsys):
    train(DrawBoxes(), tmp_path, engine=Learning("[0, 0, 20, 40]", "-"))
    assert list(drawn) == ["before", "step-1", "step-2", "after"]
    for name, (panels, title) in {name: found[-1] for name, found in drawn.items()}.items():
        assert [panel.right for panel in panels] == RIGHT
        with Image.open(tmp_path / "boxes" / f"{name}.png") as picture:
            assert picture.format == "PNG"
        answer = Answer((0, 0, 20, 40) if name == "before" else (0, 0, 40, 40), 0.5 if name == "before" else 1.0)
        assert panels[0].answer == answer
        assert panels[0].earlier == (None if name == "before" else Answer((0, 0, 20, 40), 0.5))
        assert panels[0].size == (84, 56)
        assert panels[0].title == "where is thing 0?"
        mean = sum(panel.answer.overlap for panel in panels) / 3
        assert title == f"{name}: mean IoU {mean:.3f} of 3 greedy answers"
    assert f"Boxes: {tmp_path / 'boxes'}" in capsys.readouterr().out


@SLOW
def test_what_is_not_drawn_is_said(tmp_path, drawn, caplog):
    train(DrawBoxes(num_images=2), tmp_path, steps=1)
    assert len(drawn["after"][0][0]) == 2
    assert (
        caplog.text.count("DrawBoxes: the boxes of 2 of the first 4 prompts are not drawn: they need exactly one image")
        == 1
    )


def test_nothing_to_draw(tmp_path, drawn, caplog, capsys):
    train(DrawBoxes(), tmp_path, prompts=[text_prompt(index=0)], steps=1)
    assert drawn == {}
    assert not (tmp_path / "boxes").exists()
    assert "1 of the first 1 prompts are not drawn" in caplog.text
    assert "Boxes:" not in capsys.readouterr().out


@SLOW
def test_sampled_answers(tmp_path, drawn):
    train(DrawBoxes(greedy=False), tmp_path, steps=1)
    assert drawn["after"][0][1].endswith("of 3 sampled answers")


@SLOW
def test_validate_and_test_draw_without_training(tmp_path, drawn):
    module = grounding_module(Answers("no box", "-"))
    trainer = make_trainer(callbacks=[DrawBoxes(dirpath=str(tmp_path / "here"))])
    source = PromptSource(PROMPTS, 2, shuffle=False)
    trainer.validate(module, source, verbose=False)
    trainer.test(module, PromptSource(PROMPTS[:2], 2, shuffle=False), verbose=False)
    assert {name: len(found[0][0]) for name, found in drawn.items()} == {"validate": 3, "test": 1}
    assert drawn["test"][0][0][0].answer == Answer(None, 0.0)
    assert sorted(path.name for path in (tmp_path / "here/boxes").iterdir()) == ["test.png", "validate.png"]


def test_a_plain_loader_of_rows(tmp_path, drawn):
    rows = []
    for number, box in enumerate(RIGHT):
        picture(number).save(tmp_path / f"{number}.png")
        rows.append({"problem": f"thing {number}", "image": str(tmp_path / f"{number}.png"), "solution": list(box)})
    module = grounding_module(Answers("no box", "-"))
    trainer = make_trainer(callbacks=[DrawBoxes(num_images=2)], default_root_dir=str(tmp_path))
    trainer.validate(module, DataLoader(rows, batch_size=2, collate_fn=list), verbose=False)
    assert [panel.title for panel in drawn["validate"][0][0]] == ["thing 0", "thing 1"]


@SLOW
def test_a_resumed_run_shows_the_answers_before_the_first_part(tmp_path, drawn):
    saves = ModelCheckpoint(dirpath=tmp_path, filename="one", save_top_k=-1, every_n_train_steps=1)
    train(DrawBoxes(), tmp_path, steps=1, callbacks=[saves], enable_checkpointing=True)
    drawn.clear()
    engine = Answers("[0, 0, 40, 40]", "-")
    options = {"callbacks": [saves], "enable_checkpointing": True, "ckpt_path": str(tmp_path / "one.ckpt")}
    train(DrawBoxes(), tmp_path, engine=engine, **options)
    assert "before" not in drawn
    panels, _ = drawn["after"][0]
    assert (panels[0].earlier, panels[0].answer) == (Answer((0, 0, 20, 40), 0.5), Answer((0, 0, 40, 40), 1.0))


@SLOW
def test_a_second_run_with_the_same_callback_draws_its_own_answers_before_training(tmp_path, drawn):
    callback = DrawBoxes()
    train(callback, tmp_path, steps=1)
    train(callback, tmp_path, steps=1, engine=Answers("[0, 0, 40, 40]", "-"))
    assert len(drawn["before"]) == 2
    assert drawn["after"][1][0][0].earlier == Answer((0, 0, 40, 40), 1.0)


@SLOW
def test_only_pictures_of_the_same_prompts_show_the_answers_before_training(tmp_path, drawn):
    """As many test prompts as validation prompts: one has another image, one is the same, one has another box."""
    callback = DrawBoxes()
    trainer = train(callback, tmp_path, engine=Learning("[0, 0, 20, 40]", "-"), steps=1)
    others = [box_prompt(RIGHT[0], index=0, seed=7), PROMPTS[0], box_prompt(RIGHT[0], index=2, seed=1)]
    trainer.test(trainer.lightning_module, PromptSource(others, 2, shuffle=False), verbose=False)
    panels, _ = drawn["test"][0]
    assert [panel.earlier for panel in panels] == [None, Answer((0, 0, 20, 40), 0.5), None]
    restored = DrawBoxes()
    restored.load_state_dict(callback.state_dict())
    drawn.clear()
    for prompts in (others, PROMPTS):
        source = PromptSource(prompts, 2, shuffle=False)
        make_trainer(callbacks=[restored], default_root_dir=str(tmp_path)).validate(
            grounding_module(Answers("[0, 0, 40, 40]", "-")), source, verbose=False
        )
    first, second = ([panel.earlier is not None for panel in panels] for panels, _ in drawn["validate"])
    assert (first, second) == ([False, True, False], [True, True, True])


@pytest.mark.filterwarnings("ignore:The `fast_dev_run`")
def test_a_fast_dev_run_draws_nothing(tmp_path, drawn):
    train(DrawBoxes(), tmp_path, fast_dev_run=1)
    assert drawn == {}


@SLOW
def test_tensorboard_has_the_pictures(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="log", version=0)
    train(DrawBoxes(num_images=1), tmp_path, steps=1, logger=logger)
    events = EventAccumulator(str(tmp_path / "log/version_0"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Images("val/boxes")] == [0, 1, 1]
    logged = Image.open(io.BytesIO(events.Images("val/boxes")[-1].encoded_image_string))
    with Image.open(tmp_path / "log/version_0/boxes/after.png") as picture:
        assert np.array_equal(np.asarray(logged), np.asarray(picture.convert("RGB")))


@SLOW
def test_weights_and_biases_has_the_pictures(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    train(DrawBoxes(num_images=1), tmp_path, steps=1, logger=WandbLogger(save_dir=tmp_path, offline=True))
    wandb.finish()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert len(list((run / "files/media/images/val").iterdir())) == 3


def test_no_number_of_images():
    with pytest.raises(ValueError, match="num_images must be at least 1, got 0"):
        DrawBoxes(0)


# ------------------------------------------------------------------------------------------------------------ pictures


def panel(**changes):
    png, size = thumbnail(ImageRef(Image.new("RGB", (200, 100), "white")))
    values = {"title": "the $left mug", "png": png, "size": size, "right": (10, 10, 60, 90)}
    return Panel(**(values | {"answer": Answer((20, 10, 70, 90), 0.67)} | changes))


def test_boxes_are_where_they_belong():
    axes = Figure().subplots()
    draw_panel(axes, panel(earlier=Answer((0, 0, 5, 5), 0.0)))
    drawn = {patch.get_label(): (*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in axes.patches}
    assert drawn == {
        "ground truth": (10, 10, 50, 80),
        "answer before training": (0, 0, 5, 5),
        "answer": (20, 10, 50, 80),
    }
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 200), (100, 0))
    assert list(axes.images[0].get_extent()) == [0, 200, 100, 0]
    assert (axes.get_title(), axes.get_xlabel()) == ("the $left mug", "IoU 0.67 (before 0.00)")


def test_captions():
    assert caption(panel()) == "IoU 0.67"
    assert caption(panel(answer=Answer(None, 0.0))) == "no box"
    assert caption(panel(answer=Answer(None, 0.0), earlier=Answer(None, 0.0))) == "no box (before no box)"


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_the_legend_names_what_is_drawn_once(count, tmp_path, monkeypatch):
    figures = []
    legend = Figure.legend

    def note(self, handles, labels, **options):
        figures.append(list(labels))
        return legend(self, handles, labels, **options)

    monkeypatch.setattr(Figure, "legend", note)
    draw_grid([panel(title=f"{n} {'long ' * 40}") for n in range(count)], "title", tmp_path / "new" / "grid.png")
    assert figures == [["ground truth", "answer"]]
    with Image.open(tmp_path / "new" / "grid.png") as picture:
        assert picture.width > 300 * min(count, 4)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["grid.png"]


def test_the_pixels_of_a_box_have_its_color(tmp_path):
    draw_grid([panel(answer=Answer(None, 0.0))], "t", tmp_path / "green.png")
    with Image.open(tmp_path / "green.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3).tolist()
    assert [44, 160, 44] in pixels  # tab:green
    assert [214, 39, 40] not in pixels  # tab:red: there is no answer


def test_large_images_are_made_small(monkeypatch):
    monkeypatch.setattr(pictures, "MAX_SIDE", 50)
    image = Image.new("RGB", (200, 100))
    png, size = thumbnail(ImageRef(image))
    assert (Image.open(io.BytesIO(png)).size, size, image.size) == ((50, 25), (200, 100), (200, 100))


def test_questions():
    parts = [{"type": "image"}, {"type": "text", "text": "where"}, {"type": "text", "text": "is it?"}]
    assert question([{"role": "system", "content": "s"}, {"role": "user", "content": parts}]) == "where is it?"
    assert question([{"role": "user", "content": "plain"}]) == question("plain") == "plain"
    assert question([{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]) == "q"
