"""Export: what transformers loads from the folder scores exactly as the module that was trained."""

import errno
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from grpo_lightning.training.checkpoint_export import export
from grpo_lightning.training.checkpoint_files import open_checkpoint
from tests.helpers.exports import difference, logprobs, save_policy
from tests.helpers.module_runs import fit, make_module
from tests.helpers.tiny_models import tiny_tokenizer
from tests.marks import only


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def run(request, tmp_path_factory):
    """(a trained module, its checkpoint file)."""
    folder = tmp_path_factory.mktemp("run")
    module = make_module(policy=str(save_policy(folder / "policy", tie_word_embeddings=request.param)), lr=1e-2)
    trainer = fit(module, max_steps=2)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """(a folder to work in, the content of a checkpoint of the untied policy in it)."""
    folder = tmp_path_factory.mktemp("untied")
    module = make_module(policy=str(save_policy(folder / "policy")), lr=1e-2)
    trainer = fit(module, max_steps=1)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder, torch.load(folder / "last.ckpt", weights_only=True)


def changed(untied, change):
    """The path of a copy of the checkpoint with its content changed in place."""
    folder, content = untied
    copy = dict(content) | {"state_dict": dict(content["state_dict"])}
    change(copy)
    torch.save(copy, folder / "changed.ckpt")
    return folder / "changed.ckpt"


# ------------------------------------------------------------------------------------------------------ what is written


def test_the_exported_model_is_the_trained_one(run, tmp_path):
    module, checkpoint = run
    base = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "policy")
    assert (logprobs(base) - logprobs(module.policy)).abs().max() > 1e-3, "nothing was learned"
    result = export(checkpoint, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert (logprobs(loaded) - logprobs(module.policy)).abs().max() <= 1e-6
    trained = dict(module.policy.named_parameters())
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.named_parameters())
    assert result.num_weights == sum(weight.numel() for weight in trained.values())
    assert (result.num_from_policy, result.dtype) == (0, torch.float32)
    assert {path.name for path in result.files} >= {"config.json", "generation_config.json", "model.safetensors"}


def test_tokenizer_generation_config_and_dropout_are_the_policys(run, tmp_path):
    _, checkpoint = run
    config = checkpoint.parent / "policy" / "config.json"
    original = json.loads(config.read_text())
    config.write_text(json.dumps(original | {"attention_dropout": 0.1}))  # a run switches it off; the model keeps it
    try:
        export(checkpoint, tmp_path / "model")
    finally:
        config.write_text(json.dumps(original))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ab<eos>")["input_ids"] == tiny_tokenizer()("ab<eos>")["input_ids"]
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [1, 7]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["attention_dropout"] == 0.1


def test_another_dtype(run, tmp_path):
    module, checkpoint = run
    assert export(checkpoint, tmp_path / "model", dtype="bfloat16").dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert all(
        torch.equal(weight, dict(module.policy.named_parameters())[name].bfloat16())
        for name, weight in loaded.named_parameters()
    )


def test_a_folder_of_shards(untied, tmp_path):
    """As Lightning's FSDP2 strategy writes it: tensors in shards, the rest in meta.pt."""
    folder, content = untied
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"state_dict": content["state_dict"]}, checkpoint_id=tmp_path / "sharded.ckpt", no_dist=True)
    rest = {name: value for name, value in content.items() if name not in ("state_dict", "optimizer_states")}
    torch.save(rest, tmp_path / "sharded.ckpt" / "meta.pt")
    export(tmp_path / "sharded.ckpt", tmp_path / "from_shards")
    export(folder / "last.ckpt", tmp_path / "from_file")
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("from_shards", "from_file"))
    assert torch.equal(logprobs(one), logprobs(other))
    assert not list(tmp_path.glob("joined-*"))


