"""Every recipe runs: two optimizer steps with a tiny model, and every objective fragment on top of the quickstart.

On one process; `tests/distributed/` runs strategies on several.
"""

import contextlib
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from grpo_lightning.cli import main
from grpo_lightning.cli.main import parse
from grpo_lightning.cli.plan import command as plan
from grpo_lightning.cli.plan.memory import MemorySettings, Precision, ScoredBatch, division_of, state_parts
from grpo_lightning.cli.plan.model import ModelSizes
from grpo_lightning.data.reasoning_gym import entries, row
from grpo_lightning.demo.reasoning_gym import TASKS
from grpo_lightning.training.strategies import GRPODeepSpeedStrategy
from tests.helpers import tiny_vlms
from tests.helpers.pages import read, tables
from tests.helpers.paths import RECIPES
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import tiny_classifier, tiny_model, tiny_tokenizer
from tests.marks import SLOW, few, only
from tests.vllm.fakes import fake_vllm, serving  # noqa: F401 - a fixture

QUICKSTARTS = sorted(RECIPES.glob("quickstart*.yaml"))
VISION = [RECIPES / "quickstart_grounding.yaml", *sorted((RECIPES / "vlm").glob("*.yaml"))]
VLLM = sorted((RECIPES / "vllm").glob("*.yaml"))
GYM = [path for path in sorted(RECIPES.glob("*.yaml")) if "rewards.ReasoningGym" in path.read_text()]
WHOLE = sorted({*RECIPES.glob("*.yaml"), *VISION, *VLLM})
SERVED = [path for path in WHOLE if "mode: server" in path.read_text()]
FAST = (
    "quickstart",
    "numina_qwen2.5_7b_lora",
    "numina_qwen2.5_1.5b_dapo",
    "rec_qwen2.5_vl_3b",
    "numina_qwen2.5_7b_async",
)
PLANNED = [path for path in WHOLE if path not in QUICKSTARTS]  # which build their policy
FAST_PLANS = [
    path
    for path in PLANNED
    if path.stem
    in (
        "rec_lora",
        "ultrafeedback_qwen2.5_1.5b",
        "math_llama3.3_70b_server",
        "numina_qwen2.5_1.5b_colocate",
        "numina_qwen2.5_72b_lora_colocate",
    )
]
OBJECTIVES = sorted((RECIPES / "objectives").glob("*.yaml"))
STRATEGIES = sorted((RECIPES / "strategies").glob("*.yaml"))


# What does not fit a tiny model, in the text of a recipe.
SHORTER = {
    "cache_length: 600": "cache_length: 2",
    "cache_length: 819": "cache_length: 2",
    "tensor_parallel_size: 2": "tensor_parallel_size: 1",
    "tensor_parallel_size: 4": "tensor_parallel_size: 1",
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "classifier",
}

# What a CPU cannot do, in the text of a recipe.
WITHOUT_CUDA = {
    "quantization: 4bit": "quantization: none",
    "PagedAdamW8bit": "AdamW",
    "attention: flash_attention_2": "attention: auto",
}

ONE_PROCESS = [
    *("--trainer.strategy=auto", "--trainer.devices=1", "--trainer.num_nodes=1"),
    "--model.ranks_per_group=1",
]


def finish_wandb() -> None:
    """End the run that a recipe's logger has begun: the next one would go on in it."""
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.finish()
        wandb.teardown()  # its settings too: the next test may want it offline


