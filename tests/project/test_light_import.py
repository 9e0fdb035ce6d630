"""Importing the package is instant, and importing the module needs no optional package."""

import subprocess
import sys
import textwrap

import pytest

from tests.marks import SLOW

OPTIONAL = (
    *("bitsandbytes", "deepspeed", "flash_attn", "matplotlib", "openai", "peft", "pycocotools", "reasoning_gym"),
    *("torchvision", "trl", "vllm", "wandb"),
)


def run(program: str) -> str:
    """Return the output of a program in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_package_loads_nothing_heavy():
    loaded = run("""
        import sys
        import grpo_lightning
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
    """)
    heavy = {"torch", "transformers", "lightning", "numpy", "datasets", "jsonargparse", *OPTIONAL}
    assert heavy.isdisjoint(loaded.split())


@SLOW
def test_short_commands_load_nothing_heavy():
    loaded = run("""
        import contextlib, io, sys
        from grpo_lightning.cli import main
        with contextlib.redirect_stdout(io.StringIO()):
            commands = ("fit", "validate", "test", "predict", "plan", "export", "report", "recipes")
            helps = [[command, "--help"] for command in commands]
            for args in (["--version"], ["--help"], ["recipes", "list"], *helps):
                with contextlib.suppress(SystemExit):
                    main(args)
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
    """)
    assert {"torch", "transformers", "lightning", "datasets", "jsonargparse", *OPTIONAL}.isdisjoint(loaded.split())


@pytest.mark.slow
def test_the_module_asks_for_no_optional_package():
    """Only what our own files import counts: lightning and transformers load some of these by themselves.

    The imports are watched, not `sys.modules`, so that the test can fail where the packages are not installed.
    """
    asked = run(f"""
        import builtins

        original, asked = builtins.__import__, set()

        def watch(name, globals=None, *args, **kwargs):
            if (globals or {{}}).get("__name__", "").partition(".")[0] == "grpo_lightning":
                asked.add(name.partition(".")[0])
            return original(name, globals, *args, **kwargs)

        builtins.__import__ = watch
        import grpo_lightning.module
        assert "torch" in asked, "the watch saw nothing"
        print(*sorted(asked & set({OPTIONAL!r})))
    """)
    assert asked == ""
