"""Failure modes 10 to 12: runs that resume as others, from what was never written, or die of one bad row."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch import Tensor

from grpo_lightning.cli import resume
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.checkpoint_files import MARK, mark_complete
from tests.cli.test_resume import WHOLE, cut, saved
from tests.helpers import tiny_vlms
from tests.helpers.module_runs import are_equal, make_trainer, weights_of
from tests.marks import SLOW
from tests.module.test_resume import CYCLE, KillAt, KilledError, train, two_updates
from tests.module.test_vision import vision_module


@SLOW
def test_10_a_run_killed_inside_a_cycle_draws_what_the_unbroken_one_did(tmp_path: Path):
    """TRL, transformers: a resumed run draws from random numbers that begin anew, and what was pending anew as well."""

    class FromGlobalState(GRPOLightningModule):
        """Seeds by torch's own generator."""

        def generate(self, prompts: Any, num_generations: Any, sampling: Any, seeds: Any) -> Any:
            seeds = torch.randint(2**31, (len(prompts),)).tolist()
            return super().generate(prompts, num_generations, sampling, seeds)

    class WithoutPending(GRPOLightningModule):
        """Keeps no rollout in its checkpoints: the rest of the cycle is another rollout's."""

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_load_checkpoint(checkpoint)
            self.rollout_again = self.run.cycle is not None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if getattr(self, "rollout_again", False):
                position, self.rollout_again = self.run.cycle.position, False
                self.start_cycle(self.compute_advantages(self.sample_and_score(batch.prompts)))
                self.run.cycle.position = position
            return super().training_step(batch, batch_idx)

    def run(module_class: type[GRPOLightningModule], folder: Path, *callbacks: Any, resume: bool = False) -> Any:
        torch.manual_seed(0)  # as a script does
        module = two_updates(module_class=module_class, scheduler=None)
        return weights_of(train(folder, *callbacks, module=module, resume=resume, max_epochs=1))

    def check(module_class: type[GRPOLightningModule]) -> None:
        folder = tmp_path / module_class.__name__
        unbroken = run(module_class, folder / "unbroken")
        with pytest.raises(KilledError):
            run(module_class, folder, KillAt(CYCLE // 2 + 2, "on_after_backward"))
        assert are_equal(run(module_class, folder, resume=True), unbroken)

    first, again = (run(FromGlobalState, tmp_path / name) for name in ("first", "again"))
    assert are_equal(first, again), "as long as nobody breaks it off"
    for naive in (FromGlobalState, WithoutPending):
        with pytest.raises(AssertionError):
            check(naive)
    check(GRPOLightningModule)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_11_a_run_goes_on_from_the_newest_checkpoint_that_was_written_to_its_end(tmp_path: Path, kind: str):
    """RLinf, cosmos-rl: killed while it was saving, the newest folder was half there, and was resumed from."""

    def folder_of_shards(name: str, seconds: int, *, is_whole: bool) -> Path:
        folder = tmp_path / name
        for shard in ("meta.pt", "shard_0.pt", "shard_1.pt")[: 3 if is_whole else 2]:
            saved(folder / shard, seconds, lr_schedulers=[])
        if is_whole:
            mark_complete(folder)
            os.utime(folder / MARK, (seconds, seconds))
        os.utime(folder, (seconds, seconds))
        return folder

    def by_time() -> Path | None:
        return max(tmp_path.glob("*.ckpt"), key=os.path.getmtime)

    def ours() -> Path | None:
        path, skipped = resume.newest([tmp_path], to_train=True)
        assert list(skipped) == [half], "and it is said why"
        return path

    def check(newest: Callable[[], Path | None]) -> None:
        assert newest() == whole

    if kind == "file":
        saved(tmp_path / "step=1.ckpt", 10, **WHOLE)
        whole = saved(tmp_path / "step=2.ckpt", 20, **WHOLE)
        half = cut(saved(tmp_path / "step=3.ckpt", 30, **WHOLE))
    else:
        whole = folder_of_shards("step=2.ckpt", 20, is_whole=True)
        half = folder_of_shards("step=3.ckpt", 30, is_whole=False)
    with pytest.raises(AssertionError):
        check(by_time)
    check(ours)


def test_12_a_truncated_image_is_named_before_the_weights_are_loaded(tmp_path: Path):
    """ms-swift: a run died in the middle of an epoch of one image of thousands, and nobody said which."""
    vlm = tiny_vlms.build("qwen2_5_vl")
    for name in "abc":
        tiny_vlms.picture(ord(name)).save(tmp_path / f"{name}.jpg")
    broken = tmp_path / "b.jpg"
    broken.write_bytes(broken.read_bytes()[:-400])
    rows = [{"image": f"{name}.jpg", "problem": "What is it?", "solution": "noise"} for name in "abc"]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    done: list[str] = []

    def by_dataset() -> None:
        """A data set that opens its images, and a rollout that looks at them."""
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        images = [PIL.Image.open(tmp_path / line["image"]) for line in lines]  # reads the head of the file alone
        done.append("weights")
        for image, line in zip(images, lines, strict=True):
            text = f"<|vision_start|><|image_pad|><|vision_end|>{line['problem']}"
            vlm.processor(text=[text], images=[image], return_tensors="pt")
            done.append("rollout")

    class SaysWhenLoading(GRPOLightningModule):
        def configure_model(self) -> None:
            done.append("weights")
            super().configure_model()

    def ours() -> None:
        data = PromptDataModule([{"json_path": str(file), "image_root": str(tmp_path)}], batch_size=1)
        make_trainer(max_steps=3).fit(vision_module(vlm, SaysWhenLoading), datamodule=data)

    def check(run: Callable[[], None]) -> None:
        done.clear()
        with pytest.raises((OSError, ValueError), match="truncated") as caught:
            run()
        assert "rows.jsonl:2" in str(caught.value)
        assert "b.jpg" in str(caught.value)
        assert done == []

    with pytest.raises(AssertionError):
        check(by_dataset)
    assert done == ["weights", "rollout"], "it died in the second step"
    check(ours)
