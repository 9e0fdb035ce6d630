"""The rows of docs/migrating.md hold: every flag has one, defaults are as stated, and equivalents compute the same."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import transformers
import yaml
from torch.testing import assert_close
from transformers.generation.utils import GenerationMixin
from transformers.models.mixtral import modeling_mixtral as mixtral

from grpo_lightning import optimizers, rewards, schedules
from grpo_lightning.callbacks import NewestCheckpoints
from grpo_lightning.cli.main import parse
from grpo_lightning.core.types import Completion, Group, MicroBatch, Prompt, SamplingParams
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.functional import group_relative_advantages, normalized_sum, router_load
from grpo_lightning.objective import Objective, StepCounts
from grpo_lightning.policy.completion_logprobs import TokenLogprobs
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.rollout.token_sampler import NextToken, TokenSettings
from grpo_lightning.training.router_loss import RouterLoss
from grpo_lightning.training.token_selection import select_tokens
from tests.arguments.registry import CASES
from tests.helpers.doc_keys import SETTINGS, class_named
from tests.helpers.pages import TableRow, read, tables
from tests.helpers.paths import TESTS
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and transformers are not ours to fix

PEERS = ("VLM-R1", "ms-swift", "TRL")
ROWS = [row for row in tables(read("migrating.md")) if row.heading in PEERS]


def rows_of(peer: str) -> list[TableRow]:
    return [row for row in ROWS if row.heading == peer]


def has_key(row: TableRow) -> bool:
    return row.cells[1] not in ("none", "not yet")


# ------------------------------------------------------------------------------------------------- every flag has a row

VLM_R1 = """
model_name_or_path model_revision trust_remote_code attn_implementation torch_dtype bf16 model_init_kwargs dataset_name
dataset_config dataset_train_split dataset_test_split data_file_paths arrow_cache_dir reward_method val_split_ratio
image_root image_folders max_pixels min_pixels max_anyres_num freeze_vision_modules task_type
is_reward_customized_from_vlm_module reward_funcs reward_weights num_generations per_device_train_batch_size
gradient_accumulation_steps max_completion_length max_prompt_length temperature top_p top_k min_p repetition_penalty
cache_implementation beta epsilon epsilon_high num_iterations sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
num_shared_layers pattern use_reentrant learning_rate use_peft lora_r lora_alpha lora_dropout lora_target_modules
load_in_4bit load_in_8bit gradient_checkpointing num_train_epochs max_steps deepspeed ds3_gather_for_generation
nproc_per_node nnodes node_rank master_addr master_port use_vllm vllm_device vllm_gpu_memory_utilization vllm_dtype
vllm_max_model_len vllm_enable_prefix_caching vllm_guided_decoding_regex save_steps save_total_limit save_only_model
resume_from_checkpoint logging_steps log_completions DEBUG_MODE LOG_PATH report_to output_dir run_name seed data_seed
remove_unused_columns
"""
"""The flags of VLM-R1's scripts and the fields of its own configurations."""

MS_SWIFT = """
model model_type model_revision torch_dtype attn_impl device_map rope_scaling train_type lora_rank lora_alpha
lora_dropout target_modules adapters ref_adapters freeze_vit freeze_llm freeze_aligner freeze_parameters quant_bits
quant_method dataset val_dataset split_dataset_ratio data_seed dataset_num_proc dataset_shuffle streaming
shuffle_buffer_size columns template system max_length truncation_strategy max_pixels padding_free
sequence_parallel_size max_new_tokens temperature top_k top_p repetition_penalty stop_words seed external_plugins
output_dir gradient_checkpointing deepspeed per_device_train_batch_size per_device_eval_batch_size
gradient_accumulation_steps weight_decay adam_beta1 adam_beta2 learning_rate lr_scheduler_type lr_scheduler_kwargs
gradient_checkpointing_kwargs report_to logging_first_step logging_steps num_train_epochs save_strategy save_steps
eval_strategy eval_steps save_total_limit max_steps warmup_ratio save_only_model resume_from_checkpoint
resume_only_model dataloader_num_workers use_liger_kernel max_grad_norm push_to_hub ref_model beta max_completion_length
num_generations epsilon epsilon_high num_iterations mini_batch_size reward_funcs reward_weights reward_model
reward_model_plugin toolbench math dynamic_sample max_resample_times overlong_filter soft_max_length soft_cache_length
cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct
cosine_max_len repetition_n_grams repetition_max_penalty log_completions use_vllm vllm_device
vllm_gpu_memory_utilization vllm_max_model_len vllm_max_num_seqs vllm_enforce_eager vllm_limit_mm_per_prompt
vllm_enable_prefix_caching vllm_server_host vllm_server_port vllm_server_timeout num_infer_workers
tensor_parallel_size async_generate sleep_level move_model_batches offload_optimizer offload_model
gc_collect_after_offload multi_turn_func sync_ref_model ref_model_mixup_alpha ref_model_sync_steps lmdeploy_device
NPROC_PER_NODE NNODES CUDA_VISIBLE_DEVICES vllm_enable_lora vllm_server_base_url vllm_server_group_port
vllm_server_pass_dataset vllm_tensor_parallel_size vllm_pipeline_parallel_size vllm_data_parallel_size
vllm_enable_expert_parallel vllm_max_lora_rank vllm_quantization vllm_engine_kwargs vllm_disable_custom_all_reduce
vllm_disable_cascade_attn vllm_mm_processor_cache_gb vllm_speculative_config vllm_use_async_engine
vllm_reasoning_parser enable_flattened_weight_sync
"""
"""The flags of ms-swift 3.3.1, and the newer ones of vLLM, that concern GRPO, or any training."""

