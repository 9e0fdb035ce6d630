"""`grpo-lightning plan`: without weights, from a configuration or another trainer's flags."""

import dataclasses
import json
import logging
import re
import socket
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from jsonargparse import Namespace

from grpo_lightning.cli.plan import command as plan
from grpo_lightning.cli.plan.batches import BatchPlan
from grpo_lightning.cli.plan.command import SIMILAR_FLAGS, parse_script
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.local_engine import LocalEngine
from tests.cli.plan.real_shapes import llama_1b, published
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW

# jsonargparse from 4.49 on has another name for the method that `instantiate` calls; the old one serves all versions.
pytestmark = pytest.mark.filterwarnings("ignore:[\\s\\S]*instantiate_classes")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe with a policy folder that has a config and a tokenizer and no weights, and 10 prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    tiny_model("qwen2").config.save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    rows = [{"prompt": "x" * (i + 1), "answer": "1"} for i in range(10)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(trainer=(), data=(), **model):
        content = {
            "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 6, **dict(trainer)},
            "data": {"datasets": [{"json_path": "rows.jsonl"}], "batch_size": 2, **dict(data)},
            "model": {
                "policy": "policy",
                "rewards": [{"class_path": "grpo_lightning.rewards.ExactMatch"}],
                "num_generations": 4,
                "sampling": {"max_completion_length": 6},
                **model,
            },
        }
        Path("recipe.yaml").write_text(yaml.safe_dump(content))
        return ["--config", "recipe.yaml"]

    return write


@pytest.fixture
def said(capsys):
    """Return a function that runs a command line and returns its output, lines joined."""

    def run(args):
        plan.run(args)
        return " ".join(capsys.readouterr().out.split())

    return run


# ----------------------------------------------------------------------------------------------------------- the plan


@SLOW
def test_a_plan_without_weights(recipe, said, monkeypatch):
    """The policy's folder has none, and nothing asks for them."""
    import transformers

    assert not list(Path("policy").rglob("*.safetensors"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    out = said(recipe(trainer={"accumulate_grad_batches": 2}, updates_per_rollout=2, num_iterations=3))
    assert "2 prompts per rank x 1 rank x 4 completions = 8 completions per rollout" in out
    assert "splits its 8 into 2 x 2 = 4 micro-batches" in out
    assert "of about 2 completions" in out
    assert "used for 2 x 3 = 6 optimizer steps" in out
    assert "10 prompts: 5 rollouts = 30 optimizer steps per epoch" in out
    assert "6 optimizer steps, 2 prompts sampled for, 8 completions, 0.2 epochs (max_steps 6)" in out
    assert "No validation data" in out
    assert "Longest prompt: 10 tokens (the longest of all 10 prompts" in out
    assert "163,904 weights, 4 layers" in out
    assert "│ 8 completions x 5 tokens, 4 layers, each prompt once" in out
    assert not list(Path().rglob("runs*")), "a plan writes nothing"


@SLOW
def test_what_dynamic_sampling_leaves_open_is_not_stated_as_known(recipe, said):
    out = said(recipe(dynamic_sampling={"max_resample_times": 2}))
    assert "10 prompts: up to 5 rollouts = 5 optimizer steps per epoch" in out
    assert "may take up to 3 times the prompts" in out
    assert "The run: 6 optimizer steps, 12 prompts trained on, 48 completions, at least 1.2 epochs (max_steps 6)" in out
    out = said(recipe(trainer={"max_steps": -1, "max_epochs": 2}, dynamic_sampling={}))
    assert "The run: up to 10 optimizer steps, 20 prompts trained on, 80 completions, 2 epochs (max_epochs 2)" in out


def test_data_smaller_than_a_rollout(recipe, said):
    """The lines about batches and about the length name the same numbers."""
    data = {"datasets": [{"json_path": "rows.jsonl", "sampling_strategy": "first:1"}]}
    out = said(recipe(trainer={"max_steps": 3}, data=data))
    assert "2 prompts per rank x 1 rank = 2 prompts, but the data have only 1" in out
    assert "only 1: 1 prompt x 4 completions = 4 completions per rollout" in out
    assert "Give more data, or lower data.batch_size to at most 1." in out
    assert "splits its 4 into" in out
    assert "each on 4 completions over all ranks" in out
    assert "3 optimizer steps, 3 prompts sampled for, 12 completions, 3 epochs" in out
    assert "8 completions" not in out


def test_overrides_of_fit_and_ranks(recipe, said):
    flags = ["--model.num_generations=8", "--devices=2", "--nodes=3", "--prompt_tokens=33"]
    data = {"val_datasets": [{"json_path": "rows.jsonl", "sampling_strategy": "first:3"}]}
    out = said([*recipe(data=data), *flags])
    assert "2 prompts per rank x 6 ranks = 12 prompts, but the data have only 10" in out
    assert "only 10: 10 prompts x 8 completions = 80 completions per rollout" in out
    assert "2 per node x 3 node(s)" in out
    assert "10 prompts: 1 rollout = 1 optimizer step per epoch" in out
    assert "Validation on 3 prompts every epoch." in out
    assert "Longest prompt: 33 tokens (set by --prompt_tokens)" in out
    assert "gradient buckets" in out  # more than one rank: DDP


def test_steps_are_those_of_a_real_run(recipe, said):
    """The same recipe, run: with weights, by the same parser."""
    from grpo_lightning.cli import main

    args = recipe(trainer={"max_steps": 5, "enable_progress_bar": False, "logger": False}, updates_per_rollout=2)
    out = said(args)
    planned = int(re.search(r"The run: (\d+) optimizer steps", out)[1])
    assert "max_steps 5 ends inside a cycle" in out
    tiny_model("qwen2").save_pretrained("policy")
    trained = main(["fit", *args, "--trainer.enable_checkpointing=false"])
    assert trained.trainer.global_step == planned == 6


@SLOW
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(
    ("settings", "steps", "says"),
    [
        ({"fast_dev_run": 1}, 2, "(fast_dev_run 1)"),
        ({"overfit_batches": 2, "max_steps": -1, "max_epochs": 3}, 6, "(max_epochs 3)"),
    ],
)
def test_debugging_runs_are_as_long_as_planned(recipe, said, settings, steps, says):
    """10 prompts by 2 would be 5 rollouts of 2 steps."""
    from grpo_lightning.cli import main

    args = recipe(trainer={"enable_progress_bar": False, "logger": False, **settings}, updates_per_rollout=2)
    out = said(args)
    assert f"1 rollout = 2 optimizer steps per epoch. The run: {steps} optimizer steps" in out
    assert says in out
    tiny_model("qwen2").save_pretrained("policy")
    assert main(["fit", *args, "--trainer.enable_checkpointing=false"]).trainer.global_step == steps


@SLOW
def test_a_limit_in_time(recipe, said):
    limit = {"max_time": "00:01:00:00"}
    assert "The length of the run depends on the time limit (max_time " in said(
        recipe(trainer={"max_steps": -1, **limit})
    )
    assert ": fewer if the time limit is reached first)." in said(recipe(trainer=limit))
    assert "The run has no end" in said(recipe(trainer={"max_steps": -1, "max_epochs": -1}))


@SLOW
def test_prompts_that_fit_refuses_are_not_planned(recipe, said):
    """256 positions; the longest prompt has 10 tokens."""
    assert "Longest completion: 246" in said(recipe(sampling={"max_completion_length": 246}))
    with pytest.raises(ValueError, match=r"has 10 tokens.* exceeds the policy's 256 positions"):
        said(recipe(sampling={"max_completion_length": 247}))
    with pytest.raises(ValueError, match=r"--prompt_tokens 251 plus .*length 6 are more than .* 256 positions"):
        said([*recipe(), "--prompt_tokens=251"])
    Path("long.jsonl").write_text(json.dumps({"prompt": "x" * 255, "answer": "1"}))
    with pytest.raises(ValueError, match="has 255 tokens"):
        said(recipe(data={"val_datasets": [{"json_path": "long.jsonl"}]}))


class OwnModule(GRPOLightningModule):
    """With a setting more."""

    def __init__(self, *args, own_setting: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        assert own_setting == 3


@SLOW
def test_a_module_of_ones_own_is_planned(recipe, capsys):
    from grpo_lightning.cli import main

    main(["plan", *recipe(), "--model.own_setting=3"], OwnModule)
    assert "6 optimizer steps" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", *recipe(), "--model.own_setting=3"])


@SLOW
def test_memory_in_gib_for_a_published_model(recipe, said):
    """Llama-3.2-1B in float32: 1,235,814,400 x 4 bytes are 4.60 GiB; AdamW's states twice that. No tokenizer there."""
    llama_1b().save_pretrained("llama")
    out = said(recipe(policy="./llama", objective={"beta": 0.0}, trainer={"accumulate_grad_batches": 4}))
    assert "Longest prompt: 512 tokens (assumed, without images, because the policy's tokenizer cannot be loaded" in out
    assert "1,235,814,400 weights, 16 layers, 4 bytes each" in out
    assert re.search(r"weights │ 4\.60 │ 4\.60 │ 4\.60 │", out)
    assert re.search(r"gradients │ │ 4\.60 │ 4\.60 │", out)
    assert re.search(r"optimizer states │ 9\.21 │ 9\.21 │ 9\.21 │ 8 bytes per trained weight", out)
    assert "│ reference │" not in out


@pytest.mark.parametrize(
    ("max_rows", "shared", "in_waves"),
    [
        (None, (20, 5, 5), (20, 5, 5)),
        (9, (9, 5, 2), (8, 2, 2)),  # e.g. 5 open rows of 4 prompts, and the 4 rows of the newest prompt
        (6, (6, 3, 1), (4, 1, 1)),
        (3, (4, 1, 1), (4, 1, 1)),
        (100, (20, 5, 5), (20, 5, 5)),
    ],
)
def test_the_engines_rows_bound_what_is_decoded_at_once(max_rows, shared, in_waves):
    batches = BatchPlan(5, 4)
    assert plan.sampling_size(LocalEngine(max_rows), batches, shares_prompts=True) == shared
    assert plan.sampling_size(LocalEngine(max_rows), batches, shares_prompts=False) == in_waves
    assert plan.sampling_size(object(), batches, shares_prompts=True) == (0, 0, 0)


# --------------------------------------------------------------------------------------------------------- many devices


def policy_of(**settings):
    return {"class_path": "grpo_lightning.PolicyLoader", "init_args": {"name": "./llama", **settings}}


@SLOW
def test_lora_is_planned(recipe, said):
    """Llama-3.2-1B in 16 bits is 2.30 GiB; 11,272,192 weights of adapters 0.04 in float32, their states twice that."""
    llama_1b().save_pretrained("llama")
    out = said(recipe(policy=policy_of(lora={"rank": 16}, dtype="bfloat16")))
    assert "11,272,192 are trained (0.91%)" in out
    assert re.search(r"weights │ 2\.30 │ 2\.30 │ 2\.30 │ 2 bytes per weight", out)
    assert re.search(r"adapters │ 0\.04 │ 0\.04 │ 0\.04 │ 11,272,192 LoRA weights, 4 bytes each", out)
    assert re.search(r"optimizer states │ 0\.08 │", out)
    assert "│ reference │" not in out
    uncounted = "Activations of the adapters are not counted: 32-bit adapters in a 16-bit model add up to half of"
    assert uncounted in out
    assert uncounted not in said(recipe(policy=policy_of(dtype="bfloat16")))
    out = said(recipe(policy=policy_of(lora={"rank": 16}, dtype="bfloat16", quantization="4bit")))
    # 973,078,528 weights of linear layers in 0.516 bytes, the others in 2
    assert re.search(r"weights │ 0\.96 │ 0\.96 │ 0\.96 │ 973,078,528 in 0\.516 bytes, the others in 2", out)


@SLOW
def test_eight_bit_states_are_counted_without_a_gpu(recipe, said):
    llama_1b().save_pretrained("llama")
    for kind in ("AdamW8bit", "PagedAdamW8bit"):
        out = said(recipe(policy=policy_of(), optimizer={"class_path": f"grpo_lightning.optimizers.{kind}"}))
        assert re.search(r"optimizer states │ 2\.34 │ 2\.34 │ 2\.34 │ 2\.03 bytes per trained weight", out)
        assert ("paged optimizer" in out) == kind.startswith("Paged")


def test_frozen_layers_are_planned(recipe, said):
    out = said(
        recipe(
            policy={"class_path": "grpo_lightning.PolicyLoader", "init_args": {"name": "policy", "freeze_layers": 2}}
        )
    )
    assert re.search(r"163,904 weights.* 8\d,\d{3} are trained \(5\d", out)
    assert "a frozen copy of the trainable parameters" in out


@SLOW
def test_seventy_billion_weights_are_planned_in_seconds(recipe, said, capsys):
    """2 x 8 devices with all states on the CPU: sampling gathers 131 GiB for each token, and the plan says so."""
    published("meta-llama/Llama-3.3-70B-Instruct").save_pretrained("llama")
    trainer = {
        **{"accelerator": "gpu", "devices": 8, "num_nodes": 2},
        **{"strategy": "zero3_offload", "precision": "bf16-mixed"},
    }
    args = recipe(policy=policy_of(), sampling={"max_completion_length": 1024}, trainer=trainer)
    out = said(args)
    assert "70,553,706,496 weights, 80 layers" in out
    # 24 bytes a weight over 16 devices: weights, reference 2 each; masters, their gradients, sums 4 each; AdamW 8.
    assert "On the CPU, for every device of a node: 98.56 GiB (weights 8.21" in out
    assert "The full weights, 131.4 GiB, stay sharded" in out
    assert "Sampling is slow: every device gathers all 131.4 GiB of weights, layer by layer, for each of up to" in out
    gathered = ["--model.engine=grpo_lightning.LocalEngine", "--model.engine.gather_for_generation=true"]
    with pytest.raises(SystemExit):
        said([*args, *gathered, "--device_gib=80"])
    captured = capsys.readouterr()
    assert re.search(r"gathered weights\s+│\s+~131\.4", captured.out)
    sampling = next(line for line in captured.err.splitlines() if line.startswith("sampling: "))
    assert "model.engine.gather_for_generation: false" in sampling
    assert "AdamW8bit" not in sampling  # the optimizer is on the CPU already


def trainer(**changes):
    return Namespace(**({"devices": "auto", "num_nodes": 1, "accelerator": "cpu"} | changes))


@pytest.mark.parametrize(("devices", "ranks"), [("auto", 1), (-1, 1), (3, 3), ("2", 2), ("0,1,2", 3), ([0, 1], 2)])
def test_devices_as_the_trainer_takes_them(devices, ranks):
    given = trainer(devices=devices, num_nodes=2)
    assert plan.ranks_of(given, None, None).world_size == 2 * ranks
    assert plan.ranks_of(given, None, 1).world_size == ranks
    assert plan.ranks_of(given, 5, 1).world_size == 5
    with pytest.raises(ValueError, match="at least one device and one node, got 0 and 2"):
        plan.ranks_of(given, 0, None)


@pytest.mark.parametrize(
    ("accelerator", "devices", "line"),
    [
        ("gpu", 4, "4 of this machine's 8 devices are idle: trainer.devices is 4. Set it to 8 or auto"),
        ("auto", [0, 1, 2, 3, 4, 5, 6], "1 of this machine's 8 devices is idle"),
        ("gpu", "auto", ""),
        ("cpu", 4, ""),
    ],
)
def test_idle_devices_are_named(monkeypatch, accelerator, devices, line):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    given = trainer(accelerator=accelerator, devices=devices)
    idle = plan.ranks_of(given, None, None).idle
    assert idle.startswith(line)
    assert bool(idle) == bool(line)
    assert not plan.ranks_of(given, 2, None).idle  # another machine
    assert plan.ranks_of(trainer(accelerator="gpu"), None, 2).world_size == 16


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, r"SLURM_TASKS_PER_NODE is 8\(x2\),4. Use 4 on each node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, "SLURM_STEP_TASKS_PER_NODE is 1,2"),
        ({"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE=12 is no multiple of LOCAL_WORLD_SIZE=8"),
    ],
)
def test_nodes_of_unequal_size_are_refused(monkeypatch, environment, error):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"same number of devices.*{error}"):
        plan.ranks_of(trainer(), None, None)


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_TASKS_PER_NODE": "8(x3)"}, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"WORLD_SIZE": "16"}],
)
def test_nodes_of_equal_size_pass(environment):
    plan.check_environment(environment)


# --------------------------------------------------------------------------------------------------- what is not there


@SLOW
def test_data_and_policy_that_the_run_builds(recipe, said):
    Path("policy").rename("later")
    Path("rows.jsonl").rename("later.jsonl")
    Path("build_all.py").write_text(
        "import shutil\n\n\ndef build():\n"
        "    shutil.copy('later.jsonl', 'rows.jsonl')\n    shutil.copytree('later', 'made')\n"
    )
    args = recipe(policy="./made", data={"prepare": "build_all.build"})
    out = said(args)
    assert "number of prompts is unknown: data.prepare has not built the files yet" in out
    assert "6 optimizer steps, 12 prompts sampled for" in out
    assert "Memory Unknown: model.policy './made'" in out
    assert "add --prepare" in out
    out = said([*args, "--prepare"])
    assert "10 prompts: 5 rollouts" in out
    assert "163,904 weights" in out


@SLOW
def test_what_is_missing_without_prepare_is_an_error(recipe, said):
    with pytest.raises(FileNotFoundError, match="not/there/yet"):
        said(recipe(policy="./not/there/yet"))
    Path("rows.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
        said(recipe())


@SLOW
def test_bad_settings_are_errors(recipe, said):
    with pytest.raises(ValueError, match=r"model\.num_generations must be at least 2, got 1"):
        said(recipe(num_generations=1))
    with pytest.raises(ValueError, match="--prompt_tokens must be at least 1, got 0"):
        said([*recipe(), "--prompt_tokens=0"])


# --------------------------------------------------------------------------------------------------------- translation


def test_translation_is_printed_as_a_configuration(capsys):
    flags = "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --num_generations 4 --world_size 1"
    plan.run(["--from", "trl", *flags.split()])
    out = capsys.readouterr().out
    assert yaml.safe_load(re.search(r"^trainer:\n(?:.+\n)+", out, re.MULTILINE)[0]) == {
        "trainer": {"accumulate_grad_batches": 4},
        "data": {"batch_size": 1},
        "model": {"num_generations": 4, "updates_per_rollout": 1, "num_iterations": 1},
    }
    assert "Every update trains on as many prompts and completions" in out


def test_flags_of_a_script_that_are_not_translated_are_named(capsys):
    others = ["--beta", "0.04", "--loss_type=dapo", "--bf16", *(f"{name}=4" for name in SIMILAR_FLAGS)]
    plan.run(["--from", "trl", "--per_device_train_batch_size", "8", *others])
    out = " ".join(capsys.readouterr().out.split())
    names = ", ".join(["--beta", "--loss_type", "--bf16", *SIMILAR_FLAGS])
    assert f"{names}: docs/migrating.md says for each flag of trl what replaces it." in out


@SLOW
def test_every_flag_of_trl_is_taken():
    for field in dataclasses.fields(pytest.importorskip("trl").GRPOConfig):
        parse_script(["--from", "trl", f"--{field.name}=4"])


def test_a_misspelled_flag_of_a_script_is_an_error(capsys):
    with pytest.raises(SystemExit):
        plan.run(["--from", "trl", "--per_device_train_batchsize=8"])
    assert "Did you mean --per_device_train_batch_size?" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--from", "verl"], ["--from", "trl", "--config", "recipe.yaml"], ["--help"]])
def test_usage(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan.run(args)
    assert stopped.value.code == (0 if args == ["--help"] else 2)
    printed = capsys.readouterr()
    assert "usage: grpo-lightning plan" in printed.out + printed.err


def test_a_harmless_warning_of_another_package_does_not_break_the_plan(recipe, said, monkeypatch, caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "filters", [])
    said(recipe())
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'.")
    assert "gemm_4bit_forward" not in caplog.text


def test_an_assumed_capacity_is_called_assumed(recipe, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = recipe(trainer={"accelerator": "gpu", "devices": 2, "strategy": "zero3", "precision": "bf16-mixed"})
    out = said(args)
    assert "of a device's 80 GiB (assumed; set it with --device_gib N) are free then" in out
    out = said([*args, "--device_gib=40"])
    assert "of a device's 40 GiB are free then" in out
    assert "assumed" not in out


# ------------------------------------------------------------------------------------------- without hub, without data


def test_a_published_policy_is_planned_without_hub_and_data(recipe, said):
    """Neither the model nor the data set can be had here; of the policy, only the number of its weights is checked."""
    data = {"datasets": [{"dataset": "openai/gsm8k", "subset": "main"}]}
    out = said([*recipe(policy="Qwen/Qwen2.5-1.5B-Instruct", data=data), "--prompt_tokens", "300"])
    assert "Qwen/Qwen2.5-1.5B-Instruct cannot be loaded here: using the sizes known to this package." in out
    assert "2 prompts per rank x 1 rank x 4 completions = 8 completions per rollout" in out
    assert "The number of prompts is unknown: the data do not exist (dataset 'openai/gsm8k'" in out
    assert "Longest prompt: 300 tokens (set by --prompt_tokens)." in out
    assert "1,543,714,304 weights, 28 layers" in out


def without_network(monkeypatch):
    """Let every connection fail as it does without a network. Returns: the list of the hosts that were looked up."""
    hosts = []

    def refuse(host, *args, **kwargs):
        hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return hosts


def test_without_a_network_the_hub_is_asked_once(recipe, said, monkeypatch, capsys):
    hosts = without_network(monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"model\.policy 'nobody/knows-7B' cannot be loaded"):
        said(recipe(policy="nobody/knows-7B"))
    out = " ".join(capsys.readouterr().out.split())
    assert len(hosts) == 1
    assert out.count("cannot be reached ([Errno -2] Name or service not known)") == 1
    assert "HF_HUB_OFFLINE=1 skips the wait" in out
    assert not huggingface_hub.constants.HF_HUB_OFFLINE, "the mode of later commands in this process is unchanged"


def test_a_policy_in_a_folder_needs_no_hub(recipe, said, monkeypatch):
    hosts = without_network(monkeypatch)
    said(recipe())
    assert hosts == []


def test_a_missing_tokenizer_is_the_reason_that_prompts_are_not_measured(recipe, said):
    data = {"max_prompt_length": 64}
    args = recipe(policy="Qwen/Qwen2.5-7B-Instruct", data=data)
    out = said([*args, "--prompt_tokens", "300"])
    assert "The number of prompts is unknown: data.max_prompt_length 64 needs a tokenizer" in out
    assert "the data do not exist" not in out


def test_without_a_tokenizer_the_limit_of_the_prompts_is_the_length(recipe, said):
    args = recipe(policy="Qwen/Qwen2.5-7B-Instruct")
    out = said([*args, "--data.max_prompt_length=384"])
    assert "The number of prompts is unknown: data.max_prompt_length 384 needs a tokenizer" in out
    assert (
        "Longest prompt: 384 tokens (the limit data.max_prompt_length, because the policy's tokenizer cannot be "
        "loaded). Longest completion: 6." in out
    )
    assert "7,615,616,512 weights, 28 layers" in out
    out = said([*args, "--data.max_prompt_length=384", "--prompt_tokens=300"])
    assert "Longest prompt: 300 tokens (set by --prompt_tokens)." in out


def test_an_assumed_length_is_followed_by_the_error_of_the_tokenizer(recipe, said):
    out = said(recipe(policy="Qwen/Qwen2.5-1.5B-Instruct"))
    assert "(assumed, without images, because the policy's tokenizer cannot be loaded; set another length with" in out
    assert "--prompt_tokens N). Longest completion: 6." in out
    assert "The tokenizer: model.policy 'Qwen/Qwen2.5-1.5B-Instruct' cannot be loaded" in out


def test_data_that_are_not_there_are_an_error_without_a_length(recipe, said):
    with pytest.raises(
        FileNotFoundError, match=r"no file .*there\.jsonl.* To plan without the data, .*--prompt_tokens"
    ):
        said(recipe(data={"datasets": [{"json_path": "there.jsonl"}]}))


def test_batches_are_planned_where_the_policy_is_not_known(recipe, said, capsys):
    with pytest.raises(FileNotFoundError, match=r"model\.policy 'nobody/knows-7B' cannot be loaded"):
        said([*recipe(policy="nobody/knows-7B"), "--prompt_tokens=300"])
    assert "8 completions per rollout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--device_gib", "-3"], r"--device_gib must be above 0, got -3\."),
        (["--device_gib=nan"], r"--device_gib must be above 0, got nan\."),
        (["--devices=0"], r"--devices must be above 0, got 0\."),
        (["--nodes", "-1"], r"--nodes must be above 0, got -1\."),
        (["--devicegib", "3"], r"There is no flag --devicegib\. Did you mean --device_gib\?"),
        (["--prompt-tokens=300"], r"There is no flag --prompt-tokens\. Did you mean --prompt_tokens\?"),
    ],
)
def test_wrong_flags_of_plan_itself_are_refused(recipe, said, flags, problem):
    with pytest.raises(ValueError, match=problem):
        said([*recipe(), *flags])


