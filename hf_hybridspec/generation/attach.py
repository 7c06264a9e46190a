"""attach and detach: the only place where a live model changes."""

import functools

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.drafter import Drafter
from ..modeling.target import check_supported, input_embedding, restore_gated_delta_nets, swap_gated_delta_nets
from .length_policies import LengthPolicy, parse_policy
from .mixin import Attachment, HybridSpecGenerationMixin


def attach(
    model: PreTrainedModel,
    drafter: Drafter | None = None,
    length_policy: LengthPolicy | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Makes assisted decoding work, losslessly, on a hybrid model. Changes the model in place and returns it.

    Weights, names, `save_pretrained` and the class name stay those of transformers. Attaching again replaces drafter
    and policy. A PEFT model is attached through its base model.

    Args:
        model: a Qwen3-Next, Qwen3.5, Qwen3.6 or Qwen3.8 model, text or vision-language class.
        drafter: drafts in every later `generate` that names no assistant (pipeline and serving included).
        length_policy: of calls that name none; an object or its name, such as `static:6`.
        tokenizer: the target's. Ids beyond it, reserved rows of the embedding, are then never drafted.

    Raises:
        ValueError: the model is not supported, the drafter or policy does not fit, or a tokenizer comes without a
            drafter.
    """
    base = _base_model(model)
    check_supported(base)
    if isinstance(length_policy, str):
        length_policy = parse_policy(length_policy)
    if drafter is None and tokenizer is not None:
        raise ValueError("tokenizer has no effect without a drafter: it bounds what a drafter proposes. Pass both.")
    if drafter is not None:
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"drafter must come from AutoDrafter, got {type(drafter).__name__}. Pass another "
                "causal model to generate() as "
                "assistant_model instead."
            )
        tokenizer_size = None if tokenizer is None else len(tokenizer)
        drafter.bind(input_embedding(base), base.get_output_embeddings(), base.config, tokenizer_size)
        if length_policy is not None:
            length_policy.check(base, drafter)
    swap_gated_delta_nets(base)
    if not isinstance(base, HybridSpecGenerationMixin):
        base.__class__ = _attached_class(type(base))
    base._hybridspec = Attachment(drafter, length_policy)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `attach` and returns the model; a model that is not attached stays as it is."""
    base = _base_model(model)
    if isinstance(base, HybridSpecGenerationMixin):
        restore_gated_delta_nets(base)
        base.__class__ = type(base).__mro__[2]
        del base._hybridspec
    return model


class HybridSpecModelForCausalLM:
    """`AutoModelForCausalLM` and `attach` in one."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *args, **kwargs) -> PreTrainedModel:
        """Loads a target as `AutoModelForCausalLM.from_pretrained` does, and attaches it.

        Raises:
            ValueError: the model is not supported.
        """
        return attach(AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs))


@functools.cache
def _attached_class(host_class: type) -> type:
    """Subclass with the host's name, so that `save_pretrained` and serving see the stock class."""
    attributes = {"__module__": host_class.__module__, "__doc__": host_class.__doc__}
    return type(host_class.__name__, (HybridSpecGenerationMixin, host_class), attributes)


def _base_model(model: PreTrainedModel) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