TRL_REWARDS = """
accuracy_reward reasoning_accuracy_reward think_format_reward get_cosine_scaled_reward get_repetition_penalty_reward
get_soft_overlong_punishment
"""


def without_rows(peer: str, flags: list[str]) -> list[str]:
    """The flags that no row of a table has; a row may name `vllm_*`."""
    patterns = [name for row in rows_of(peer) for name in row.names()]
    return [flag for flag in flags if not any(fnmatch.fnmatchcase(flag, pattern) for pattern in patterns)]


def fields_of_trl() -> dict[str, Any]:
    """The fields of TRL's three configurations, and their defaults."""
    trl = pytest.importorskip("trl", minversion="1.16")
    fields = [
        field for kind in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments) for field in dataclasses.fields(kind)
    ]
    return {field.name: field.default for field in fields}


@SLOW
def test_every_field_of_trls_configurations_has_a_row():
    fields = fields_of_trl()
    assert len(fields) > 190
    assert without_rows("TRL", [*fields, *TRL_REWARDS.split()]) == []


@pytest.mark.parametrize(("peer", "flags"), [("VLM-R1", VLM_R1), ("ms-swift", MS_SWIFT)])
def test_every_flag_has_a_row(peer, flags):
    assert without_rows(peer, flags.split()) == []


def test_a_flag_without_a_row_is_found():
    assert without_rows("TRL", ["vllm_server_port", "no_such_flag"]) == ["no_such_flag"]


# ------------------------------------------------------------------------------------------------------------- defaults

SWIFT_DEFAULTS = {
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": None,
    "freeze_vit": True,
    "freeze_aligner": True,
    "split_dataset_ratio": 0.01,
    "data_seed": 42,
    "dataset_num_proc": 1,
    "dataset_shuffle": True,
    "streaming": False,
    "shuffle_buffer_size": 1000,
    "dataloader_num_workers": 1,
    "truncation_strategy": "delete",
    "max_pixels": None,
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_max_len": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "soft_max_length": None,
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 512,
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "beta": 0.04,
    "epsilon": 0.2,
    "epsilon_high": None,
    "num_iterations": 1,
    "delta": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "importance_sampling_level": "token",
    "rollout_importance_sampling_mode": "none",
    "rollout_importance_sampling_threshold": 2.0,
    "off_policy_sequence_mask_delta": None,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "max_resample_times": 3,
    "overlong_filter": False,
    "gradient_checkpointing": True,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-8,
    "warmup_ratio": 0.0,
    "warmup_steps": None,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "max_steps": -1,
    "save_steps": 500,
    "save_total_limit": None,
    "save_only_model": False,
    "logging_steps": 5,
    "seed": 42,
    "full_determinism": False,
}
"""The defaults of ms-swift 3.3.1; newer flags have the defaults of the version that added them."""

VLM_DEFAULTS = {
    "model_revision": "main",
    "trust_remote_code": False,
    "attn_implementation": "flash_attention_2",
    "torch_dtype": "bfloat16",
    "val_split_ratio": 0.0,
    "max_pixels": 12845056,
    "min_pixels": 3136,
    "max_anyres_num": 12,
    "freeze_vision_modules": False,
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 256,
    "max_prompt_length": 512,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "beta": 0.04,
    "epsilon": 0.2,
    "epsilon_high": None,
    "num_iterations": 1,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "num_shared_layers": 0,
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "warmup_ratio": 0.0,
    "max_grad_norm": 1.0,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "gradient_checkpointing": False,
    "num_train_epochs": 3,
    "max_steps": -1,
    "nnodes": 1,
    "save_steps": 500,
    "save_total_limit": None,
    "save_only_model": False,
    "logging_steps": 500,
    "seed": 42,
}

