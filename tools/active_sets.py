"""Which neurons a token uses, from a plan and the base's own rows decoded to float32: what predictors are to predict.

numpy only. The core multiplies rounded inputs where rows are quantized, so neurons at the very edge may differ.
"""

from __future__ import annotations

import numpy as np

from powerinfer_py.errors import PlanError
from powerinfer_py.format import BASE_TENSORS, BaseModel, Plan

from .thresholds import CALIBRATED_ACTIVATIONS, activate

# Values of one matrix product at a time.
_MAX_VALUES = 1 << 23


def check_has_inactive(plan: Plan) -> None:
    """Checks that the plan says which neurons are inactive.

    Args:
        plan: the plan.

    Raises:
        PlanError: its activation has no exact zeros, and some layer has no threshold.
    """
    if plan.activation not in CALIBRATED_ACTIVATIONS:
        return
    for i, layer in enumerate(plan.layers):
        if layer.n_ff and not layer.threshold and not layer.product_threshold:
            raise PlanError(
                f"{plan.path}: layer {i} has no threshold, so all of its {plan.activation} neurons are active; "
                "expected thresholds to train predictors for; make the plan again (powerinfer profile --density 0.5)."
            )


class ActiveSets:
    """The rows of one layer, in the plan's order, and what tokens do with them.

    A neuron *fires* when its up row is read in `exact` or `threshold` mode (ungated: always), and is *active* when its
    down row is.

    Attributes:
        decides: (n_ff, n_embd) float32, the rows whose product with x decides activity, or most of it: gate, or up when
            ungated.
        offset: (n_ff,) float32, a neuron's product plus this is above 0 when it is active; exact for relu and relu_sqr.
        is_linear: whether that is the whole truth.
    """

    def __init__(self, base: BaseModel, plan: Plan, i_layer: int) -> None:
        """Decodes the rows.

        Args:
            base: the model.
            plan: its plan.
            i_layer: a layer that the plan covers.
        """
        self._layer = layer = plan.layers[i_layer]
        self._activation = plan.activation
        order = slice(None) if layer.neuron_order is None else layer.neuron_order

        def part(name: str) -> tuple[np.ndarray, np.ndarray | None]:
            weight = BASE_TENSORS[f"base_{name}"] % i_layer
            bias = weight.removesuffix("weight") + "bias"
            rows = base.rows_f32(weight)[order]
            return rows, base.array(bias).astype(np.float32)[order] if bias in base.tensors else None

        self.decides, self._bias = part("gate" if plan.gated else "up")
        needs_up = plan.activation == "drelu" or layer.product_threshold > 0
        self._up, self._up_bias = part("up") if plan.gated and needs_up else (None, None)
        self._down_norm = None
        if layer.product_threshold > 0:
            self._down_norm = np.linalg.norm(base.rows_f32(BASE_TENSORS["base_down"] % i_layer), axis=0)[order]
        bias = np.zeros(layer.n_ff, np.float32) if self._bias is None else self._bias
        self.offset = bias - np.float32(layer.activation_param)
        self.is_linear = plan.activation in ("relu", "relu_sqr")

    @property
    def up_depends(self) -> bool:
        """Whether a neuron that fires may be inactive, so that a predictor saves up rows too."""
        return self._up is not None

    def of(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What tokens use.

        Args:
            x: (n_tokens, n_embd) float32 or float16, FFN inputs.

        Returns:
            fires (n_tokens, n_ff) bool, and active (n_tokens, n_ff) bool.
        """
        fires = np.empty((len(x), self._layer.n_ff), bool)
        active = np.empty_like(fires)
        step = max(1, _MAX_VALUES // self._layer.n_ff)
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            fires[part], active[part] = self._of_few(x[part].astype(np.float32))
        return fires, active

    def _of_few(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        layer = self._layer
        gate = x @ self.decides.T
        if self._bias is not None:
            gate += self._bias
        if self._activation in CALIBRATED_ACTIVATIONS:
            gate = activate(self._activation, gate)
        else:
            gate[gate <= np.float32(layer.activation_param)] = 0.0
            if self._activation == "relu_sqr":
                gate *= gate
        # the core's comparisons: a NaN is computed
        active = fires = ~((gate == 0) | (np.abs(gate) < np.float32(layer.threshold)))
        if self._up is not None:
            up = x @ self._up.T
            if self._up_bias is not None:
                up += self._up_bias
            if self._activation == "drelu":
                active = active & ~(up <= np.float32(0))
            gate *= up
        if self._down_norm is not None:
            active = active & ~(np.abs(gate) * self._down_norm < np.float32(layer.product_threshold))
        return fires, active
