"""Tests of `GRPOLightningModule`: whole training runs of tiny models."""