NOT_ONE_TO_ONE = {
    "model_name_or_path",
    "model_init_kwargs",
    "per_device_train_batch_size",  # completions, and prompts
    "per_device_eval_batch_size",
    "generation_batch_size",  # with steps_per_generation, two settings
    "steps_per_generation",
    "num_generations_eval",
    "generation_kwargs",
    "vllm_structured_outputs_regex",  # handed to vLLM, in TRL too; tests/vllm/real compares the log-probs
    "vllm_importance_sampling_correction",  # with the mode, one setting
    "vllm_importance_sampling_cap",  # an old name
    "loss_type",
    "sync_ref_model",  # a switch, and a group of settings
    "use_peft",
    "load_in_4bit",
    "load_in_8bit",
    "dataset_config",
    "dataset_train_split",  # with others in VLM-R1's row
    "dataset_test_split",
    "adam_beta1",  # a pair here
    "adam_beta2",
    "warmup_steps",  # 0 and null are the same
    "lr_scheduler_kwargs",
    "optim",  # another class of the same optimizer
    "optim_args",
    "bf16",  # None, which becomes true
    "fp16",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "ddp_timeout",
    "ddp_backend",
    "activation_checkpointing",  # another name of gradient_checkpointing
    "use_cpu",
    "disable_tqdm",  # the other way round
    "report_to",
    "project",
    "output_dir",
    "log_multimodal",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "save_strategy",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
}
"""Flags whose default cannot be compared with one of ours as a value; their rows are checked by eye."""

SAME = {("group", "group_std"), ("off", "none")}
"""Two words for one thing; a page may state them or not."""


@pytest.fixture(scope="module")
def command_line(tmp_path_factory) -> Any:
    """The settings of a recipe that says nothing."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(
        yaml.safe_dump({"model": {"policy": "x", "rewards": ["builtins.len"]}, "data": {"datasets": "y.yaml"}})
    )
    return parse(["--config", str(path)])


def default_here(key: str, command_line: Any) -> Any:
    """Return the value of a key that nobody sets."""
    if key.startswith("trainer.") or key in ("seed_everything", "ckpt_path", "run_name"):
        return command_line.get(key)
    group, _, name = key.rpartition(".")
    kinds = SETTINGS.get(group) or [class_named(group)]
    found = [parameters[name] for kind in kinds if name in (parameters := inspect.signature(kind).parameters)]
    return "constant" if key == "model.scheduler" and found[0].default is None else found[0].default


def as_text(value: Any) -> str:
    """A default as the page writes it."""
    if value is None or value is False or value == -1:
        return "off"
    return "on" if value is True else f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def pairs(row: TableRow) -> list[tuple[str, str]]:
    """The flags of a row with their keys, where each has its own."""
    flags, keys = row.names(), row.names(1)
    return list(zip(flags, keys, strict=True)) if len(flags) == len(keys) else [(flag, keys[0]) for flag in flags]


@pytest.mark.parametrize("peer", PEERS)
def test_every_default_that_differs_is_stated(peer, command_line):
    theirs = {"TRL": fields_of_trl, "ms-swift": lambda: SWIFT_DEFAULTS, "VLM-R1": lambda: VLM_DEFAULTS}[peer]()
    wrong, seen = [], 0
    for row in filter(has_key, rows_of(peer)):
        for flag, key in pairs(row):
            if flag not in theirs or flag in NOT_ONE_TO_ONE or ("." not in key and key != "seed_everything"):
                continue
            there, here = as_text(theirs[flag]), as_text(default_here(key, command_line))
            seen += 1
            allowed = {""} if there == here else {f"{there} / {here}"}
            allowed |= {""} if (there, here) in SAME else set()
            if row.cells[2] not in allowed:
                wrong.append(f"{flag}, {key}: the page says {row.cells[2]!r}, and it is {there} / {here}")
    assert seen > 25
    assert wrong == []


# ------------------------------------------------------------------------------------------------- what a key changes


def test_every_key_of_a_row_has_a_test_of_what_it_changes():
    """Our own arguments have a case in tests/arguments, those of the Trainer a row of docs/lightning.md."""
    for path in sorted((TESTS / "arguments").glob("test_*.py")):
        import_module(f"tests.arguments.{path.stem}")  # its cases register themselves
    lightnings = {name for row in tables(read("lightning.md")) for name in row.names()}
    without = []
    for key in {key for row in filter(has_key, ROWS) for key in row.names(1)}:
        group, _, name = key.rpartition(".")
        kinds = SETTINGS.get(group) or [class_named(group) if group else class_named(key)]
        if group == "trainer" or (kinds[0] is not None and kinds[0].__module__.startswith("lightning.")):
            is_tested = name in lightnings or group in lightnings
        elif group:
            is_tested = any((kind, name) in CASES for kind in kinds)
        else:
            is_tested = kinds[0] is not None or key in ("run_name", "seed_everything", "ckpt_path")
        without += [] if is_tested else [key]
    assert without == []


# ------------------------------------------------------------------------------------- losses, by TRL's own function

LENGTHS = (5, 2, 1, 4)
LONGEST = 8


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, MicroBatch, torch.Tensor]:
    """Log-probs, what they are compared with, and entropies; ratios lie on both sides of every clip range."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(4, 5, generator=generator)

    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    logprobs = -1.5 + noise(0.3)
    old = logprobs - torch.tensor([0.5, -0.5, -0.5, 0.5]).unsqueeze(1) - noise(0.5)
    ids = torch.zeros(4, 5, dtype=torch.long)
    micro_batch = MicroBatch(
        prompt_ids=ids[:2, :1],
        prompt_mask=mask[:2, :1],
        prompt_index=torch.tensor([0, 0, 1, 1]),
        completion_ids=ids,
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.tensor([1.2, -0.9, 0.5, -0.7]),
        rollout_logprobs=old + 0.8 - noise(0.8),
        old_logprobs=old,
        ref_logprobs=logprobs + noise(0.5),
    )
    return logprobs, micro_batch, 1.0 + noise(0.2).abs()