@contextlib.contextmanager
def tiny_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny policy, reward model and data in an empty current folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tiny_model("qwen2").save_pretrained("policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained("policy")
    tiny_classifier("qwen3").save_pretrained("classifier")
    tokenizer.save_pretrained("classifier")
    yield
    finish_wandb()


@pytest.fixture
def tiny(tmp_path, monkeypatch, fake_vllm):  # noqa: F811
    """See `tiny_files`; vLLM is a small one made of transformers."""
    with tiny_files(tmp_path, monkeypatch):
        yield


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
    "open-r1/verifiable-coding-problems-python-10k": lambda n: {
        "problem": f"{n}+1",
        "verification_info": {
            "language": "python",
            "test_cases": [{"input": f"{n}\n", "output": f"{n + 1}\n", "type": "stdin_stdout"}],
        },
    },
    "openai/gsm8k": lambda n: {"question": f"{n}+1", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"},
    "trl-lib/ultrafeedback-prompt": lambda n: {"prompt": [{"content": f"{n}+1", "role": "user"}]},
    "runs/guess_number_qwen2.5_1.5b/games": lambda n: {
        "question": f"I am thinking of a whole number from {n + 1} to {n + 100}.",
        "number": n + 50,
    },
    "runs/quickstart/task": lambda n: {"prompt": f"{n}+1", "answer": str(n + 1)},
    "runs/quickstart_game/task": lambda n: {"prompt": "guess:", "number": n % 10},
    "runs/quickstart_tools/task": lambda n: {"question": f"{n}+1", "answer": str(n + 1)},
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
"""The tiny models in place of the policies of the vision recipes."""

SOLUTIONS = {
    "gui_defect": "the title is cut",
    "gui_multi_image": "the left button",
    "ovd_od_length": [{"bbox_2d": [0, 0, 40, 40], "label": "cat"}],
    "counting": "<answer> 3 </answer>",
}
"""The solution of a row; the other recipes ask for a box."""

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


def flags(recipe: Path, replaced: dict[str, str] = SHORTER | WITHOUT_CUDA) -> list[str]:
    """The command line that runs a recipe with the tiny model and data in the place of its own."""
    content = recipe.read_text()
    for long, short in replaced.items():
        content = content.replace(long, short)
    content = re.sub(r"max_model_len: \d+", "max_model_len: 256", content)
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
        "--data.batch_size=2",
        "--model.sampling.max_completion_length=6",
        "--data.val_batch_size=2",
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


@contextlib.contextmanager
def server_flags(recipe: Path) -> Iterator[list[str]]:
    """Flags for a small vLLM server in the place of a recipe's servers, which runs meanwhile."""
    if recipe not in SERVED:
        yield []
        return
    with serving(AutoConfig.from_pretrained("policy")) as server:
        settings = {"base_url": server.url, "weight_transfer_backend": "gloo", "group_port": free_port()}
        yield [f"--model.engine.init_args.{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("recipe", only(FAST, WHOLE))
def test_recipe_runs_two_steps(recipe, tiny, tmp_path):
    arguments = flags(recipe)
    with server_flags(recipe) as more:
        main(["fit", *arguments, *more])
    steps = logged_steps(tmp_path / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
    engine = yaml.safe_load(recipe.read_text())["model"].get("engine", {})
    assert engine.get("class_path", "").endswith("VLLMEngine") == (recipe in VLLM)


@few(1, slow=True)
@pytest.mark.parametrize("recipe", SERVED, ids=lambda path: path.stem)
def test_the_server_in_a_header_serves_the_recipe(recipe):
    """The policy, the backend of the weights, log-probs after the temperature, and room for the longest completion."""
    header = " ".join(line.lstrip("# ") for line in recipe.read_text().splitlines() if line.startswith("#"))
    config = parse(["--config", str(recipe)])
    engine, policy = (config.model[name].init_args for name in ("engine", "policy"))
    assert "VLLM_SERVER_DEV_MODE=1" in header
    assert f"vllm serve {policy.name} " in header
    assert f"""--weight-transfer-config '{{"backend": "{engine.weight_transfer_backend}"}}'""" in header
    assert "--logprobs-mode processed_logprobs" in header
    urls = engine.base_url if isinstance(engine.base_url, list) else [engine.base_url]
    for url in urls:
        assert f"--port {url.rpartition(':')[2]}" in header
    longest = config.data.max_prompt_length + config.model.sampling.max_completion_length
    assert longest <= number(r"--max-model-len (\d+)", header)
    devices = re.findall(r"CUDA_VISIBLE_DEVICES=([\d,]+)", header)
    assert len(devices) == len(urls)
    if "127.0.0.1" in urls[0]:  # the same machine: training takes the first devices
        assert all(int(index) >= config.trainer.devices for index in devices[0].split(","))


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: path.stem)
def test_recipe_header_says_what_to_expect(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    for word in ("Shows:", "Expect:", "Hardware:", "Command:"):
        assert any(word in line for line in header), word
    (command,) = [line for line in header if "Command:" in line]
    name = recipe.relative_to(RECIPES)
    assert f"--config recipes/{name}" in command or command.endswith(f"--config {name.with_suffix('')}")


@pytest.mark.parametrize("page", ["vllm.md", "migrating.md"])
def test_the_pages_name_recipes_of_vllm_that_exist(page):
    named = {name for row in tables(read(page)) for cell in row.cells for name in re.findall(r"`vllm/([\w.]+)`", cell)}
    stems = {path.stem for path in VLLM}
    assert named == stems if page == "vllm.md" else named < stems


@pytest.mark.parametrize("recipe", GYM, ids=lambda path: path.stem)
def test_the_files_of_a_recipe_are_those_that_its_tasks_make(recipe):
    data = yaml.safe_load(recipe.read_text())["data"]
    made = data["prepare"]["init_args"]
    for key, part in (("datasets", "train"), ("val_datasets", "heldout")):
        files = [f"{made['folder']}/{part}/{task}.jsonl" for task in made.get("tasks", TASKS)]
        assert [entry["json_path"] for entry in data[key]] == files


@few(1)
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
        *("cispo", "clip_cov", "dapo", "dppo", "dr_grpo", "gdpo", "gmpo", "gpg", "grpo", "gspo", "high_entropy"),
        *("kl_cov", "maxrl", "opo", "pass_at_k", "reinforce_plus_plus", "rloo", "sapo", "vespo"),
    ]


# ----------------------------------------------------------------------------------------------------------- strategies

PER_WEIGHT = {"ddp": (24, 0), "fsdp2": (0, 20), "zero2": (4, 16), "zero3": (0, 20), "zero3_offload": (0, 24)}
"""Bytes per trained weight in bf16-mixed, of a device, or its part of the CPU: (whole, over the number of devices)."""


def strategy_of(fragment: Path) -> Any:
    """`trainer.strategy` of a fragment, on top of a recipe."""
    config = parse(["--config", str(RECIPES / "quickstart.yaml"), "--config", str(fragment)])
    assert config.trainer.devices == "auto"
    return config.trainer.strategy


@pytest.mark.parametrize("fragment", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_composes_and_is_ours(fragment):
    found = strategy_of(fragment)
    assert division_of(found, 4) == division_of(fragment.stem, 4)
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
        batch, precision = ScoredBatch(1, 8, 9, 9), Precision(4, 2, is_mixed=True)
        settings = MemorySettings(batch, precision, division=division_of(fragment.stem, ranks))
        model = ModelSizes(1, 8, 8, 8, 1, 1, 8, (None,), num_weights=8000, num_trained=8000)
        kept = {"weights", "reference", "gradients", "gradient buckets", "optimizer states"}
        kept |= {"master weights", "master gradients"}
        parts = [part for part in state_parts(model, settings) if part.name in kept]
        assert sum(part.num_bytes for part in parts) == 8000 * (whole + divided / ranks)
    for number in filter(None, (divided, whole if fragment.stem == "ddp" else 0)):
        assert re.search(rf"\b{number}\b", header)
    assert "Command:" in header


def test_every_strategy_has_a_fragment():
    assert [path.stem for path in STRATEGIES] == sorted(PER_WEIGHT)


@SLOW
def test_ddp_runs_on_one_process(tiny, tmp_path):
    flag, *others = flags(RECIPES / "quickstart.yaml")
    others = [other for other in others if other not in ONE_PROCESS]
    main(["fit", flag, "--config", str(RECIPES / "strategies" / "ddp.yaml"), *others, "--trainer.devices=1"])
    assert len(logged_steps(tmp_path / "runs")) == 2


NEEDS = {
    "grounding": r"\b(DetectionMAP|OdLength)\b",
    "vision": r"freeze_vision_modules|-VL-|InternVL|demo\.grounding",
    "peft": r"\blora:",
    "quantization": r"\bquantization:|8bit",
    "deepspeed": r"strategy: zero|DeepSpeedStrategy",
    "wandb": r"WandbLogger",
    "flash": r"flash_attention_2",
    "math": r"rewards\.Accuracy\b",
    "reasoning-gym": r"ReasoningGym",
    "judge": r"LLMJudge",
}
"""Extras, and what in a recipe needs them."""


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: path.stem)
def test_the_header_lists_the_extras_that_the_recipe_needs(recipe):
    lines = recipe.read_text().splitlines()
    settings = "\n".join(line.partition("#")[0] for line in lines)
    needed = {extra for extra, pattern in NEEDS.items() if re.search(pattern, settings)}
    if "grounding" in needed:  # includes vision
        needed.remove("vision")
    listed = [line.removeprefix("# Extras: ").partition(".")[0] for line in lines if line.startswith("# Extras: ")]
    assert {extra for extras in listed for extra in extras.split(", ")} == needed


def hardware(recipe: Path) -> str:
    """Return the devices and memory in a header."""
    header = " ".join(line.lstrip("# ") for line in recipe.read_text().splitlines() if line.startswith("#"))
    return header.partition("Hardware: ")[2].partition(" Command:")[0]


def number(pattern: str, text: str) -> float:
    """The number of a pattern that is there."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return float(found[1])


@SLOW
@pytest.mark.parametrize(
    "recipes",
    [
        pytest.param(FAST_PLANS, id="three"),
        pytest.param([path for path in PLANNED if path not in FAST_PLANS], id="others", marks=pytest.mark.slow),
    ],
)
def test_headers_state_the_memory_that_plan_computes_without_hub_and_data(recipes, tmp_path, monkeypatch, capsys):
    """Neither published models nor data sets can be had here. `plan` rounds to a tenth, the header to whole GiB.

    The numbers are those of the extended path. A transformers whose models seem to have no cache would give others.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    for recipe in recipes:
        written = hardware(recipe)
        tokens, device = number(r"prompts of (\d+) tokens", written), number(r"of (\d+) GB", written)
        assert tokens <= yaml.safe_load(recipe.read_text())["data"].get("max_prompt_length", tokens)
        args = ["--config", str(recipe), f"--prompt_tokens={tokens:g}", f"--device_gib={device:g}"]
        plan.run(args)
        out = capsys.readouterr().out
        assert "completions per rollout" in out
        assert "extended path" in out, recipe.stem
        assert re.search(r"The policy has [\d,]{9,} weights", out)
        names = re.findall(r"(?:name|init_args: \{model): ([A-Za-z][\w-]+/[\w.-]+)", recipe.read_text())
        assert names
        for name in names:
            assert f"{name} cannot be loaded here: using the sizes known to this package" in out
        found = number(r"It fits: ([\d.]+)(?: GiB)? of", out)
        assert found == pytest.approx(number(r"about (\d+) GiB", written), abs=0.6), recipe.stem
        if "vLLM's" in written:
            share = sum(float(size) for size in re.findall(r"vLLM's (?:weights|KV cache) *│ *([\d.]+)", out))
            assert share == pytest.approx(number(r"(\d+) of them vLLM's", written), abs=0.6), recipe.stem
        if "reward model's" in written:
            own = number(r"([\d.]+) of them the reward model's", written)
            assert number(r"reward reward_model[^\d~]*([\d.]+)", out) == pytest.approx(own, abs=0.06)
        if "the CPU" in written:
            on_cpu = number(r"(\d+) GiB of the CPU's", written)
            assert number(r"every device of a node: ([\d.]+) GiB", out) == pytest.approx(on_cpu, abs=0.6)
            assert 8 * on_cpu * 2**30 / 1e9 < number(r"(\d+) GB of its own memory", written)
        if "gather_for_generation false" in written:
            plan.run([*args, "--model.engine.init_args.gather_for_generation=false"])
            sharded = number(r"It fits: ([\d.]+)(?: GiB)? of", capsys.readouterr().out)
            assert sharded == pytest.approx(number(r"false (\d+) GiB", written), abs=0.6)
