"""Load-balancing (auxiliary) loss of a mixture of experts, exact over the optimizer step.

    loss = E * sum over e of  f[e] * P[e]              only P has a gradient

f[e] is the fraction of tokens that are sent to expert e, and P[e] is the mean router probability of expert e
(`functional.routing.load_balancing_loss`). Both are means over all tokens of the optimizer step, on all ranks. A prompt
counts once for each of its completions.

The loss is linear in P, so it is a sum with one share for each micro-batch. Each share depends on f and on the router
probabilities of its micro-batch. Even the first share needs the f of the entire step. So before the step, an
additional pass without gradients processes all micro-batches except the first one. The forward pass that trains on the
first micro-batch then completes f. If the policy has adapter dropout (`policy.lora.dropout`), f is approximate, because
the additional pass runs without dropout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from grpo_lightning.core import ranks
from grpo_lightning.functional.routing import RouterLoad, load_balancing_loss, max_expert_load, total_load
from grpo_lightning.policy.completion_logprobs import Scorer
from grpo_lightning.policy.probe import check_routers
from grpo_lightning.policy.routers import Routers, UnsupportedRoutersError, find_routers
from grpo_lightning.policy.transformers_internals import base_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


class RouterLoss:
    """Computes each micro-batch's share of the load-balancing loss of an optimizer step."""

    def __init__(self, routers: Routers, coefficient: float) -> None:
        self.routers = routers
        self.coefficient = coefficient
        self.others: list[RouterLoad] = []
        """Router loads of this rank's micro-batches of the step, except the first one."""

        self.step: RouterLoad | None = None
        """Router load of the entire step, over all ranks."""

        self.latest: Tensor | None = None
        """The latest micro-batch's share of the unweighted loss. None after `pop`."""

    def begin(self, others: Sequence[RouterLoad]) -> None:
        """Begin an optimizer step. `others` are the router loads of this rank's second and later micro-batches."""
        self.others, self.step = list(others), None

    def share(self, load: RouterLoad | None) -> Tensor:
        """Compute a micro-batch's share of the weighted loss, from its router load with gradients.

        The loss is the sum of the shares of all micro-batches and ranks. The first call of a step is collective.
        """
        assert load is not None
        if self.step is None:
            own = total_load([*self.others, load])
            self.step = RouterLoad(*(ranks.sum_over_ranks(part.detach()) for part in own))
        share = load_balancing_loss(self.step.routed, load.probs, self.step.num_tokens)
        self.latest = share.detach()
        return self.coefficient * share

    def pop(self) -> tuple[Tensor, Tensor]:
        """Return the values to log for a micro-batch.

        Returns:
            The micro-batch's share of the unweighted loss, and the largest load of an expert in the step, relative to a
            uniform load.

        Raises:
            ValueError: If an overridden `update` did not call `share`.
        """
        if self.step is None or self.latest is None:
            raise ValueError(
                f"The load-balancing loss of the experts has the weight {self.coefficient:g}, but your `update` leaves "
                "it out. Set objective.router_aux_loss_coef to 0, or add the loss as GRPOLightningModule.update does "
                "(`self.router_loss`)."
            )
        latest, self.latest = self.latest, None
        return latest, max_expert_load(self.step.routed)


def router_coefficient(requested: float | None, config: PretrainedConfig) -> float:
    """Weight of the load-balancing loss.

    - For a dense model, the weight is 0.
    - For a mixture of experts, the weight is `requested`. If `requested` is None, the weight is `router_aux_loss_coef`
      of the policy's config. If `requested` is None and the config has no `router_aux_loss_coef`, the weight is 0.

    Raises:
        ValueError: If a coefficient above 0 is requested for a dense model.
    """
    text = config.get_text_config(decoder=True)
    has_routers = hasattr(text, "output_router_logits")
    if requested and not has_routers:
        raise ValueError(
            f"objective.router_aux_loss_coef is {requested}, but a policy of model type {text.model_type} has no "
            "routers (its config has no output_router_logits): set it to null or 0, or use a mixture of experts."
        )
    if requested is not None:
        return requested
    return (getattr(text, "router_aux_loss_coef", None) or 0.0) if has_routers else 0.0


def make_router_loss(policy: nn.Module, scorer: Scorer, requested: float | None) -> RouterLoss | None:
    """Make the load-balancing loss of a run. A small forward pass first checks that the routing can be recorded.

    Collective: all ranks call it.

    Returns:
        The loss. None if the coefficient is 0, or, with a warning, if the coefficient comes from the policy's config
        and the routers cannot be read.

    Raises:
        ValueError: If a coefficient above 0 is requested for a dense model, or for routers that cannot be read.
    """
    coefficient = router_coefficient(requested, base_model(policy).config)
    if coefficient == 0:
        return None
    name = type(base_model(policy)).__name__
    try:
        routers = find_routers(policy)
        check_routers(scorer, policy, routers)
    except UnsupportedRoutersError as error:
        if requested:
            raise ValueError(
                f"objective.router_aux_loss_coef is {requested}, but the routing of {name} cannot be recorded: "
                f"{error}. Set the coefficient to 0 to train without the load-balancing loss."
            ) from error
        log.warning(
            "The policy's config has router_aux_loss_coef %g, but this run trains without the load-balancing loss, "
            "because the routing of %s cannot be recorded: %s. Set objective.router_aux_loss_coef to 0 to remove this "
            "warning.",
            coefficient,
            name,
            error,
        )
        return None
    log.info(
        "Load-balancing loss: weight %g (%s), %d routers, %d experts per token; objective.router_aux_loss_coef: 0 "
        "removes it.",
        coefficient,
        "the policy's config" if requested is None else "objective.router_aux_loss_coef",
        len(routers.places),
        routers.top_k,
    )
    return RouterLoss(routers, coefficient)
