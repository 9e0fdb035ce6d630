"""An engine with a copy of the weights, which can sample while the policy trains, as a vLLM server does."""

from __future__ import annotations

import copy
import threading
from typing import Any

from grpo_lightning.core.types import Completion
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.rollout.local_engine import LocalEngine


class BackgroundEngine:
    """Samples as `LocalEngine` does, from the weights of the last `sync_weights`; an update waits for sampling."""

    samples_in_background = True

    def __init__(self) -> None:
        self.local, self.lock = LocalEngine(), threading.Lock()
        self.calls: list[tuple[int, bool]] = []
        """Number of prompts of each call, and whether it came from the main thread."""

    def connect(self, policy: Any, tokenizer: Any, sharding: Any) -> None:
        self.copy = copy.deepcopy(policy)
        self.local.connect(self.copy, tokenizer, Sharding())

    def sync_weights(self, policy: Any) -> None:
        with self.lock:
            self.copy.load_state_dict(policy.state_dict())

    def generate(self, prompts: Any, *arguments: Any, **options: Any) -> list[list[Completion]]:
        with self.lock:
            self.calls.append((len(prompts), threading.current_thread() is threading.main_thread()))
            return self.local.generate(prompts, *arguments, **options)
