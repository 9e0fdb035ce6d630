"""The card of an exported model: what the hub reads from it, and what a reader does."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from grpo_lightning.report import model_card
from grpo_lightning.report.model_card import is_hub_name, write_card

CONFIG = {
    "run_name": "gsm8k",
    "trainer": {"max_steps": 40, "callbacks": [{"class_path": "BeforeAfter"}]},
    "model": {
        "policy": "Qwen/Qwen2.5-0.5B-Instruct",
        "rewards": [
            {"class_path": "grpo_lightning.rewards.MathAccuracy"},
            {"class_path": "grpo_lightning.rewards.Format"},
        ],
        "reward_weights": [1.0, 0.5],
        "num_generations": 16,
    },
    "data": {
        "datasets": [
            {"dataset": "openai/gsm8k#main", "sampling_strategy": "first:500"},
            {"json_path": "/private/of/us/rows.jsonl"},
        ],
        "val_datasets": [{"dataset": "openai/gsm8k#main"}],
    },
}
SUMMARY = {
    "num_prompts": 200,
    "steps": 1200,
    "before": {"sampled": {"reward": 0.25, "avg@1": 0.2, "avg@1/low": 0.15, "avg@1/high": 0.26}},
    "after": {
        "sampled": {"reward": 0.75, "avg@1": 0.7, "avg@1/low": 0.63, "avg@1/high": 0.76},
        "greedy": {"reward": 1},
    },
}
RECORD = {
    "step": 1200,
    "versions": {"grpo-lightning": "0.1.0", "torch": "2.14.1"},
    "device": {"name": "NVIDIA H100", "world_size": 8, "precision": "bf16-mixed"},
}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "run.json").write_text(json.dumps(RECORD))
    (folder / "curves.png").write_bytes(b"picture")
    return folder


def card_of(tmp_path, run, policy="Qwen/Qwen2.5-0.5B-Instruct", **settings):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    settings = {"num_steps": 1200, "is_adapter": False, "is_multimodal": False} | settings
    card = write_card(folder, run, policy=policy, **settings)
    assert card.path == folder / "README.md"
    assert [f"## {title}" for title in card.titles] == re.findall("^## .*", card.path.read_text(), re.MULTILINE)
    return ModelCard.load(card.path)


def rewrite_config(run, **sections):
    """Replace settings in sections of the run's config.yaml."""
    config = CONFIG | {name: CONFIG.get(name, {}) | settings for name, settings in sections.items()}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def test_the_hub_reads_base_model_data_task_and_results(tmp_path, run):
    data = card_of(tmp_path, run).data
    assert data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert data.datasets == ["openai/gsm8k"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert "grpo" in data.tags
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results == {"reward": 0.75, "avg@1": 0.7}
    assert {result.dataset_type for result in data.eval_results} == {"openai/gsm8k"}


def test_an_adapter_and_a_model_with_images(tmp_path, run):
    data = card_of(tmp_path, run, is_adapter=True, is_multimodal=True).data
    assert (data.library_name, data.pipeline_tag) == ("peft", "image-text-to-text")


def test_a_reader_finds_results_rewards_data_settings_and_versions(tmp_path, run):
    text = card_of(tmp_path, run).text
    assert "# gsm8k" in text
    assert "1,200 optimizer steps" in text
    assert "| avg@1 | 0.2 [0.15, 0.26] | 0.7 [0.63, 0.76] | - | - |" in text
    assert "- 1 x `MathAccuracy`\n- 0.5 x `Format`" in text
    assert "- trained on: `openai/gsm8k#main`, first:500" in text
    assert "model.num_generations: 16" in text
    assert "trainer.callbacks" not in text
    assert "- torch 2.14.1" in text
    assert "8 x NVIDIA H100, bf16-mixed" in text
    assert (tmp_path / "model" / "curves.png").read_bytes() == b"picture"
    assert "![Learning curves](curves.png)" in text


def test_folders_of_this_machine_are_not_told(tmp_path, run):
    (tmp_path / "policies" / "tiny").mkdir(parents=True)
    card = card_of(tmp_path, run, str(tmp_path / "policies" / "tiny"))
    assert card.data.base_model is None
    assert "`tiny` trained with" in card.text
    assert "rows.jsonl" in card.text
    assert "/private" not in card.content
    assert str(tmp_path) not in card.content


def test_without_a_run_the_card_names_the_base_model_alone(tmp_path):
    card = card_of(tmp_path, None, "org/base", num_steps=None)
    assert card.data.base_model == "org/base"
    assert card.data.eval_results is None
    assert card.text.strip().startswith("# model\n\n[org/base](https://huggingface.co/org/base) trained with [GRPO]")
    assert "##" not in card.text


def weighted(reward, **settings):
    """The settings of a `WeightedReward`, as in config.yaml."""
    own = {"reward": reward, "weight": 1.0, "name": None} | settings
    return {"class_path": "grpo_lightning.rewards.WeightedReward", "init_args": own}


EXACT = {"class_path": "grpo_lightning.rewards.ExactMatch", "init_args": {"extract": "auto"}}
PLUGIN = {"class_path": "grpo_lightning.rewards.Plugin", "init_args": {"name": "format", "weight": 0.5}}


@pytest.mark.parametrize(
    ("rewards", "weights", "lines"),
    [
        ([EXACT, "my_rewards.brief"], None, ["1 x `ExactMatch`", "1 x `brief`"]),
        (["my_rewards.brief", EXACT], [0.1, 2], ["0.1 x `brief`", "2 x `ExactMatch`"]),
        (
            [weighted(EXACT, name="accuracy"), weighted("my_rewards.brief", weight=0.0, name="short")],
            None,
            ["1 x `accuracy` (`ExactMatch`)", "0 x `short` (`brief`)"],
        ),
        ([weighted(EXACT, weight=0.25), PLUGIN], None, ["0.25 x `ExactMatch`", "0.5 x `format`"]),
        ([weighted(EXACT, weight=0.25), PLUGIN], [3.0, 4.0], ["3 x `ExactMatch`", "4 x `format`"]),
        # The argument `weight` of any other reward is not its weight in the total.
        ([{"class_path": "my_rewards.Mine", "init_args": {"weight": 9.0}}], None, ["1 x `Mine`"]),
    ],
)
def test_every_reward_has_its_name_and_its_weight(tmp_path, run, rewards, weights, lines):
    rewrite_config(run, model={"rewards": rewards, "reward_weights": weights})
    section = card_of(tmp_path, run).text.partition("## Rewards\n\n")[2].partition("\n\n")[0]
    assert section.splitlines() == [f"- {line}" for line in lines]


def test_the_steps_are_those_of_the_checkpoint(tmp_path, run):
    card = card_of(tmp_path, run, num_steps=800)
    assert ", 800 optimizer steps." in card.text
    assert "after the 1,200 optimizer steps of the whole run; this model has 800" in card.text
    assert card.data.eval_results is None, "the results are those of another model"
    assert "this model has" not in card_of(tmp_path, run, num_steps=1200).text


def test_of_paths_only_the_last_part_is_told(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policies" / "tiny").mkdir(parents=True)
    (tmp_path / "local" / "rows").mkdir(parents=True)
    rows = [{"json_path": "secret/rows.jsonl"}, {"dataset": "local/rows#10"}, {"dataset": "openai/gsm8k#main"}]
    rewrite_config(
        run,
        model={"policy": "policies/tiny", "sampling": {"guided_regex": "a/b/c|<x>/d/e</x>"}},
        data={"datasets": rows, "val_datasets": [], "image_root": "another/machine/images"},
    )
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config + "ckpt_path: ../other/run/step=3.ckpt\nurl: http://host:80/v1/x\n")
    text = card_of(tmp_path, run, "policies/tiny").content
    for line in ("model.policy: tiny", "json_path: rows.jsonl", "dataset: rows#10", "dataset: openai/gsm8k#main"):
        assert line in text
    for line in (
        "data.image_root: images",
        "ckpt_path: step=3.ckpt",
        "guided_regex: a/b/c|<x>",
        "url: http://host:80/v1",
    ):
        assert line in text
    for folder in ("policies", "secret", "local", "another", "other/"):
        assert folder not in text
    assert "- trained on: `rows#10`" in text


def test_names_of_the_hub_are_told_in_full(tmp_path, run):
    assert "model.policy: Qwen/Qwen2.5-0.5B-Instruct" in card_of(tmp_path, run).text


def test_results_on_local_rows_are_not_reported_to_the_hub(tmp_path, run):
    config = CONFIG | {"data": {"val_datasets": [{"json_path": "rows.jsonl"}]}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    card = card_of(tmp_path, run)
    assert card.data.eval_results is None
    assert "| reward | 0.25 | 0.75 |" in card.text


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("Qwen/Qwen3-8B", True), ("./Qwen/Qwen3-8B", False), ("a/b/c", False), ("gpt2", False), ("~/m", False)],
)
def test_names_of_the_hub(name, is_one):
    assert is_hub_name(name) == is_one


def test_a_folder_of_that_name_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    assert not is_hub_name("runs/model")
    assert model_card.of_policy("runs/model") == "`model`"
