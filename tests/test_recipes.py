"""Every recipe runs: two optimizer steps with a tiny model, and every objective fragment on top of the quickstart.

On one process; `tests/distributed/` runs strategies on several.
"""

import contextlib
import copy
import csv
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from grpo_lightning.cli import main
from grpo_lightning.cli.main import parse
from grpo_lightning.cli.plan import command as plan
from grpo_lightning.cli.plan.activations import ScoredBatch
from grpo_lightning.cli.plan.compute_precision import Precision
from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.state_parts import state_parts
from grpo_lightning.cli.plan.states import division_of
from grpo_lightning.cli.plan.strategy import strategy_division
from grpo_lightning.data.reasoning_gym import entries, row
from grpo_lightning.demo.reasoning_gym import TASKS
from grpo_lightning.training.strategies import GRPODeepSpeedStrategy
from tests import tiny_vlms
from tests.cli.plan.real_shapes import published, reward_model_0_6b
from tests.marks import only
from tests.tiny_models import tiny_classifier, tiny_model, tiny_tokenizer

RECIPES = Path(__file__).parents[1] / "recipes"
QUICKSTARTS = [RECIPES / f"quickstart{name}.yaml" for name in ("", "_grounding", "_reasoning_gym")]
VISION = [QUICKSTARTS[1], *sorted((RECIPES / "vlm").glob("*.yaml"))]
GYM = [path for path in sorted(RECIPES.glob("*.yaml")) if "rewards.ReasoningGym" in path.read_text()]
WHOLE = sorted({*RECIPES.glob("*.yaml"), *VISION})
FAST = ("quickstart", "numina_lora_7b", "dapo_qwen2.5_1.5b", "rec_qwen2.5_vl_3b")
FAST_PLANS = ("dapo_qwen2.5_1.5b", "rec_lora", "reward_model_qwen2.5_1.5b")
OBJECTIVES = sorted((RECIPES / "objectives").glob("*.yaml"))
STRATEGIES = sorted((RECIPES / "strategies").glob("*.yaml"))


# What does not fit a tiny model, in the text of a recipe.
SHORTER = {
    "cache_length: 600": "cache_length: 2",
    "cache_length: 819": "cache_length: 2",
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "classifier",
}

# What a CPU cannot do, in the text of a recipe.
WITHOUT_CUDA = {
    "quantization: 4bit": "quantization: none",
    "PagedAdamW8bit": "AdamW",
    "attention: flash_attention_2": "attention: auto",
}

ONE_PROCESS = ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.num_nodes=1"]


