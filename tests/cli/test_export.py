"""`grpo-lightning export`: what it prints loads the model."""

import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.export import run
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.policy.lora import LoRA
from tests.helpers.module_runs import SMALL, fit, make_module
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(a trained module, its checkpoint)."""
    folder = tmp_path_factory.mktemp("run")
    tiny_model("qwen2", **SMALL).save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")
    module = make_module(policy=str(folder / "policy"), lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


def test_the_lines_printed_load_the_trained_model(checkpoint, tmp_path, capsys):
    module, path = checkpoint
    run([str(path), str(tmp_path / "model")])
    out = capsys.readouterr().out
    assert re.search(r"Exported 26,400 weights \(float32\)", out)
    assert "model.safetensors" in out
    lines = [line.strip() for line in out.splitlines() if "import" in line or "from_pretrained" in line]
    names: dict = {}
    exec("\n".join(lines), names)
    ids = torch.tensor([names["tokenizer"]("prompt")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(names["model"](ids).logits, module.policy.eval()(ids).logits)


def test_a_checkpoint_copied_without_its_folder_of_the_ranks_says_so_and_is_exported(checkpoint, tmp_path, caplog):
    content = torch.load(checkpoint[1], weights_only=True)
    content["grpo"] |= {"moment": "step1-1-2", "world_size": 2, "is_pending": True}
    torch.save(content, tmp_path / "copied.ckpt")
    run([str(tmp_path / "copied.ckpt"), str(tmp_path / "model")])
    assert "No run can resume" in caplog.text
    assert "copied.ckpt.ranks/step1-1-2-0.pt is missing" in caplog.text
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_flags(checkpoint, tmp_path, capsys):
    _, path = checkpoint
    run([str(path), str(tmp_path), "--force", "--dtype", "bfloat16", "--policy", str(path.parent / "policy")])
    assert "(bfloat16)" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="--force"):
        run([str(path), str(tmp_path)])


@SLOW
def test_the_lines_printed_load_an_adapter(checkpoint, tmp_path, capsys):
    policy = PolicyLoader(str(checkpoint[1].parent / "policy"), lora=LoRA(rank=2))
    module = make_module(policy=policy, lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    run([str(tmp_path / "last.ckpt"), str(tmp_path / "adapter"), "--adapter"])
    out = capsys.readouterr().out
    assert "weights of an adapter (float32)" in out
    lines = [line.strip() for line in out.splitlines() if "import" in line or "from_pretrained" in line]
    names: dict = {}
    exec("\n".join(lines), names)
    ids = torch.tensor([names["tokenizer"]("prompt")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(names["model"](ids).logits, module.policy.eval()(ids).logits)


@SLOW
@pytest.mark.parametrize("flags", [[], ["--adapter"]])
def test_a_quantized_run_is_told_which_base_it_gets(checkpoint, tmp_path, capsys, flags):
    policy = PolicyLoader(str(checkpoint[1].parent / "policy"), lora=LoRA(rank=2))
    module = make_module(policy=policy, lr=1e-2)
    fit(module, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    run([str(tmp_path / "last.ckpt"), str(tmp_path / "plain"), *flags])
    assert "4bit" not in capsys.readouterr().out
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    content["hyper_parameters"]["policy"]["quantization"] = "4bit"
    torch.save(content, tmp_path / "last.ckpt")
    run([str(tmp_path / "last.ckpt"), str(tmp_path / "model"), *flags])
    lines = [line for line in capsys.readouterr().out.splitlines() if "4bit" in line]
    assert len(lines) == 1
    assert "full-precision" in lines[0]


@pytest.mark.parametrize("args", [[], ["a.ckpt"], ["a.ckpt", "b", "--dtype", "float8"], ["a.ckpt", "b", "--forc"]])
def test_wrong_arguments_end_with_usage(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(args)
    assert stopped.value.code == 2
    assert "usage: grpo-lightning export" in capsys.readouterr().err


def test_a_run_stands_for_its_newest_checkpoint(checkpoint, tmp_path, capsys):
    for number, name in ((0, "old.ckpt"), (1, "new.ckpt")):
        folder = tmp_path / f"run/version_{number}/checkpoints"
        folder.mkdir(parents=True)
        shutil.copy(checkpoint[1], folder / name)
    newest = tmp_path / "run/version_1/checkpoints/new.ckpt"
    for given in ("run", "run/version_1"):
        run([str(tmp_path / given), str(tmp_path / "model"), "--force"])
        assert f"Checkpoint: {newest}" in capsys.readouterr().out
    newest.unlink()
    none = r"version_1 has no checkpoint\. The recipe may turn checkpoints off \(trainer\.enable_checkpointing: false"
    with pytest.raises(ConfigurationError, match=none):
        run([str(tmp_path / "run/version_1"), str(tmp_path / "model"), "--force"])
    newest.write_bytes(b"half")
    with pytest.raises(ConfigurationError, match=r"has no complete checkpoint \(1 incomplete\)"):
        run([str(tmp_path / "run/version_1"), str(tmp_path / "model"), "--force"])


# ------------------------------------------------------------------------------------------------- card and upload


def test_the_folder_has_a_card(checkpoint, tmp_path, capsys):
    _, path = checkpoint
    run([str(path), str(tmp_path / "model")])
    assert "README.md" in capsys.readouterr().out
    text = (tmp_path / "model" / "README.md").read_text()
    assert text.startswith("---\n")
    assert "library_name: transformers" in text
    assert ", 1 optimizer steps." in text


def test_the_sections_that_the_card_has_are_printed(checkpoint, tmp_path, capsys):
    run([str(checkpoint[1]), str(tmp_path / "alone")])
    assert "  README.md  the model's card\n" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    path = shutil.copy(checkpoint[1], tmp_path / "run" / "checkpoints" / "last.ckpt")
    (tmp_path / "run" / "config.yaml").write_text("model: {rewards: [my_rewards.brief]}")
    run([str(path), str(tmp_path / "model")])
    assert "  README.md  the model's card: rewards, settings\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("repo", "offline", "token", "message"),
    [
        ("name", False, "hf_x", "OWNER/NAME, got 'name'"),
        ("me/model", True, "hf_x", "HF_HUB_OFFLINE is set"),
        ("me/model", False, None, "hf auth login"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_export(tmp_path, monkeypatch, repo, offline, token, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    with pytest.raises(ConfigurationError, match=message):
        run(["missing.ckpt", str(tmp_path / "model"), "--push", repo])
    assert not (tmp_path / "model").exists()


def test_private_without_push_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--push is not set"):
        run(["missing.ckpt", str(tmp_path / "model"), "--private"])


class Hub:
    """The hub's client."""

    def __init__(self):
        self.calls = []

    def create_repo(self, repo, **options):
        self.calls.append((repo, options))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.mark.parametrize("is_down", [False, True])
def test_a_model_is_uploaded(checkpoint, tmp_path, monkeypatch, capsys, is_down):
    hub = Hub()
    if is_down:
        monkeypatch.setattr(hub, "upload_folder", lambda **_: (_ for _ in ()).throw(RuntimeError("502")))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    arguments = [str(checkpoint[1]), str(tmp_path / "model"), "--push", "me/model", "--private"]
    if is_down:
        with pytest.raises(ConfigurationError, match=r"not uploaded to me/model: 502\. Try again with: hf upload"):
            run(arguments)
        assert (tmp_path / "model" / "README.md").is_file()
        return
    run(arguments)
    assert "Uploaded to https://huggingface.co/me/model" in capsys.readouterr().out
    (first, options), (_, files) = hub.calls
    assert first == "me/model"
    assert options == {"private": True, "exist_ok": True}
    assert {"README.md", "model.safetensors", "config.json"} <= set(files)
