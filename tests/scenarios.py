"""Calls of generate() with a scripted drafter, in the loop that a test names."""

from contextlib import nullcontext

import torch

from tests.generation.host_drafter import host_drafted_device_rounds
from tests.support import ScriptedDrafter, scripted_drafter

LOOPS = ("round", "host")

# Right drafts of each round in turn: some, none, all, and so on.
MIXED = (3, 0, 15, 7, 1, 15, 2)

# Special ids of the vision-language target of tests/support.py.
IMAGE, VISION_START, VISION_END = 100, 102, 103


def scripted(sequence: torch.Tensor, num_right=MIXED, block_size: int = 16) -> ScriptedDrafter:
    """A drafter of `[1, n]` prompt and continuation that is right as often as `num_right` says, in a cycle."""
    return scripted_drafter(block_size).script(sequence[0], list(num_right) * 60)


def assisted(model, inputs, drafter, loop: str, **options):
    """generate() with a drafter, greedy and of full blocks unless `options` say otherwise; `inputs` ids or keywords.

    Fails unless the loop it names ran.
    """
    keywords = {"inputs": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    defaults = {"do_sample": False, "length_policy": "full"}
    with host_drafted_device_rounds() if loop == "graphs" else nullcontext():
        output = model.generate(assistant_model=drafter, decoding_path=loop, **keywords, **{**defaults, **options})
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert base.generation_statistics.path == loop
    return output


def plain(model, inputs, **options):
    """generate() of a stock model, greedy unless `options` say otherwise."""
    keywords = {"inputs": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    return model.generate(**keywords, **{"do_sample": False, **options})


def image_inputs(num_images: int = 1) -> dict:
    """A prompt with images of 4 x 4 patches, which the vision tower merges to 4 tokens each."""
    generator = torch.Generator().manual_seed(3)
    image = [VISION_START, *[IMAGE] * 4, VISION_END]
    ids = [7, 12, *image * num_images, 33, 5, 61]
    input_ids = torch.tensor([ids])
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE).long(),
        "pixel_values": torch.randn(16 * num_images, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * num_images),
    }
