"""What stays from step to step, part by part, on the device and on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_lightning.cli.plan.memory_settings import MemorySettings
from grpo_lightning.cli.plan.parts import ALWAYS, TRAINING, Moment, Part, Place, shared
from grpo_lightning.cli.plan.reward_parts import reward_parts
from grpo_lightning.cli.plan.shape import ModelShape
from grpo_lightning.cli.plan.states import shard_bytes
from grpo_lightning.cli.plan.trained_weights import ADAPTER_BYTES, TrainedWeights

SUM_BYTES = 4
"""Of a number in which ZeRO-2 and ZeRO-3 add up gradients."""

SAMPLING: frozenset[Moment] = frozenset({"sampling"})


def state_parts(shape: ModelShape, settings: MemorySettings) -> list[Part]:
    """Every part of the states; see `planning.states` for their division among ranks. Some may have no bytes."""
    states = States(shape, settings, settings.trained or TrainedWeights.all_of(shape))
    own = [*states.weights(), *states.gradients(), *states.optimizer(), *states.gathered()]
    return own + reward_parts(settings.reward_models)


@dataclass(frozen=True)
class States:
    """The states of one model under one strategy."""

    shape: ModelShape
    settings: MemorySettings
    trained: TrainedWeights

    @property
    def is_plain(self) -> bool:
        """True if sizes are those of real tensors, and not of a sharding library's."""
        division = self.settings.division
        return not (division.has_masters or division.gathers_layers)

    @property
    def adapter_width(self) -> int:
        """Bytes of a number of the adapters."""
        return self.settings.widths.weights if self.settings.division.has_masters else ADAPTER_BYTES

    def place(self, *, is_offloaded: bool) -> Place:
        """Where a part is."""
        return "host" if is_offloaded else "device"

    def trained_bytes(self, ranks: int, least: int = 0) -> int:
        """Bytes of one number as wide as the weight, or the least, for what is trained, shared over ranks."""
        own = shard_bytes(self.trained.own, max(least, self.settings.widths.weights), ranks)
        return own + shard_bytes(self.trained.adapters, max(least, self.adapter_width), ranks)

    @property
    def sums_beside_masters(self) -> bool:
        """True at ZeRO-2 of a 16-bit model: the sums are in one buffer on the device, which the masters step on."""
        division = self.settings.division
        return division.sums_in_float32 and not division.gathers_layers and self.settings.widths.weights < SUM_BYTES

    def weights(self) -> list[Part]:
        """The policy, its adapters and its reference."""
        width, division = self.settings.widths.weights, self.settings.division
        trained, place = self.trained, self.place(is_offloaded=division.are_weights_offloaded)
        over, is_plain = shared(division.weights), self.is_plain
        plain = shard_bytes(self.shape.num_weights - trained.quantized, width, division.weights)
        quantized = math.ceil(trained.quantized * trained.quantized_bytes / division.weights)
        how = f"{width} bytes a weight{over}"
        if trained.quantized:
            how = f"{trained.quantized:,} in {trained.quantized_bytes:.3g} bytes, the others in {width}"
        adapters = shard_bytes(trained.adapters, self.adapter_width, division.weights)
        reference = math.ceil(trained.reference_bytes(self.shape, width) / division.weights)
        reference *= self.settings.has_reference
        copy = "a frozen copy of what is trained" if trained.shares_frozen else f"a frozen copy of the weights{over}"
        if trained.adapters:
            copy = "a frozen copy of the starting adapter"
        during = TRAINING if "reference" in self.settings.offloaded else ALWAYS
        is_parked = "reference" in self.settings.offloaded and place == "device"
        many = f"{trained.adapters:,} of LoRA, {self.adapter_width} bytes each{over}"
        return [
            Part("weights", plain + quantized, ALWAYS, is_plain and not quantized, how, place),
            Part("adapters", adapters, ALWAYS, is_plain, many, place),
            Part("reference", reference, during if is_parked else ALWAYS, is_plain, copy, place),
            Part("reference, parked", reference * is_parked, SAMPLING, is_plain, "while completions are drawn", "host"),
        ]

    def gradients(self) -> list[Part]:
        """Gradients and the buckets they are averaged in.

        Stage 3 adds them up in one buffer, made at the start and kept.
        """
        division, settings = self.settings.division, self.settings
        during: frozenset[Moment] = frozenset({"update", "step"} if settings.holds_gradients else {"step"})
        if division.has_masters and division.gathers_layers:
            during = ALWAYS
        least = SUM_BYTES if division.sums_in_float32 else 0
        width = max(least, settings.widths.weights if self.trained.own else self.adapter_width)
        place = self.place(is_offloaded=division.is_optimizer_offloaded and not self.sums_beside_masters)
        buckets = division.bucket_numbers * settings.widths.weights
        return [
            Part(
                "gradients",
                self.trained_bytes(division.gradients, least),
                during,
                self.is_plain,
                f"{width} bytes a trained weight{shared(division.gradients)}",
                place,
            ),
            Part(
                "gradient buckets",
                self.trained_bytes(1) if division.has_buckets else 0,
                ALWAYS,
                False,
                "DDP's second copy of the gradients",
            ),
            Part(
                "reduce buckets",
                buckets,
                ALWAYS if division.gathers_layers else frozenset({"update"}),
                False,
                f"DeepSpeed's: {division.bucket_numbers:,} numbers of {settings.widths.weights} bytes",
            ),
        ]

    def optimizer(self) -> list[Part]:
        """The optimizer's states, its 32-bit weights and gradients, and what it needs while it steps."""
        settings, division = self.settings, self.settings.division
        per_weight, ranks, count = settings.optimizer_bytes, division.optimizer, self.trained.count
        place = self.place(is_offloaded=division.is_optimizer_offloaded)
        is_parked = "optimizer" in settings.offloaded and place == "device"
        states, masters = shard_bytes(count, per_weight, ranks), shard_bytes(count, 4, ranks) * division.has_masters
        own = -(-count // ranks)
        stepped = own if division.stepped_numbers is None else min(own, division.stepped_numbers)
        step: frozenset[Moment] = frozenset({"step"})
        # On the CPU, DeepSpeed makes all masters' gradients at the start and keeps them.
        copied = own if place == "host" else 0 if self.sums_beside_masters else stepped
        during, over = TRAINING if is_parked else ALWAYS, shared(ranks)
        how = f"{per_weight:.3g} bytes a trained weight{over}, from the first step on"
        work = math.ceil(stepped * per_weight / 2) * (place == "device")
        return [
            Part("optimizer states", states, during, self.is_plain, how, place),
            Part("master weights", masters, during, False, f"4 bytes a trained weight{over}", place),
            Part(
                "optimizer, parked", (states + masters) * is_parked, SAMPLING, self.is_plain, "while sampling", "host"
            ),
            Part(
                "32-bit gradients",
                4 * copied * division.has_masters,
                ALWAYS if place == "host" else step,
                False,
                f"of the masters{over}",
                place,
            ),
            Part(
                "optimizer's work", work, step, False, f"one state's copy, of the {stepped:,} weights stepped at once"
            ),
        ]

    def gathered(self) -> list[Part]:
        """Whole weights where they are shared out: of the running layers, or of all while sampling."""
        settings, division, shape = self.settings, self.settings.division, self.shape
        if not division.gathers_layers:
            return []
        layer, matrix = shape.num_layer_weights, shape.vocab_size * shape.hidden_size
        numbers = 2 * layer + shape.num_end_weights if division.gathers_ends else max(2 * layer, layer + matrix)
        how = "the running layer, the next one" + (", embeddings and head" * division.gathers_ends)
        whole = (shape.num_weights + self.trained.adapters) * settings.gathers_for_sampling
        is_layered: frozenset[Moment] = frozenset({"update"} if whole else {"update", "sampling"})
        compute = settings.widths.compute
        return [
            Part("gathered layers", numbers * compute, is_layered, False, how),
            Part("gathered weights", whole * compute, SAMPLING, False, "all, while completions are drawn"),
        ]