def loss_of_trl(
    batch: tuple[torch.Tensor, MicroBatch, torch.Tensor], flags: Mapping[str, Any], aux_loss: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the loss of `GRPOTrainer` with these flags of `GRPOConfig`, for a model that returns this `aux_loss`."""
    trl = pytest.importorskip("trl", minversion="1.16")
    logprobs, micro_batch, entropies = batch
    config = trl.GRPOConfig(output_dir="x", use_cpu=True, bf16=False, report_to=[], **flags)
    trainer = SimpleNamespace(
        args=config,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        aux_loss_enabled=aux_loss is not None,
        _entropy_bonus_enabled=config.entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        get_high_entropy_mask=functools.partial(
            trl.GRPOTrainer.get_high_entropy_mask,
            SimpleNamespace(
                accelerator=SimpleNamespace(gather=lambda x: x, pad_across_processes=lambda x, dim, pad_index: x)
            ),
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, aux_loss),
    )
    names = "beta loss_type importance_sampling_level off_policy_mask_threshold top_entropy_quantile entropy_coef"
    names += " use_adaptive_entropy use_vllm vllm_importance_sampling_correction router_aux_loss_coef"
    for name in names.split():
        setattr(trainer, name, getattr(config, name))
    mask = micro_batch.completion_mask.long()
    inputs = {
        "prompt_ids": micro_batch.completion_ids,
        "prompt_mask": mask,
        "completion_ids": micro_batch.completion_ids,
        "completion_mask": mask,
        "advantages": micro_batch.advantages,
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": micro_batch.old_logprobs,
        "ref_per_token_logps": micro_batch.ref_logprobs,
        "sampling_per_token_logps": micro_batch.rollout_logprobs,
    }
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def our_loss(
    batch: tuple[torch.Tensor, MicroBatch, torch.Tensor],
    settings: Mapping[str, Any],
    router_loss: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the loss of the objective with these settings."""
    logprobs, micro_batch, entropies = batch
    mask = micro_batch.completion_mask
    counts = StepCounts(int(mask.sum()), int(mask.any(dim=1).sum()))
    objective = Objective(**settings)
    if objective.selection is not None:  # the micro-batch is the whole step, as a quantile of TRL's assumes
        scores = TokenLogprobs(logprobs, entropies)
        actor: Any = SimpleNamespace(phase=lambda _: contextlib.nullcontext(), token_logprobs=lambda _: scores)
        select_tokens(actor, objective, [micro_batch], seed=0)
    return objective(logprobs, micro_batch, counts, LONGEST, entropy=entropies, router_loss=router_loss).loss


# TRL's flags on top of its defaults, our settings on top of ours, and the factor between the two losses.
DEFAULTS_OF_TRL = {"beta": 0.0}
EQUIVALENT = {
    "dapo": ({}, {}, 1),
    "grpo": ({"loss_type": "grpo"}, {"aggregate": "sequence"}, 1),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregate": "token"}, 1),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregate": "constant"}, 1),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, {"surrogate": "cispo", "epsilon_high": 0.5}, 1),
    "sapo": ({"loss_type": "sapo"}, {"surrogate": "sapo", "aggregate": "sequence"}, 1),
    "sapo_temperature": (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.7},
        {
            "surrogate": "sapo",
            "aggregate": "sequence",
            "sapo_temperature": 2.0,
            "sapo_temperature_negative": 0.7,
        },
        1,
    ),
    "vespo": ({"loss_type": "vespo"}, {"surrogate": "vespo"}, 1),
    "vespo_k_pos": (
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 1.5,
            "vespo_k_neg": 2.0,
            "vespo_lambda_neg": 1.0,
        },
        {
            "surrogate": "vespo",
            "vespo_k": 1.0,
            "vespo_lambda": 1.5,
            "vespo_k_negative": 2.0,
            "vespo_lambda_negative": 1.0,
        },
        1,
    ),
    "importance_sampling_level": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"ratio": "sequence", "aggregate": "sequence"},
        1,
    ),
    "epsilon": ({"epsilon": 0.1}, {"epsilon": 0.1}, 1),
    "epsilon_high": ({"epsilon_high": 0.5}, {"epsilon_high": 0.5}, 1),
    "delta": ({"delta": 1.3}, {"dual_clip": 1.3}, 1),
    "beta": ({"beta": 0.1, "use_bias_correction_kl": False}, {"beta": 0.1}, 1),
    "use_bias_correction_kl": ({"beta": 0.1}, {"beta": 0.1, "importance_corrected_kl": True}, 1),
    "top_entropy_quantile": ({"top_entropy_quantile": 0.4}, {"top_entropy_fraction": 0.4}, 1),
    "entropy_coef": ({"entropy_coef": 0.1}, {"entropy_coefficient": 0.1}, 1),
    "off_policy_mask_threshold": ({"off_policy_mask_threshold": 0.1}, {"off_policy_threshold": 0.1}, 1),
}