def test_the_copies_of_hybrid_sharding_are_planned(recipe, said):
    """The states are divided among the devices of a copy, and a number of copies that `fit` refuses is refused here."""
    copies = {"class_path": "grpo_lightning.FSDP2Strategy", "init_args": {"num_replicas": 2}}
    args = [*recipe(trainer={"strategy": copies}, data={"batch_size": 1}), "--prompt_tokens=20"]
    found = said([*args, "--devices=4", "--nodes=2"])
    assert "of the trainable parameters, over 4 ranks" in found
    assert "over 8 ranks" not in found
    with pytest.raises(ValueError, match=r"strategy\.num_replicas must divide .* got 2 for 3 device"):
        said([*args, "--devices=3"])


@SLOW
def test_what_does_not_fit_names_what_would(recipe, said, capsys):
    """An update of 8 x 306 tokens needs activations; with fewer of them and nothing left to save, other levers."""
    args = [*recipe(policy="Qwen/Qwen2.5-1.5B", trainer={"accelerator": "auto"}), "--prompt_tokens=300"]
    assert "It fits" in said([*args, "--device_gib=80"])
    with pytest.raises(SystemExit) as ended:
        said([*args, "--device_gib=20"])
    assert ended.value.code == 1
    output = capsys.readouterr()
    found = output.err
    assert "error: It does not fit: " in found
    assert "It does not fit" not in output.out, "once is enough"
    update = next(line for line in found.splitlines() if line.startswith("update: "))
    assert "policy.activation_checkpointing: layers" in update
    assert "policy.lora" in update
    sparing = ["--model.objective.beta=0", "--model.policy.activation_checkpointing=layers"]
    policy = {"class_path": "PolicyLoader", "init_args": {"name": "Qwen/Qwen2.5-1.5B"}}
    args = [*recipe(policy=policy, trainer={"accelerator": "auto"}), "--prompt_tokens=300", *sparing]
    with pytest.raises(SystemExit):
        said([*args, "--device_gib=8"])
    found = capsys.readouterr().err
    assert "activation_checkpointing" not in found
    assert "objective.beta" not in found
    assert "policy.lora" in found


def test_a_run_on_the_cpu_is_not_refused_for_a_device_it_does_not_use(recipe, said, monkeypatch):
    class Device:
        name, total_memory = "Tiny GPU", 2**10

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    assert "It does not fit" in said(recipe())
