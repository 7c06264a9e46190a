"""What every test needs: one thread a process, no network; tiny random targets, and a saved pair with a tokenizer."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from hf_hybridspec.modeling.dflash import DFlashDrafter
from tests.support import MASK_TOKEN_ID, TARGETS, TargetPair, drafter_config, random_target

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking) {% endif %}{% endif %}"
)


def pytest_configure():
    # For the processes that tests start, and for this one, whose Hub client has read its environment already.
    os.environ["HF_HUB_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    torch.set_num_threads(1)
    transformers_logging.get_logger("transformers")
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_is_no_fallback_note)


def _is_no_fallback_note(record: logging.LogRecord) -> bool:
    """The reference implementations of the host are what the tests compare with."""
    return "falling back to its reference" not in record.getMessage()


@pytest.fixture(scope="session")
def target_pairs() -> dict[str, TargetPair]:
    """A stock target and an attached one of equal weights for every class. Tests leave them as they are."""
    return {kind: TargetPair(kind) for kind in TARGETS}


@pytest.fixture(params=TARGETS)
def pair(request, target_pairs) -> TargetPair:
    """The pair of every class in turn."""
    chosen = target_pairs[request.param]
    for target in (chosen.stock, chosen.attached):
        # The host keeps the position offset of the newest image prompt on the model, for calls without positions.
        if hasattr(target.model, "rope_deltas"):
            target.model.rope_deltas = None
    return chosen


@dataclass(frozen=True)
class SavedPair:
    """Folders of a random target with a tokenizer of single characters, and of a DFlash drafter that fits it."""

    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory) -> SavedPair:
    folder = tmp_path_factory.mktemp("saved_pair")
    pair = SavedPair(folder / "target", folder / "drafter")
    random_target().save_pretrained(pair.target)
    character_tokenizer().save_pretrained(pair.target)
    torch.manual_seed(1)
    DFlashDrafter(drafter_config()).save_pretrained(pair.drafter)
    return pair


def character_tokenizer(size: int = MASK_TOKEN_ID) -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII, then letters that stand for the ids that are left, `size` in all."""
    characters = ["\n", *map(chr, range(32, 127)), *map(chr, range(0x391, 0x391 + 40))]
    vocabulary = {character: index for index, character in enumerate(characters[:size])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