@SLOW
@pytest.mark.parametrize("case", EQUIVALENT)
def test_a_loss_is_the_one_of_trl(batch, case):
    flags, settings, factor = EQUIVALENT[case]
    theirs = loss_of_trl(batch, flags)
    assert_close(our_loss(batch, DEFAULTS_OF_TRL | settings) * factor, theirs, rtol=1e-5, atol=1e-6)
    if case not in ("dapo", "bnpo"):  # a bnpo of one micro-batch is dapo
        assert abs(theirs - loss_of_trl(batch, {})) > 1e-3, "the flags change nothing here"


def test_the_load_balancing_loss_is_that_of_trl(batch):
    """With one micro-batch per step; without the last tokens of completions, which the test's tokens stand for."""
    logits = [torch.randn(20, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    aux_loss = mixtral.load_balancing_loss_func(tuple(logits), 4, 2)
    theirs = loss_of_trl(batch, {"router_aux_loss_coef": 0.3}, aux_loss)
    loss = RouterLoss(MagicMock(), coefficient=0.3)
    share = loss.share(router_load(logits, torch.ones(20), top_k=2))
    assert_close(our_loss(batch, DEFAULTS_OF_TRL, share), theirs, rtol=1e-5, atol=1e-6)
    assert abs(theirs - loss_of_trl(batch, {})) > 0.1


def test_luspo_is_the_constant_aggregation_times_the_longest_completion(batch):
    theirs = loss_of_trl(batch, {"loss_type": "luspo", "importance_sampling_level": "sequence"})
    ours = our_loss(batch, {"beta": 0.0, "ratio": "sequence", "aggregate": "constant"})
    assert_close(ours * LONGEST, theirs, rtol=1e-5, atol=1e-6)


def test_only_our_k3_is_clipped(batch):
    """At 10 nats per token; TRL's grows as exp."""
    logprobs, micro_batch, entropies = batch
    reference = logprobs.clone()
    reference[0, 0] += 4.0
    far = (logprobs, dataclasses.replace(micro_batch, ref_logprobs=reference), entropies)
    excess = (math.exp(4.0) - 4.0 - 1.0) - 10.0
    theirs = loss_of_trl(far, {"beta": 0.1, "use_bias_correction_kl": False})
    assert_close(theirs - our_loss(far, {"beta": 0.1}), torch.tensor(0.1 * excess / sum(LENGTHS)), rtol=1e-4, atol=1e-5)


def test_a_delta_below_the_clip_range_is_refused():
    with pytest.raises(ValueError, match=r"dual_clip must be above 1 \+ epsilon_high"):
        Objective(beta=0.0, dual_clip=1.1)


def test_masked_completions_count_in_trls_averages_over_completions(batch):
    logprobs, micro_batch, entropies = batch
    mask = micro_batch.completion_mask.clone()
    mask[3] = False
    masked = (logprobs, dataclasses.replace(micro_batch, completion_mask=mask), entropies)
    of_sequence = {"importance_sampling_level": "sequence"}
    for flags, settings, factor in [
        ({"loss_type": "grpo"}, {"aggregate": "sequence"}, 4 / 3),
        ({"loss_type": "grpo", **of_sequence}, {"aggregate": "sequence", "ratio": "sequence"}, 4 / 3),
        ({"loss_type": "sapo"}, {"aggregate": "sequence", "surrogate": "sapo"}, 4 / 3),
        ({"loss_type": "dr_grpo"}, {"aggregate": "constant"}, 4 / 3),
        ({"loss_type": "luspo", **of_sequence}, {"aggregate": "constant", "ratio": "sequence"}, 4 / 3 / LONGEST),
        ({"loss_type": "dapo"}, {"aggregate": "token"}, 1),
    ]:
        ours = our_loss(masked, {"beta": 0.0} | settings)
        assert_close(ours, loss_of_trl(masked, flags) * factor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_the_rollout_correction_is_a_product_over_a_sequence(batch, level, outside):
    """TRL's modes; ms-swift's sequence modes take the mean of the log-ratios instead of the sum: geometric here."""
    _, micro_batch, _ = batch
    mask = micro_batch.completion_mask
    log_ratio = (micro_batch.old_logprobs - micro_batch.rollout_logprobs).masked_fill(~mask, 0.0)
    weights = [[math.exp(d) for d in row] for row in log_ratio.tolist()]
    if level == "sequence":
        weights = [[math.prod(row)] * len(row) for row in weights]
    elif level == "geometric":
        weights = [[math.prod(row) ** (1 / n)] * len(row) for row, n in zip(weights, LENGTHS, strict=True)]
    low, high = (0.6, 1.5) if level == "geometric" else (0.5, 1.5)  # vllm_importance_sampling_clip_min and _max
    if outside == "truncate":
        cut = [[min(max(w, low), high) for w in row] for row in weights]
    else:
        cut = [[w * (low <= w <= high) for w in row] for row in weights]
    limits = {"rollout_correction_low": low, "rollout_correction_high": high}
    weighed = Objective(beta=0.0, rollout_correction=f"{level}_{outside}", **limits)
    terms = weighed(batch[0], micro_batch, StepCounts(12, 4), LONGEST, entropy=batch[2])
    assert_close(terms.rollout_weight, torch.tensor(cut) * mask, rtol=1e-5, atol=1e-6)
    assert {(w < low) - (w > high) for row in weights for w in row} == {-1, 0, 1}


# ------------------------------------------------------------------------------------------------ advantages, by hand

REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.5], [2.0, 0.25, -1.0, 0.25]])