def test_shards_in_a_folder_that_cannot_be_written_are_joined_elsewhere(untied, tmp_path, monkeypatch, caplog):
    _, content = untied
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"state_dict": content["state_dict"]}, checkpoint_id=tmp_path / "sharded.ckpt", no_dist=True)
    make_folder, made = tempfile.mkdtemp, []

    def refuse(suffix=None, prefix=None, dir=None):
        if dir is not None and Path(dir) == tmp_path:
            raise OSError(errno.EROFS, "Read-only file system")
        made.append(Path(make_folder(suffix, prefix, dir)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with open_checkpoint(tmp_path / "sharded.ckpt") as joined:
        assert joined["state_dict"].keys() == content["state_dict"].keys()
    assert [folder.exists() for folder in made] == [False]
    assert f"{tmp_path} is not writable" in caplog.text


def test_frozen_weights_are_the_policys(untied, tmp_path):
    """The optimizer says how many were trained: a checkpoint that holds as many lacks frozen ones only."""
    folder, content = untied
    frozen = "policy.model.embed_tokens.weight"

    def freeze(copy):
        del copy["state_dict"][frozen]
        group = copy["optimizer_states"][0]["param_groups"][0]
        copy["optimizer_states"] = [{"param_groups": [group | {"params": group["params"][1:]}]}]

    result = export(changed(untied, freeze), tmp_path / "model")
    assert result.num_from_policy == content["state_dict"][frozen].numel()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert torch.equal(loaded.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert torch.equal(loaded.lm_head.weight, content["state_dict"]["policy.lm_head.weight"])


def test_what_is_not_frozen_must_be_there(tmp_path):
    """Layers that the run froze are the policy's, without a word from the optimizer; no other weight is."""
    loader = PolicyLoader(str(save_policy(tmp_path / "policy")), freeze_layers=1)
    module = make_module(policy=loader, lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    result = export(tmp_path / "last.ckpt", tmp_path / "model")
    frozen = [weight.numel() for weight in module.policy.parameters() if not weight.requires_grad]
    assert result.num_from_policy == sum(frozen)
    assert torch.equal(logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logprobs(module.policy))
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del content["state_dict"]["policy.lm_head.weight"]
    torch.save(content, tmp_path / "lacking.ckpt")
    with pytest.raises(ValueError, match=r"lacks 1 weights of the policy, for example lm_head\.weight"):
        export(tmp_path / "lacking.ckpt", tmp_path / "other")


@pytest.mark.parametrize("kind", only(["frozen layers"], ["frozen layers", "adapters"]))
def test_frozen_random_weights_are_not_replaced_by_others(tmp_path, kind):
    """The checkpoint lacks them, and a model that is built again has other random weights."""
    limits = {"freeze_layers": 1} if kind == "frozen layers" else {"lora": LoRA(rank=2)}
    loader = PolicyLoader(str(save_policy(tmp_path / "policy")), from_scratch=True, **limits)
    module = make_module(policy=loader, lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"policy\.from_scratch.* lacks [\d,]+ weights.*set --policy"):
        export(tmp_path / "last.ckpt", tmp_path / "model", fill_missing=True)
    assert not (tmp_path / "model").exists()
    loader.load_model().save_pretrained(tmp_path / "initial")  # as the error says
    tiny_tokenizer().save_pretrained(tmp_path / "initial")
    export(tmp_path / "last.ckpt", tmp_path / "model", policy=str(tmp_path / "initial"))
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), module.policy) <= 1e-6


def test_an_adapter_on_random_weights_is_exported_alone(tmp_path):
    """The checkpoint contains all weights of the adapter; the frozen weights are not written."""
    loader = PolicyLoader(str(save_policy(tmp_path / "policy")), from_scratch=True, lora=LoRA(rank=2))
    module = make_module(policy=loader, lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    assert export(tmp_path / "last.ckpt", tmp_path / "adapter", adapter=True).is_adapter
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = {name: weight for name, weight in module.policy.named_parameters() if weight.requires_grad}
    assert len(saved) == len(trained)
    for name, weight in trained.items():
        assert torch.equal(saved[name.replace(".default.", ".")], weight.detach().cpu())


def test_random_weights_that_were_all_trained_are_exported(tmp_path):
    folder = save_policy(tmp_path / "policy")
    module = make_module(policy=PolicyLoader(str(folder), from_scratch=True), lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    assert export(tmp_path / "last.ckpt", tmp_path / "model").num_from_policy == 0
    assert torch.equal(logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logprobs(module.policy))


# ------------------------------------------------------------------------------------------------- where the policy is


def forget(copy):
    copy.pop("hyper_parameters", None)


def test_the_policy_is_found_in_the_runs_config(untied, tmp_path):
    folder, _ = untied
    checkpoint = changed(untied, forget)
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    checkpoint.rename(run_folder / "checkpoints" / "last.ckpt")
    loader = {"class_path": "grpo_lightning.policy.loading.PolicyLoader", "init_args": {"name": str(folder / "policy")}}
    for policy in (str(folder / "policy"), loader):
        (run_folder / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": policy}}))
        result = export(run_folder / "checkpoints" / "last.ckpt", tmp_path / "model", force=True)
        assert result.policy == str(folder / "policy")


def test_a_policy_that_is_not_named_must_be_given(untied, tmp_path):
    folder, _ = untied
    checkpoint = changed(untied, forget)
    said = r"does not name the policy it was trained from: set --policy NAME.* a folder that `save_pretrained` wrote"
    with pytest.raises(ValueError, match=said):
        export(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    export(checkpoint, tmp_path / "model", policy=str(folder / "policy"))


def test_a_policy_by_a_path_of_another_folder_must_be_given(untied, tmp_path, monkeypatch):
    folder, _ = untied

    def name_relatively(copy):
        copy["hyper_parameters"] = {"policy": {"name": "./policy"}}

    checkpoint = changed(untied, name_relatively)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\./policy.* set --policy\.$"):
        export(checkpoint, tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"\./other.*folder is [^ ]+$"):
        export(checkpoint, tmp_path / "model", policy="./other")
    monkeypatch.chdir(folder)
    export(checkpoint, tmp_path / "model")


@pytest.mark.parametrize("is_setting_of_policy", [True, False])
def test_a_policy_given_by_hand_keeps_the_tokenizer_that_the_run_named(untied, tmp_path, is_setting_of_policy):
    folder, _ = untied
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "CHAT {{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def name_tokenizer(copy):
        settings = {"policy": {"name": "./policy"}}
        owner = settings["policy"] if is_setting_of_policy else settings
        owner["tokenizer"] = str(tmp_path / "tokenizer")
        copy["hyper_parameters"] = settings

    checkpoint = changed(untied, name_tokenizer)
    export(checkpoint, tmp_path / "model", policy=str(folder / "policy"))
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == tokenizer.chat_template
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"^policy\.tokenizer '.*tokenizer': there is no folder"):
        export(checkpoint, tmp_path / "other", policy=str(folder / "policy"))


# --------------------------------------------------------------------------------------------------------------- errors


def lack(copy):
    del copy["state_dict"]["policy.lm_head.weight"]


def lack_and_forget(copy):
    lack(copy)
    del copy["optimizer_states"]


def add(copy):
    copy["state_dict"]["policy.value_head.weight"] = torch.zeros(2)


def reshape(copy):
    copy["state_dict"]["policy.lm_head.weight"] = torch.zeros(3, 4)


def adapt(copy):
    copy["state_dict"]["policy.base_model.layers.0.lora_A.default.weight"] = torch.zeros(2)


def rename(copy):
    copy["state_dict"] = {name.replace("policy.", "net."): value for name, value in copy["state_dict"].items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lack,
            r"lacks 1 weights of the policy, for example lm_head\.weight\. 27 weights were trained, and 26 are present",
        ),
        (lack_and_forget, r"for example lm_head\.weight\. They are not known to be frozen.*--fill_missing"),
        (add, r"1 weights that the policy does not have, for example value_head\.weight"),
        (reshape, r"lm_head\.weight is \[3, 4\] in the checkpoint and \[120, 32\] in the policy"),
        (adapt, r"LoRA adapters \(for example base_model\.layers\.0\.lora_A\S+\), but .* their rank and alpha"),
        (rename, r"contains no policy weights: none of its 27 keys starts with 'policy\.'"),
    ],
)
def test_a_checkpoint_that_does_not_fit(untied, tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        export(changed(untied, change), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_missing_weights_can_be_asked_for(untied, tmp_path):
    assert export(changed(untied, lack_and_forget), tmp_path / "model", fill_missing=True).num_from_policy == 120 * 32


def test_a_tied_policy_refuses_weights_that_differ(untied, tmp_path):
    folder, _ = untied
    save_policy(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"are one weight in the policy and two in the checkpoint"):
        export(folder / "last.ckpt", tmp_path / "model", policy=str(tmp_path / "tied"))


def test_folders_with_files_are_left_alone(untied, tmp_path):
    folder, _ = untied
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("stale")
    with pytest.raises(FileExistsError, match=r"is not empty\. Give another folder, or --force"):
        export(folder / "last.ckpt", tmp_path / "model")
    export(folder / "last.ckpt", tmp_path / "model", force=True)
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"
    assert not (tmp_path / "model" / "model-00001-of-00002.safetensors").exists()
    with pytest.raises(NotADirectoryError, match="is a file"):
        export(folder / "last.ckpt", tmp_path / "model" / "mine.txt")
    with pytest.raises(ValueError, match="is the folder of the policy itself"):
        export(folder / "last.ckpt", folder / "policy", force=True)


def test_what_is_no_checkpoint(tmp_path, untied):
    folder, _ = untied
    with pytest.raises(FileNotFoundError, match=r"No checkpoint .*nowhere\.ckpt"):
        export(tmp_path / "nowhere.ckpt", tmp_path / "model")
    half = (folder / "last.ckpt").read_bytes()
    (tmp_path / "half.ckpt").write_bytes(half[: len(half) // 2])
    with pytest.raises(ValueError, match=r"half\.ckpt cannot be read as a checkpoint; it may be incomplete"):
        export(tmp_path / "half.ckpt", tmp_path / "model")
    for content in (b"step,reward\n1,0.5\n", b""):
        (tmp_path / "metrics.csv").write_bytes(content)
        with pytest.raises(ValueError, match=r"metrics\.csv is not a checkpoint\. A checkpoint is a file") as stopped:
            export(tmp_path / "metrics.csv", tmp_path / "model")
        assert "torch" not in str(stopped.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is a folder, but not a checkpoint"):
        export(tmp_path / "empty", tmp_path / "model")


def test_a_deepspeed_folder_names_the_tool_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "zero.ckpt").mkdir()
    (tmp_path / "zero.ckpt" / "latest").write_text("checkpoint")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'grpo-lightning[deepspeed]'")):
        export(tmp_path / "zero.ckpt", tmp_path / "model")


def test_whole_weights_are_no_adapter(untied, tmp_path):
    folder, _ = untied
    with pytest.raises(ValueError, match=r"contains no LoRA adapters, only full weights: remove --adapter"):
        export(folder / "last.ckpt", tmp_path / "model", adapter=True)