def finish_wandb() -> None:
    """End the run that a recipe's logger has begun: the next one would go on in it."""
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.finish()
        wandb.teardown()  # its settings too: the next test may want it offline


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny policy, reward model and data in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tiny_model("qwen2").save_pretrained("policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained("policy")
    tiny_classifier("qwen3").save_pretrained("classifier")
    tokenizer.save_pretrained("classifier")
    yield
    finish_wandb()


def write_rows(rows: list[dict[str, Any]], name: str = "rows") -> None:
    """The data that recipes are run with."""
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def math_row(number: int, *columns: str) -> dict[str, Any]:
    """A row with some of the columns that math data sets have."""
    problem, solution = f"{number}+1", f"It is $\\boxed{{{number + 1}}}$."
    turns = [{"content": problem, "role": "user"}, {"content": solution, "role": "assistant"}]
    row = {"problem": problem, "solution": solution, "messages": turns, "answer": str(number + 1), "level": "Level 1"}
    row |= {"type": "Algebra", "subject": "Algebra", "unique_id": f"test/algebra/{number}.json"}
    return {name: row[name] for name in columns}


OWN_ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "AI-MO/NuminaMath-TIR": lambda n: math_row(n, "problem", "solution", "messages"),
    "DigitalLearningGmbH/MATH-lighteval": lambda n: math_row(n, "problem", "level", "solution", "type"),
    "HuggingFaceH4/MATH-500": lambda n: math_row(n, "problem", "solution", "answer", "subject", "level", "unique_id"),
    "openai/gsm8k": lambda n: {"question": f"{n}+1", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"},
    "trl-lib/ultrafeedback-prompt": lambda n: {"prompt": [{"content": f"{n}+1", "role": "user"}]},
    "runs/quickstart/task": lambda n: {"prompt": f"{n}+1", "answer": str(n + 1)},
}
"""Rows of every data set of a recipe without images, with all its columns in their order."""


def write_own_rows(recipe: Path, config: dict[str, Any]) -> None:
    """The rows of a recipe's data sets: those to train on, and those to validate on."""
    if recipe in VISION:
        tiny_vision(recipe)
        return
    for name, key in (("rows", "datasets"), ("held_out", "val_datasets")):
        for entry in (config["data"].get(key) or config["data"]["datasets"])[:1]:
            source = entry.get("dataset", "").partition("#")[0] or str(Path(entry["json_path"]).parent)
            write_rows(gym_rows(12) if recipe in GYM else [OWN_ROWS[source](number) for number in range(12)], name)


FAMILIES = {
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "OpenGVLab/InternVL3-2B-hf": "internvl",
    "runs/quickstart_grounding/task/model": "qwen2_5_vl",
}
"""Of the policies of the recipes that see images."""

SOLUTIONS = {
    "gui_defect": "the title is cut",
    "gui_multi_image": "the left button",
    "ovd_od_length": [{"bbox_2d": [0, 0, 40, 40], "label": "cat"}],
    "counting": "<answer> 3 </answer>",
}
"""Of a row; the other recipes ask for a box."""

IMAGES = {"gui_defect": [(1280, 800)], "gui_multi_image": [(1280, 800)] * 2, "counting": [(480, 320)]}
"""Width and height of a row's images in the data of a recipe; of the others (640, 480), as in COCO."""


def vision_row(recipe: str, number: int, images: Any) -> dict[str, Any]:
    """A row with the columns of a vision recipe's data, as VLM-R1 and the hub have them."""
    solution = SOLUTIONS.get(recipe, [0, 0, 40, 40])
    if recipe.startswith("gui_"):  # VLM-R1's JSONL
        places = "<image>" * (len(images) if isinstance(images, list) else 1)
        turns = [{"from": "human", "value": f"{places}where?"}, {"from": "gpt", "value": solution}]
        return {"id": number, "image": images, "conversations": turns}
    row = {"image": images, "problem": "where?", "solution": solution}
    if recipe.startswith("rec_"):  # VLM-R1's rec_jsons_processed
        row |= {"normal_caption": "the thing", "normalized_solution": [0, 0, 500, 500]}
    return row


def tiny_vision(recipe: Path) -> None:
    """A tiny model of the recipe's family and data as it has them, instead of the fixture's."""
    (family,) = [FAMILIES[name] for name in FAMILIES if name in recipe.read_text()]
    model, processor = tiny_vlms.build(family)
    model.save_pretrained("policy")
    processor.save_pretrained("policy")
    rows = []
    for number in range(6):
        names = [f"{number}-{part}.png" for part in range(len(IMAGES.get(recipe.stem, [0])))]
        for name in names:
            tiny_vlms.picture(number).save(name)
        rows.append(vision_row(recipe.stem, number, names if len(names) > 1 else names[0]))
    write_rows(rows)
    write_rows(rows, "held_out")


def gym_rows(number: int) -> list[dict[str, Any]]:
    """Rows as `ReasoningGymTasks` writes them; all of one question."""
    pytest.importorskip("reasoning_gym")
    (entry,) = entries("spell_backward", {}, 0, range(1))
    return [row("spell_backward", {}, entry)] * number


def flags(recipe: Path) -> list[str]:
    """The command line that runs a recipe with the tiny model and data in the place of its own."""
    content = recipe.read_text()
    for long, short in (SHORTER | WITHOUT_CUDA).items():
        content = content.replace(long, short)
    Path("recipe.yaml").write_text(content)
    config = yaml.safe_load(content)
    write_own_rows(recipe, config)
    has_settings = isinstance(config["model"]["policy"], dict)
    # How boxes are given and rows are scored is the recipe's matter.
    kept = {"boxes", "accu_reward_method", "columns"}
    entry = {name: value for name, value in config["data"]["datasets"][0].items() if name in kept}
    held_out = json.dumps([{**entry, "json_path": "held_out.jsonl", "sampling_strategy": "first:4"}])
    return [
        "--config=recipe.yaml",
        f"--model.policy{'.init_args.name' if has_settings else ''}=policy",
        "--data.prepare=null",
        "--data.max_prompt_length=400",
        "--data.num_proc=1",
        "--trainer.accumulate_grad_batches=2",
        "--trainer.val_check_interval=2",
        "--trainer.log_every_n_steps=1",
        f"--data.datasets={json.dumps([{**entry, 'json_path': 'rows.jsonl'}])}",
        "--data.val_datasets=null" if "val_split" in config["data"] else f"--data.val_datasets={held_out}",
        *(["--data.val_split=2"] if "val_split" in config["data"] else []),
        "--data.batch_size=4",
        "--model.sampling.max_completion_length=6",
        "--data.val_batch_size=4",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
        *ONE_PROCESS,
    ]


def logged_steps(folder: Path) -> list[dict[str, float]]:
    """The numbers in the CSV logs below a folder, empty cells left out."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "policy/loss" in row]


@pytest.mark.parametrize("recipe", only(FAST, WHOLE))
def test_recipe_runs_two_steps(recipe, tiny, tmp_path):
    main(["fit", *flags(recipe)])
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: path.stem)
def test_recipe_header_says_what_to_expect(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    for word in ("Shows:", "Expect:", "Hardware:", "Command:"):
        assert any(word in line for line in header), word
    (command,) = [line for line in header if "Command:" in line]
    name = recipe.relative_to(RECIPES)
    assert f"--config recipes/{name}" in command or command.endswith(f"--config {name.with_suffix('')}")


@pytest.mark.parametrize("recipe", GYM, ids=lambda path: path.stem)
def test_the_files_of_a_recipe_are_those_that_its_tasks_make(recipe):
    data = yaml.safe_load(recipe.read_text())["data"]
    made = data["prepare"]["init_args"]
    for key, part in (("datasets", "train"), ("val_datasets", "heldout")):
        files = [f"{made['folder']}/{part}/{task}.jsonl" for task in made.get("tasks", TASKS)]
        assert [entry["json_path"] for entry in data[key]] == files


@pytest.mark.parametrize("fragment", only(["dapo", "dr_grpo", "gspo"], OBJECTIVES))
def test_objective_composes_with_the_quickstart(fragment, tiny, tmp_path):
    flag, *others = flags(RECIPES / "quickstart.yaml")
    cli = main(["fit", flag, "--config", str(fragment), *others, "--trainer.max_steps=4"])
    for name, value in yaml.safe_load(fragment.read_text())["model"]["objective"].items():
        assert getattr(cli.model.objective, name) == value
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 4
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert ("policy/kl" in steps[0]) == cli.model.objective.needs_reference


def test_every_paper_of_the_objective_table_has_a_fragment():
    assert [path.stem for path in OBJECTIVES] == [
        *("cispo", "dapo", "dr_grpo", "gdpo", "grpo", "gspo", "maxrl", "reinforce_plus_plus", "rloo", "sapo")
    ]


# ----------------------------------------------------------------------------------------------------------- strategies

PER_WEIGHT = {"ddp": (24, 0), "fsdp2": (0, 20), "zero2": (4, 16), "zero3": (0, 20), "zero3_offload": (0, 24)}
"""Bytes per trained weight in bf16-mixed, of a device, or its part of the CPU: (whole, over the number of devices)."""


def strategy_of(fragment: Path) -> Any:
    """`trainer.strategy` of a fragment, on top of a recipe."""
    config = parse(["--config", str(RECIPES / "quickstart.yaml"), "--config", str(fragment)])
    assert config.trainer.inference_mode == (fragment.stem == "ddp")
    assert config.trainer.devices == "auto"
    return config.trainer.strategy


@pytest.mark.parametrize("fragment", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_composes_and_is_ours(fragment):
    found = strategy_of(fragment)
    assert strategy_division(found, 4) == strategy_division(fragment.stem, 4)
    if fragment.stem.startswith("zero"):
        zero = GRPODeepSpeedStrategy(**found.init_args).config["zero_optimization"]
        assert zero["stage"] == int(fragment.stem[4])
        assert zero.get("stage3_prefetch_bucket_size", 0) == 0
        assert ("offload_param" in zero) == ("offload_optimizer" in zero) == fragment.stem.endswith("_offload")


@pytest.mark.parametrize("fragment", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_header_counts_what_plan_counts(fragment):
    header = " ".join(line.lstrip("# ") for line in fragment.read_text().splitlines() if line.startswith("#"))
    whole, divided = PER_WEIGHT[fragment.stem]
    for ranks in (4, 8):
        settings = MemorySettings(
            ScoredBatch(1, 8, 9, 9), 0, 0, Precision(4, 2, is_mixed=True), 8, division_of(fragment.stem, ranks)
        )
        shape = ModelShape(1, 8, 8, 8, 1, 1, 8, (None,), num_weights=8000)
        kept = {"weights", "reference", "gradients", "gradient buckets", "master weights", "optimizer states"}
        # Gradients that only a step has are not among them.
        parts = [
            part
            for part in state_parts(shape, settings)
            if part.name in kept or (part.name == "32-bit gradients" and "update" in part.moments)
        ]
        assert sum(part.num_bytes for part in parts) == 8000 * (whole + divided / ranks)
    for number in filter(None, (divided, whole if fragment.stem == "ddp" else 0)):
        assert re.search(rf"\b{number}\b", header)
    assert "Command:" in header


def test_every_strategy_has_a_fragment():
    assert [path.stem for path in STRATEGIES] == sorted(PER_WEIGHT)


def test_ddp_runs_on_one_process(tiny, tmp_path):
    flag, *others = flags(RECIPES / "quickstart.yaml")
    others = [other for other in others if other not in ONE_PROCESS]
    main(["fit", flag, "--config", str(RECIPES / "strategies" / "ddp.yaml"), *others, "--trainer.devices=1"])
    assert len(logged_steps(tmp_path / "runs")) == 2


ROWS = {
    "AI-MO/NuminaMath-TIR#1000": 1000,
    "AI-MO/NuminaMath-TIR#5000": 5000,
    "DigitalLearningGmbH/MATH-lighteval": 7500,
    "openai/gsm8k": 7473,
    "trl-lib/ultrafeedback-prompt": 37775,
}
"""Training prompts."""


def hardware(recipe: Path) -> str:
    """What a header says of devices, memory and time."""
    header = " ".join(line.lstrip("# ") for line in recipe.read_text().splitlines() if line.startswith("#"))
    return header.partition("Hardware: ")[2].partition(" Command:")[0]


def published_vision(recipe: Path, config: Any) -> list[str]:
    """The published model's config and image processor, a tiny tokenizer, and a row with images of the data's size."""
    own, processor = tiny_vlms.BUILDERS[config.model_type]()
    config = copy.deepcopy(config)
    for name in ("image_token_id", "video_token_id"):
        setattr(config, name, getattr(own, name, None))
    images = processor.image_processor
    if config.model_type == "internvl":
        processor.image_seq_length = 256
        images.size = type(images.size)(height=448, width=448)
    else:
        images.size = type(images.size)(shortest_edge=56 * 56, longest_edge=28 * 28 * 16384)
    config.save_pretrained("policy")
    processor.save_pretrained("policy")
    row = {"problem": "where?", "solution": SOLUTIONS.get(recipe.stem, [0, 0, 40, 40]), "image": []}
    for number, size in enumerate(IMAGES.get(recipe.stem, [(640, 480)])):
        Image.new("RGB", size).save(f"{number}.png")
        row["image"].append(f"{number}.png")
    write_rows([row])
    return ["--data.val_split=null"]


def planned(recipe: Path, prompt_tokens: int, device_gib: int, capsys, *more: str) -> str:
    """What `plan` prints for a recipe, with the published model's config and as many prompts as its data have."""
    content = yaml.safe_load(recipe.read_text())
    config, entry = published(content["model"]["policy"]["init_args"]["name"]), content["data"]["datasets"][0]
    kept = {"json_path": "rows.jsonl"}
    if recipe in VISION:
        more = (*more, *published_vision(recipe, config))
        kept |= {name: entry[name] for name in ("accu_reward_method",) if name in entry}
    else:
        config.save_pretrained("policy")
        if recipe in GYM:
            made = content["data"]["prepare"]["init_args"]
            write_rows(gym_rows(made["size"] * len(made["tasks"])))
        else:
            rows = [{"question": "1+1", "answer": "2", "solution": "\\boxed{2}"}]
            write_rows(rows * ROWS[entry["dataset"]])
    data = [f"--data.datasets={json.dumps([kept])}", "--data.val_datasets=null", "--data.prepare=null"]
    if "RewardModel" in recipe.read_text():
        Path("classifier/model.safetensors").unlink()
        reward_model_0_6b().save_pretrained("classifier")
        rewards = [{"class_path": "grpo_lightning.rewards.RewardModel", "init_args": {"model": "classifier"}}]
        more = (*more, f"--model.rewards={json.dumps(rewards)}")
    sizes = [f"--prompt_tokens={prompt_tokens}", f"--device_gib={device_gib}"]
    args = ["plan", "--config", str(recipe), "--model.policy.init_args.name=policy", *data, *sizes, *more]
    if recipe.stem == "zero3_70b":
        with pytest.raises(SystemExit):
            main(args)
    else:
        main(args)
    return " ".join("".join(capsys.readouterr()).split())


def numbers(pattern: str, text: str) -> list[Any]:
    """The groups of a pattern that is there, numbers as numbers."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return [float(group) if re.fullmatch(r"[\d.]+", group) else group for group in found.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [path for path in WHOLE if path not in QUICKSTARTS], ids=lambda path: path.stem)
def test_every_number_of_a_header_is_what_plan_says(recipe, tiny, capsys):
    """`plan` rounds to a tenth, the header to whole GiB."""
    written, data = hardware(recipe), yaml.safe_load(recipe.read_text())["data"]
    (tokens,) = numbers(r"prompts of (\d+) tokens", written)
    assert tokens <= data.get("max_prompt_length", tokens)
    (device,) = numbers(r"of (\d+) GB", written)
    (peak,) = numbers(r"about (\d+) GiB", written)
    told = planned(recipe, int(tokens), int(device), capsys)
    assert numbers(r"It fits: ([\d.]+) of", told) == [pytest.approx(peak, abs=0.6)]
    checked = []
    if "reward model's" in written:
        (own,) = numbers(r"([\d.]+) of them the reward model's", written)
        assert numbers(r"reward reward_model[^\d~]*([\d.]+)", told) == [pytest.approx(own, abs=0.06)]
        checked += [r"[\d.]+ of them the reward"]
    checked += [r"one GPU|\d+ GPUs|\d+ nodes of \d+", r"of \d+ GB", r"about \d+ GiB", r"prompts of \d+ tokens"]
    if "at least" in written and "a step at least" not in written:
        time = r"at least ([\d.]+) (hours|days|h)"
        (longest, unit), (length, short) = numbers(time, written), numbers(r"The run,.*? at least ([\d.]+) (\w+)", told)
        assert (longest, unit[0]) == (pytest.approx(length, rel=0.03), short[0])
        checked += [time, r"the \d+ (steps|epochs)"]
    if "a step at least" in written:
        (step,) = numbers(r"a step at least (\d+) s", written)
        drawn, scored = numbers(r"A rollout and its updates: at least ([\d.]+) s .*?, ([\d.]+) s to score", told)
        assert step == pytest.approx(drawn + scored, abs=1.5)
        (of_images,) = numbers(r"tokens, (\d+) of them", written)
        many, what = numbers(r"x ([\d]+) (patches|tokens of a frozen tower)", told.replace(",", ""))
        assert of_images == (many / 4 if what == "patches" else many)
        checked += [r"a step at least \d+ s", r"\d+ of them"]
    if "the CPU" in written:
        (host,) = numbers(r"(\d+) GiB of the CPU's", written)
        assert numbers(r"On the CPU, for every device of a node: ([\d.]+) GiB", told) == [pytest.approx(host, abs=0.6)]
        (memory,) = numbers(r"(\d+) GB of its own memory", written)
        assert 8 * host * 2**30 / 1e9 < memory
        checked += [r"\d+ GiB of the CPU's", r"\d+ GB of its own memory"]
        assert "at least 3.3 hours" in recipe.read_text()
        assert numbers(r"A rollout and its updates: at least ([\d.]+) h", told) == [pytest.approx(3.3, abs=0.06)]
    if "gather_for_generation false" in written:
        flag = "--model.engine.init_args.gather_for_generation=false"
        told = planned(recipe, int(tokens), int(device), capsys, flag)
        without = r"false (\d+) GiB, and ([\d.]+) days"
        peak, days = numbers(without, written)
        assert numbers(r"It fits: ([\d.]+) of", told) == [pytest.approx(peak, abs=0.6)]
        assert numbers(r"The run,.*? at least ([\d.]+) days", told) == [pytest.approx(days, rel=0.03)]
        checked.append(without)
    assert not re.search(r"\d", re.sub("|".join(checked), "", written)), "a number that nothing checks"


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in FAST_PLANS else pytest.mark.slow)
        for path in WHOLE
        if path not in QUICKSTARTS  # which build their policy
    ],
)
def test_recipe_is_planned_without_hub_and_data(recipe, tmp_path, monkeypatch, capsys):
    """Neither the published model nor the data set can be had here."""
    monkeypatch.chdir(tmp_path)
    takes_too_long = pytest.raises(SystemExit) if recipe.stem == "zero3_70b" else contextlib.nullcontext()
    with takes_too_long:
        plan.run(["--config", str(recipe), "--prompt_tokens=300", "--devices=8"])
    out = capsys.readouterr().out
    assert "completions per rollout" in out
    names = re.findall(r"(?:name|init_args: \{model): ([A-Za-z][\w-]+/[\w.-]+)", recipe.read_text())
    for name in names:
        assert f"{name} cannot be read here: its sizes are those that this package knows" in " ".join(out.split())
    assert names
    assert re.search(r"The policy has [\d,]{9,} weights", out)