def test_the_scales_are_those_of_scale_rewards():
    deviation = REWARDS - REWARDS.mean(dim=1, keepdim=True)
    wanted = {
        "group_std": deviation / (REWARDS.std(dim=1, keepdim=True) + 1e-4),
        "batch_std": deviation / (REWARDS.std() + 1e-4),
        "none": deviation,
    }
    for scale, advantages in wanted.items():
        assert_close(group_relative_advantages(REWARDS, scale=scale), advantages)


def test_rloo_is_leave_one_out():
    others = (REWARDS.sum(dim=1, keepdim=True) - REWARDS) / 3
    assert_close(group_relative_advantages(REWARDS, baseline="leave_one_out", scale="none"), REWARDS - others)


def test_gdpo_normalizes_each_reward_and_then_the_sum_over_the_batch():
    values, weights = torch.stack([REWARDS, REWARDS.flip(0, 1) ** 2]), torch.tensor([1.0, 0.3])
    each = (values - values.mean(dim=2, keepdim=True)) / (values.std(dim=2, keepdim=True) + 1e-4)
    summed = (each * weights[:, None, None]).sum(dim=0)
    wanted = (summed - summed.mean()) / (summed.std() + 1e-4)
    assert_close(
        group_relative_advantages(normalized_sum(values, weights), scale="batch_std"), wanted, rtol=1e-5, atol=1e-6
    )


# ------------------------------------------------------------------------------------------------------- the optimizer


