"""The model in one line."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from grpo_lightning.cli.summary import ParameterSummary


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.policy = nn.Linear(10, 20)  # 220
        self.reference = nn.Linear(10, 20).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.policy(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_counts_by_hand(tmp_path, caplog):
    with caplog.at_level("INFO", "grpo_lightning"):
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            max_steps=1,
            precision="bf16-mixed",  # Lightning warns about its megabytes
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            callbacks=[ParameterSummary()],
        )
        trainer.fit(Module(), DataLoader(torch.ones(2, 10), batch_size=2))
    (said,) = [message for message in caplog.messages if message.startswith("Model: ")]
    assert said == "Model: policy Linear (220), reference Linear (220); 220 of 440 parameters are trained."
