"""Eight scripts of other trainers as recipes: translated by docs/migrating.md, run on the columns of their data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.cli import main
from grpo_lightning.cli.main import parse
from grpo_lightning.cli.plan.batches import translate
from grpo_lightning.cli.plan.command import parse_script
from tests.helpers import tiny_vlms
from tests.helpers.pages import TableRow, read, tables
from tests.helpers.paths import RECIPES
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few
from tests.recipes.test_recipes import ONE_PROCESS, finish_wandb, logged_steps

ROWS = tables(read("migrating.md"))

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}="


# --------------------------------------------------------------------------------------------------- the data's columns


def numina() -> list[dict[str, Any]]:
    """Rows of AI-MO/NuminaMath-TIR: the problem and its solution once as text, once as messages."""
    rows = []
    for number in range(24):
        problem, solution = f"What is {number} + 1?", f"We add. The answer is $\\boxed{{{number + 1}}}$."
        messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": solution}]
        rows.append({"problem": problem, "solution": solution, "messages": messages})
    return rows


def gsm8k() -> list[dict[str, Any]]:
    """Rows of openai/gsm8k."""
    return [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(12)]


def refcoco() -> list[dict[str, Any]]:
    """Rows of VLM-R1's rec_jsons_processed, with their pictures."""
    rows = []
    for number in range(12):
        tiny_vlms.picture(number).save(f"{number}.png")
        rows.append(
            {
                "image": f"{number}.png",
                "problem": "Please provide the bounding box coordinate of the region this sentence describes: a cat.",
                "solution": [0, 0, 40, 40],
                "normal_caption": "a cat",
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------------------- the scripts

SWIFT = "--reward_funcs accuracy format --torch_dtype bfloat16 --num_train_epochs 1 --per_device_eval_batch_size 1"
SWIFT += " --save_total_limit 2 --logging_steps 5 --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4"
SWIFT += " --dataset_num_proc 4 --temperature 0.9 --system examples/train/grpo/prompt.txt --log_completions true"

BIG = "--use_vllm true --vllm_device auto --vllm_max_model_len 8192 --train_type full --max_completion_length 2048"
BIG += " --dataset AI-MO/NuminaMath-TIR#5000 --learning_rate 1e-6 --per_device_train_batch_size 1 --max_length 4096"
BIG += " --gradient_accumulation_steps 2 --eval_steps 200 --save_steps 200 --deepspeed zero2"

SMALL = "--train_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear --learning_rate 1e-5"
SMALL += " --dataset AI-MO/NuminaMath-TIR#1000 --max_completion_length 1024 --per_device_train_batch_size 4"
SMALL += " --gradient_accumulation_steps 1 --eval_steps 100 --save_steps 100 --max_length 2048 --num_generations 4"

ROOM = "--sleep_level 1 --offload_model true --offload_optimizer true --gc_collect_after_offload true"

DEFAULTS = {
    "weight_decay": {"model.optimizer.weight_decay": 0.1},
    "adam_beta1": {"model.optimizer.betas": (0.9, 0.95)},
    "lr_scheduler_type": {"model.scheduler": "Cosine"},
    "max_grad_norm": {"trainer.gradient_clip_val": 1.0},
    "split_dataset_ratio": {"data.val_split": 0.01},
    "seed": {"seed_everything": 42},
}
"""The defaults of ms-swift, and the settings here that equal them."""

VALUES: dict[str, Callable[[str], Mapping[str, Any]]] = {
    "num_train_epochs": lambda v: {"trainer.max_epochs": int(v)},
    "learning_rate": lambda v: {"model.optimizer.lr": float(v)},
    "warmup_ratio": lambda v: {"model.scheduler.warmup_ratio": float(v)},
    "lr_scheduler_type": lambda v: {"model.scheduler": v.capitalize()},
    "weight_decay": lambda v: {"model.optimizer.weight_decay": float(v)},
    "max_grad_norm": lambda v: {"trainer.gradient_clip_val": float(v)},
    "logging_steps": lambda v: {"trainer.log_every_n_steps": int(v)},
    "save_steps": lambda v: {"NewestCheckpoints.save_steps": int(v)},
    "save_total_limit": lambda v: {"NewestCheckpoints.save_total_limit": int(v)},
    "save_only_model": lambda v: {"NewestCheckpoints.save_only_model": v == "true"},
    "num_generations": lambda v: {"model.num_generations": int(v)},
    "num_iterations": lambda v: {"model.num_iterations": int(v)},
    "max_completion_length": lambda v: {"model.sampling.max_completion_length": int(v)},
    "max_length": lambda v: {"data.max_prompt_length": int(v)},
    "max_prompt_length": lambda v: {"data.max_prompt_length": int(v)},
    "temperature": lambda v: {"model.sampling.temperature": float(v)},
    "top_p": lambda v: {"model.sampling.top_p": float(v)},
    "beta": lambda v: {"model.objective.beta": float(v)},
    "epsilon": lambda v: {"model.objective.epsilon": float(v)},
    "epsilon_high": lambda v: {"model.objective.epsilon_high": float(v)},
    "dynamic_sample": lambda v: {"model.dynamic_sampling.max_resample_times": 3},
    "max_resample_times": lambda v: {"model.dynamic_sampling.max_resample_times": int(v)},
    "overlong_filter": lambda v: {"model.overlong_filter": "loss"},
    "soft_cache_length": lambda v: {"SoftOverlong.cache_length": int(v)},
    "lora_rank": lambda v: {"model.policy.lora.rank": int(v)},
    "lora_alpha": lambda v: {"model.policy.lora.alpha": float(v)},
    "target_modules": lambda v: {"model.policy.lora.target_modules": None},
    "deepspeed": lambda v: {"trainer.strategy": re.sub(r".*/|\.json", "", v)},
    "dataset": lambda v: {"data.datasets.dataset": v},
    "dataset_num_proc": lambda v: {"data.num_proc": int(v)},
    "model": lambda v: {"model.policy": v},
    "offload_optimizer": lambda v: {"model.offload": ["optimizer"]},
    "adam_beta2": lambda v: {"model.optimizer.betas": (0.9, float(v))},
    "report_to": lambda v: {"trainer.logger": [name for name in ("Wandb",) if "wandb" in v]},
    "attn_implementation": lambda v: {"model.policy.attention": v},
    "gradient_checkpointing": lambda v: {},
}
"""The setting here of a flag's value. Other tests compare flags of `model.rewards`, batches, devices and files."""


@dataclass(frozen=True)
class Script:
    """A script, and the recipe that it became."""

    peer: str
    flags: str
    recipe: str
    rows: Callable[[], list[dict[str, Any]]]
    world_size: int = 1
    version: str | None = None
    recipe_flags: tuple[str, ...] = ()
    """Flags of the script that the recipe lacks, as the recipe's header says."""

    differs: frozenset[str] = frozenset()
    """Flags of which the recipe has another value, as its header or comments say."""

    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def pairs(self) -> dict[str, str]:
        """The flags with their values."""
        found = re.findall(r"--(\w+)((?: (?!--)\S+)*)", self.flags)
        return {name: value.strip() for name, value in found}


SCRIPTS = {
    "1-vlm-r1-rec": Script(
        "VLM-R1",
        "--deepspeed local_scripts/zero3.json --output_dir output --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct "
        "--dataset_name data_config/rec.yaml --image_root images --max_prompt_length 1024 --num_generations 8 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --logging_steps 1 --bf16 true "
        "--torch_dtype bfloat16 --data_seed 42 --report_to wandb --gradient_checkpointing false "
        "--attn_implementation flash_attention_2 --num_train_epochs 2 --run_name rec --save_steps 100 "
        "--save_only_model true --nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr 127.0.0.1 "
        "--master_port 12346",
        "vlm/rec_qwen2.5_vl_3b.yaml",
        refcoco,
        world_size=8,
        recipe_flags=("--data.batch_size=1", "--model.ranks_per_group=4"),
        differs=frozenset({"max_prompt_length"}),  # VLM-R1 ignores it
        defaults={
            "lr_scheduler_type": {"model.scheduler": "Linear"},
            "max_grad_norm": {"trainer.gradient_clip_val": 1.0},
            "beta": {"model.objective.beta": 0.04},
        },
    ),
    "2-swift-async": Script(
        "ms-swift",
        f"--model Qwen/Qwen2.5-7B {SWIFT} {BIG} --vllm_gpu_memory_utilization 0.7 --num_infer_workers 1 "
        "--num_generations 7 --NPROC_PER_NODE 7",
        "numina_qwen2.5_7b.yaml",
        numina,
        world_size=7,
        version="3.3.1",
        defaults=DEFAULTS,
    ),
    "3-swift-colocate": Script(
        "ms-swift",
        f"--model Qwen/Qwen2.5-1.5B {SWIFT} {BIG} --vllm_gpu_memory_utilization 0.5 --num_infer_workers 8 "
        f"--num_generations 8 --NPROC_PER_NODE 8 {ROOM}",
        "numina_qwen2.5_1.5b.yaml",
        numina,
        world_size=8,
        version="3.3.1",
        defaults=DEFAULTS,
    ),
    "4-swift-transformers": Script(
        "ms-swift",
        f"--model Qwen/Qwen2.5-7B {SWIFT} {SMALL}",
        "numina_qwen2.5_7b_lora.yaml",
        numina,
        version="3.3.1",
        defaults=DEFAULTS,
    ),
    "5-swift-vllm": Script(
        "ms-swift",
        f"--model Qwen/Qwen2.5-7B {SWIFT} {SMALL} --use_vllm true --vllm_gpu_memory_utilization 0.5 {ROOM}",
        "numina_qwen2.5_7b_lora.yaml",
        numina,
        version="3.3.1",
        recipe_flags=("--model.offload=[optimizer]",),
        defaults=DEFAULTS,
    ),
    "6-swift-dapo": Script(
        "ms-swift",
        "--model Qwen/Qwen2.5-1.5B --reward_funcs accuracy soft_overlong --max_completion_length 4096 "
        "--soft_cache_length 819 --epsilon 0.2 --epsilon_high 0.28 --dynamic_sample true --overlong_filter true "
        "--max_resample_times 3 --use_vllm true --vllm_gpu_memory_utilization 0.6 --num_infer_workers 8 "
        "--train_type full --torch_dtype bfloat16 --dataset AI-MO/NuminaMath-TIR#5000 --num_train_epochs 1 "
        "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --learning_rate 1e-6 --eval_steps 1000 "
        "--save_steps 1000 --save_total_limit 2 --logging_steps 5 --warmup_ratio 0.05 --dataloader_num_workers 4 "
        "--dataset_num_proc 4 --num_generations 8 --temperature 1.0 --top_p 1.0 --deepspeed zero2 "
        "--log_completions true --num_iterations 1 --report_to tensorboard wandb --beta 0.0 --NPROC_PER_NODE 8",
        "numina_qwen2.5_1.5b_dapo.yaml",
        numina,
        world_size=8,
        version="3.3.1",
        differs=frozenset({"num_train_epochs"}),  # with dynamic sampling the end of an epoch is not known: max_steps
        defaults=DEFAULTS,
    ),
    "7-trl-gsm8k": Script(
        "TRL",
        "--model_name_or_path meta-llama/Llama-3.2-1B-Instruct --dtype bfloat16 "
        "--attn_implementation flash_attention_2 --dataset_name openai/gsm8k --dataset_config main "
        "--learning_rate 5e-6 --adam_beta1 0.9 --adam_beta2 0.99 --weight_decay 0.1 --lr_scheduler_type cosine "
        "--logging_steps 1 --bf16 true --per_device_train_batch_size 1 --gradient_accumulation_steps 4 "
        "--num_generations 4 --max_completion_length 786 --num_train_epochs 1 --save_steps 100 --save_total_limit 1 "
        "--max_grad_norm 0.1 --log_on_each_node false",
        "gsm8k_llama3.2_1b.yaml",
        gsm8k,
        # Of TRL before 1.0: no rows of its newest configuration.
        defaults={
            "beta": {"model.objective.beta": 0.04},
            "loss_type": {"model.objective.aggregate": "sequence"},
            "warmup_steps": {"model.scheduler.warmup_ratio": 0.1},
        },
    ),
    "8-swift-32b": Script(
        "ms-swift",
        "--model deepseek-ai/DeepSeek-R1-Distill-Qwen-32B --reward_funcs accuracy --system /grpo/prompt.txt "
        "--use_vllm true --vllm_mode colocate --train_type lora --torch_dtype bfloat16 "
        "--dataset AI-MO/NuminaMath-TIR#1000 --output_dir /output --max_completion_length 2080 --num_train_epochs 3 "
        "--per_device_train_batch_size 1 --per_device_eval_batch_size 8 --learning_rate 5e-6 "
        "--gradient_accumulation_steps 8 --num_generations 8 --deepspeed zero3 --beta 0.01 --NPROC_PER_NODE 8",
        "numina_r1_qwen_32b_lora_zero3.yaml",
        numina,
        world_size=8,
        defaults=DEFAULTS
        | {"lora_rank": {"model.policy.lora.rank": 8}, "temperature": {"model.sampling.temperature": 0.9}},
    ),
}

each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


def row_of(script: Script, flag: str) -> TableRow:
    """The row of a flag in its trainer's table."""
    found = [row for row in ROWS if row.heading == script.peer and any(fnmatchcase(flag, name) for name in row.names())]
    assert len(found) == 1, f"{flag} has {len(found)} rows"
    return found[0]


def look_up(settings: Any, key: str) -> Any:
    """The value of a key in a recipe; of `NewestCheckpoints.save_steps` in the callback or reward of that class."""
    owner, _, argument = key.partition(".")
    if owner[0].isupper():
        parts = [*settings.trainer.callbacks, *settings.model.rewards]
        (found,) = [part for part in parts if part.class_path.endswith(f".{owner}")]
        return found.init_args.get(argument)
    if key == "data.datasets.dataset":
        entries = settings.data.datasets
        return entries[0]["dataset"]
    value: Any = settings
    for name in key.split("."):
        inner = value.get("init_args") if hasattr(value, "get") else None
        value = inner.get(name) if inner is not None and name in inner else value.get(name)
    if key == "model.policy":
        return value.init_args.name if hasattr(value, "init_args") else value
    if key == "model.scheduler":
        return value.class_path.rpartition(".")[2]
    if key == "trainer.logger":
        return [name for name in ("Wandb",) if any(name in logger.class_path for logger in value)]
    return value


@each_script
def test_every_flag_of_a_script_has_a_row(script):
    for flag in [*script.pairs(), *script.defaults]:
        row_of(script, flag)


@SLOW
@each_script
def test_the_recipe_has_what_the_page_makes_of_the_flags(script):
    settings = parse(["--config", str(RECIPES / script.recipe), *script.recipe_flags])
    checked = 0
    given = {flag: VALUES[flag](value) for flag, value in script.pairs().items() if flag in VALUES}
    for flag, wanted in {**script.defaults, **given}.items():
        if flag in script.differs:
            continue
        row = row_of(script, flag)
        for key, value in wanted.items():
            assert key in f"{row.cells[1]} {row.cells[-1]}" or key.rpartition(".")[0] in row.names(1), (flag, key)
            found = look_up(settings, key)
            assert (tuple(found) if isinstance(value, tuple) else found) == value, (flag, key)
            checked += 1
    assert checked >= 10


REWARDS = {"accuracy": "Accuracy", "format": "Format", "soft_overlong": "SoftOverlong"}


@few(2)
@pytest.mark.parametrize("script", [script for script in SCRIPTS.values() if script.peer == "ms-swift"])
def test_the_rewards_are_those_of_reward_funcs(script):
    settings = parse(["--config", str(RECIPES / script.recipe)])
    wanted = [REWARDS[name] for name in script.pairs()["reward_funcs"].split()]
    assert [reward.class_path.rpartition(".")[2] for reward in settings.model.rewards] == wanted
    stated = row_of(script, "reward_funcs").cells[-1]
    assert all(f"`{theirs}` is `{ours}`" in stated for theirs, ours in REWARDS.items())


@few(2, slow=True)
@each_script
def test_the_batches_are_those_of_the_script(script):
    """Those of its flags; ms-swift 3.3.1 changes one of them if vLLM sleeps, as the recipes' headers say."""
    settings = parse(["--config", str(RECIPES / script.recipe), *script.recipe_flags])
    flags, names = script.pairs(), ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    numbers = {name: int(flags[name]) for name in names if name in flags}
    given = (
        {"gradient_accumulation_steps": 1}
        | numbers
        | {"world_size": script.world_size}
        | ({"version": script.version} if script.version else {})
    )
    args = ["--from", script.peer.lower(), *(f"--{name}={value}" for name, value in given.items())]
    wanted, differences = translate(parse_script(args))
    assert not differences
    assert settings.data.batch_size == wanted.batch_size
    assert settings.model.num_generations == wanted.num_generations
    assert settings.model.ranks_per_group == wanted.ranks_per_group
    per_update = numbers["per_device_train_batch_size"] * script.world_size * given["gradient_accumulation_steps"]
    prompts = settings.data.batch_size * script.world_size // settings.model.ranks_per_group
    assert prompts * settings.model.num_generations == per_update * settings.model.updates_per_rollout
    assert settings.trainer.devices == script.world_size
    # Micro-batches are no larger than there.
    of_rank = settings.data.batch_size * settings.model.num_generations / settings.model.ranks_per_group
    assert of_rank / settings.trainer.accumulate_grad_batches <= max(4, numbers["per_device_train_batch_size"])


# -------------------------------------------------------------------------------------------------------------- running

ON_A_CPU = {
    "cache_length: 819": "cache_length: 2",
    "max_prompt_length: 256": "max_prompt_length: 600",
    "attention: flash_attention_2": "attention: auto",
}
"""Texts of a recipe that do not fit a tiny model, and their replacements."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield tmp_path
    finish_wandb()


def tiny_policy(*, is_multimodal: bool) -> None:
    """A tiny policy with a chat template, in the folder `policy`."""
    if is_multimodal:
        model, processor = tiny_vlms.build("qwen2_5_vl")
        model.save_pretrained("policy")
        processor.save_pretrained("policy")
        return
    tiny_model("qwen2").save_pretrained("policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("policy")


def runs(script: Script, folder: Path) -> None:
    """Two optimizer steps of the recipe on one CPU process: the devices, the model and the lengths are replaced."""
    tiny_policy(is_multimodal=script.peer == "VLM-R1")
    rows = script.rows()
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = (RECIPES / script.recipe).read_text()
    for long, short in ON_A_CPU.items():
        text = text.replace(long, short)
    Path("recipe.yaml").write_text(text)
    has_split = "val_split" in text
    accumulate = int(re.findall(r"accumulate_grad_batches: (\d+)", text)[0])
    main(
        [
            "fit",
            "--config=recipe.yaml",
            *script.recipe_flags,
            "--model.policy.init_args.name=policy",
            f"--data.datasets={json.dumps([{'json_path': 'rows.jsonl'}])}",
            "--data.num_proc=1",
            "--model.sampling.max_completion_length=6",
            *([] if has_split else [f"--data.val_datasets={json.dumps([{'json_path': 'rows.jsonl'}])}"]),
            "--trainer.limit_val_batches=1",
            f"--trainer.val_check_interval={accumulate}",
            "--trainer.log_every_n_steps=1",
            "--trainer.accelerator=cpu",
            "--trainer.max_steps=2",
            *ONE_PROCESS,
        ]
    )
    steps = logged_steps(folder / "runs")
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
    (checkpoint,) = (folder / "runs").rglob("step=2.ckpt")
    assert checkpoint.stat().st_size > 0


FAST = ("4-swift-transformers", "7-trl-gsm8k")


@SLOW
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in SCRIPTS])
def test_a_script_trains_two_steps_on_the_columns_of_its_data(folder, name):
    runs(SCRIPTS[name], folder)