def stepped(optimizer: Callable[..., Any], steps: int = 3) -> torch.Tensor:
    """A weight after some steps of an optimizer."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    made = optimizer([weight])
    for step in range(steps):
        weight.grad = torch.tensor([0.5, -0.1 * step])
        made.step()
    return weight.detach()


ADAMW = {"learning_rate": 0.1, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-3}


def test_adamw_is_the_one_of_transformers():
    arguments = transformers.TrainingArguments(output_dir="x", use_cpu=True, report_to=[], **ADAMW)
    kind, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    settings.pop("fused", None)
    ours = stepped(lambda p: optimizers.AdamW(p, lr=0.1, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3))
    # The Trainer gives the decay to its groups of parameters.
    assert_close(ours, stepped(lambda p: kind(p, **settings, weight_decay=arguments.weight_decay)))
    assert not torch.equal(ours, stepped(lambda p: optimizers.AdamW(p, lr=0.1)))


def test_transformers_decays_neither_biases_nor_norms():
    model = tiny_model("qwen2")
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    left_out = {name for name, _ in model.named_parameters()} - set(decayed)
    assert left_out == {name for name, parameter in model.named_parameters() if parameter.ndim == 1}


@pytest.mark.parametrize(
    ("name", "kind", "settings", "theirs"),
    [
        ("linear", schedules.Linear, {"warmup_steps": 3}, {}),
        ("linear", schedules.Linear, {"warmup_ratio": 0.3}, {}),
        ("cosine", schedules.Cosine, {"warmup_ratio": 0.3}, {}),
        ("constant_with_warmup", schedules.Constant, {"warmup_steps": 3}, {}),
        ("constant", schedules.Constant, {}, {"num_warmup_steps": 0}),
        ("inverse_sqrt", schedules.InverseSqrt, {"warmup_steps": 3}, {}),
        (
            "cosine_with_min_lr",
            schedules.Cosine,
            {"warmup_steps": 3, "min_lr_ratio": 0.1},
            {"scheduler_specific_kwargs": {"min_lr_rate": 0.1}},
        ),
        (
            "cosine_with_restarts",
            schedules.CosineWithRestarts,
            {"warmup_steps": 3, "num_cycles": 2},
            {"scheduler_specific_kwargs": {"num_cycles": 2}},
        ),
    ],
)
def test_a_schedule_is_the_one_of_lr_scheduler_type(name, kind, settings, theirs):
    def rates(make: Callable[[Any], Any]) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule, found = make(optimizer), []
        for _ in range(10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    def ours(optimizer: Any) -> Any:
        schedule = kind(optimizer, **settings)
        schedule.set_length(10)
        return schedule

    kwargs = {"num_warmup_steps": 3, "num_training_steps": 10} | theirs
    assert rates(ours) == pytest.approx(rates(lambda o: transformers.get_scheduler(name, o, **kwargs)))


# ------------------------------------------------------------------------------------------------------------- sampling


SAMPLING = [
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"repetition_penalty": 1.5},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
]
"""Flags of all three trainers, which have the same names and values here."""


@pytest.mark.parametrize("flags", SAMPLING)
def test_completions_come_from_the_distribution_of_generate(flags):
    """The processors that `generate` builds from the flags, as TRL, ms-swift and VLM-R1 call it."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 2
    history = torch.tensor([[3, 5, 5]])
    drawer = NextToken(TokenSettings.of(SamplingParams(**flags)), 12, logits.device)
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    config = transformers.GenerationConfig(**(neutral | {"repetition_penalty": 1.0} | flags))
    model = GenerationMixin()
    model.config = transformers.PretrainedConfig()
    theirs = model._get_logits_processor(config, device="cpu")(history, logits)
    ours = logits
    for process in drawer.processors:
        ours = process(history, ours)
    assert_close(ours.softmax(-1), theirs.softmax(-1))
    assert (ours.softmax(-1) - logits.softmax(-1)).abs().max() > 1e-2


# -------------------------------------------------------------------------------------------------------------- rewards

TEXTS = [
    r"<think>a b c</think>\n<answer>\boxed{4}</answer>",
    r"<think>a b c a b c a b c</think> so it is \boxed{4}",
    r"\boxed{5}",
    "nothing",
]
IDS = [[1, 2, 3], [7] * 9, list(range(20)), [1, 2, 1, 2, 1, 2]]


def called(reward: Any, **columns: Any) -> list[float | None]:
    """The rewards of the texts, as a run calls it."""
    chat = [[{"role": "assistant", "content": text}] for text in TEXTS]
    given = {"completions": chat, "completion_ids": IDS, "solution": ["4"] * len(TEXTS)} | columns
    return list(reward(**given))


