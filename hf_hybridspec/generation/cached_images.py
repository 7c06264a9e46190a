"""Images and videos of a prompt whose beginning a filled cache already holds.

A processor gives those of the whole conversation at every turn, and the positions of new ones depend on all of them.
The forward runs the new rows alone, and must be given the features that these have tokens for.
"""

import torch
import torch.nn.functional as F
from transformers.configuration_utils import PreTrainedConfig

from ..modeling.hybrid_cache import HybridCache
from .cache_reuse import Resumption

# Values of mm_token_type_ids.
_IMAGE, _VIDEO = 1, 2


def refuse_unplaced_images(model_kwargs: dict) -> None:
    """Raises ValueError for images or videos whose positions the host could not tell, or would get wrong.

    Positions follow from everything before: ids, types and grids must be those of the whole sequence.
    """
    types, mask, cache = (model_kwargs.get(name) for name in ("mm_token_type_ids", "attention_mask", "cache"))
    if types is None:
        return
    if mask is not None and mask.shape[1] > types.shape[1] and bool(types.any()):
        raise ValueError(
            f"The prompt holds {types.shape[1]} new tokens alone, images among them, whose positions follow from the "
            f"{mask.shape[1] - types.shape[1]} tokens before. Pass input_ids, mm_token_type_ids and the images of the "
            "whole sequence."
        )
    held = 0 if cache is None else int(cache.get_seq_length())
    images, videos = model_kwargs.get("image_grid_thw"), model_kwargs.get("video_grid_thw")
    if (images is None and videos is None) or (held and not bool(types[:, held:].any())):
        return
    # A video has one run of tokens a frame.
    given = {_IMAGE: 0 if images is None else len(images), _VIDEO: 0 if videos is None else int(videos[:, 0].sum())}
    for kind, name in ((_IMAGE, "image_grid_thw"), (_VIDEO, "video_grid_thw")):
        inside = types == kind
        num_runs = int((inside & ~F.pad(inside[:, :-1], (1, 0))).sum())
        if num_runs > given[kind]:
            raise ValueError(
                f"The sequence holds {num_runs} images or video frames, {name} describes {given[kind]}. Pass those of "
                "the whole sequence, also of what the cache already holds."
            )


def drop_cached_images(
    model_kwargs: dict, cache: HybridCache, input_ids: torch.Tensor, resumption: Resumption, config: PreTrainedConfig
) -> None:
    """Leaves in `model_kwargs["mm_encoder_outputs"]` (replaced) the features of the prompt's new rows alone.

    Args:
        input_ids: `[1, n]`, empty where embeddings were given, which are left to the host.

    Raises:
        ValueError: the new rows have tokens for more features than were given.
    """
    encoded = model_kwargs.get("mm_encoder_outputs")
    if not encoded or not cache.committed_length or not input_ids.shape[1]:
        return
    new_ids, kept = input_ids[:, -resumption.num_new :], {}
    for kind, output in encoded.items():
        num_new = int((new_ids == getattr(config, f"{kind}_token_id")).sum())
        features = torch.cat(list(output.pooler_output))
        if num_new > len(features):
            raise ValueError(
                f"The prompt's new rows hold {num_new} {kind} tokens, {len(features)} have features. Pass "
                f"every {kind} of the whole sequence."
            )
        if num_new:
            kept[kind] = type(output)(pooler_output=(features[len(features) - num_new :],))
    model_kwargs["mm_encoder_outputs"] = kept