def seen_in_trl(prompt: Any, text: str) -> dict[str, Any]:
    """Return the arguments that `GRPOTrainer` passes to a reward function for a prompt with this completion."""
    trl = pytest.importorskip("trl", minversion="1.16")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    ids, seen = tokenizer(text).input_ids, {}

    def spy(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    trainer = MagicMock(spec=trl.GRPOTrainer)
    trainer.configure_mock(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
        tools=None,
        environments=None,
        environment_factories=None,
        rollout_func=None,
        num_generations=1,
        eos_token_ids=[tokenizer.eos_token_id],
        reward_funcs=[spy],
        reward_func_names=["spy"],
        reward_processing_classes=[None],
        args=SimpleNamespace(report_to=[]),
        _is_vlm=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer.model, trainer.state, trainer.accelerator = MagicMock(training=True), MagicMock(), MagicMock()
    trainer.accelerator.device, trainer.accelerator.gather = torch.device("cpu"), lambda tensor: tensor
    trainer._tokenize_prompts = lambda prompts: trl.GRPOTrainer._tokenize_prompts(trainer, prompts)
    trainer._generate_single_turn.return_value = ([ids], None)
    completions = trl.GRPOTrainer._generate(trainer, [prompt])[3]
    with patch("trl.trainer.grpo_trainer.gather", lambda tensor: tensor):
        trl.GRPOTrainer._calculate_rewards(trainer, [{"prompt": prompt}], [prompt], completions, [ids])
    return seen


@pytest.mark.parametrize("start", [None, "<think>"])
def test_a_reward_gets_what_it_gets_in_trl(start):
    """Also for a prompt that ends with an assistant message: that stays in the prompt, and is not in the completion."""
    asked = [{"role": "user", "content": "Why?"}]
    prompt = asked if start is None else [*asked, {"role": "assistant", "content": start}]
    ours: dict[str, Any] = {}

    def spy(prompts: Any, completions: Any, **_: Any) -> list[float]:
        ours.update(prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    answer = Completion([1], [0.0], "stop", "so.</think>")
    rewards.RewardSet([spy]).score([Group(Prompt(prompt), [1], [answer])])
    assert ours == {"prompts": [prompt], "completions": [[{"role": "assistant", "content": "so.</think>"}]]}
    assert ours == seen_in_trl(prompt, "so.</think>")


@SLOW
def test_trls_reward_functions_and_ours_give_the_same():
    trl = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    # The page's settings.
    cosine = rewards.Cosine(min_len_wrong=-1.0, max_len_wrong=-0.5, max_len=10)
    both = [
        (trl.accuracy_reward, rewards.Accuracy()),
        (trl.think_format_reward, rewards.Format(["think"], text_after=True)),
        (trl.get_cosine_scaled_reward(max_len=10), cosine),
        (trl.get_repetition_penalty_reward(), rewards.Repetition(unit="tokens")),
        (trl.get_soft_overlong_punishment(12, 6), rewards.SoftOverlong(cache_length=6, max_length=12)),
    ]
    for theirs, ours in both:
        wanted = called(theirs)
        assert called(ours) == pytest.approx(wanted), theirs
        assert len(set(wanted)) > 1, theirs


def test_swifts_lengths_and_repetitions():
    """Its formulas, up to the lengths at which they turn back or fall on."""
    assert called(rewards.SoftOverlong(cache_length=6, max_length=20)) == pytest.approx(
        [min(-(len(ids) - 14) / 6, 0.0) for ids in IDS]
    )
    is_right = [True, True, False, False]
    wanted = []
    for right, ids in zip(is_right, IDS, strict=True):
        least, greatest = (0.5, 1.0) if right else (0.0, -0.5)
        wanted.append(greatest - (greatest - least) * (1 - math.cos(math.pi * len(ids) / 20)) / 2)
    assert called(rewards.Cosine(max_len=20)) == pytest.approx(wanted)
    assert called(rewards.Repetition(n_grams=1)) == pytest.approx(
        [-(1 - len(set(words)) / len(words)) for words in (text.lower().split() for text in TEXTS)]
    )


# ---------------------------------------------------------------------------------------------- names that mean another


def test_a_dataset_is_named_as_in_swift():
    entry = DatasetEntry(dataset="AI-MO/NuminaMath-TIR:default#1000")
    assert (entry.location.name, entry.location.subset, entry.strategy) == (
        "AI-MO/NuminaMath-TIR",
        "default",
        "random:1000",
    )


def test_save_total_limit_counts_checkpoints():
    assert NewestCheckpoints(save_total_limit=2).save_top_k == 2
    assert NewestCheckpoints().save_top_k == -1


def test_all_linear_is_null():
    assert LoRA().target_modules is None


# ------------------------------------------------------------------------------------------------------- completeness

COMPUTED = {
    *(flag for flags, _, _ in EQUIVALENT.values() for flag in flags),
    *(flag for flags in SAMPLING for flag in flags),
    *ADAMW,
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("scale_rewards", "multi_objective_aggregation", "mask_truncated_completions"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    *("accuracy_reward", "think_format_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward"),
    "get_soft_overlong_punishment",
    "router_aux_loss_coef",
}
"""Flags of TRL of which a test above computes the same number by TRL's or transformers' code, or by hand."""

NOTHING_TO_COMPUTE = {
    "max_completion_length",
    "generation_kwargs",
    "vllm_structured_outputs_regex",  # handed to vLLM, in TRL too; tests/vllm/real compares the log-probs
    "optimizers",  # names of classes
    "optim",
    "optim_args",
    "vllm_importance_sampling_correction",  # a switch of the mode
    "vllm_importance_sampling_cap",  # an old name of clip_max
    "reasoning_accuracy_reward",  # the row says how to combine two
}

MATH = ("model.objective", "model.sampling", "model.optimizer", "model.scheduler", "model.overlong_filter")


def test_every_flag_that_changes_the_maths_is_compared_with_trl():
    rewards_of_trl = set(TRL_REWARDS.split())
    flags = {
        flag
        for row in filter(has_key, rows_of("TRL"))
        for flag in row.names()
        if row.cells[1].startswith(tuple(f"`{name}" for name in MATH)) or flag in rewards_of_trl
    }
    assert sorted(flags - COMPUTED - NOTHING_TO_COMPUTE) == []
    assert sorted((COMPUTED | NOTHING_TO_COMPUTE) - flags) == []


# --------------------------------------------------------------------------------------------------- the checks' teeth


def test_a_wrong_default_would_be_found(monkeypatch, command_line):
    row = TableRow("TRL", ("`beta`", "`model.objective.beta`", "0.1 / 0.04", ""))
    monkeypatch.setitem(globals(), "ROWS", [row] * 30)
    with pytest.raises(AssertionError, match=r"the page says '0\.1 / 0\.04', and it is 0 / 0\.04"):
        test_every_default_that_differs_is_stated("TRL", command_line)
