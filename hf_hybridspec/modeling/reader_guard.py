"""Refuses to lose a state reader: PEFT loads adapters with strict=False and would drop one without a word."""

READER_MODULE = "state_reader"


def refuse_unread_reader(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
    """Pre-hook of a drafter's load_state_dict: raises ValueError for tensors of a state reader that it lacks."""
    for name in state_dict:
        head, found, _ = name.removeprefix(prefix).partition(f".{READER_MODULE}.")
        if not found or not name.startswith(prefix):
            continue
        try:
            owner = module.get_submodule(head)
        except AttributeError:
            owner = None
        if getattr(owner, READER_MODULE, None) is None:
            raise ValueError(
                f"The adapter has a state reader in {head}, which this {type(module).__name__} lacks and would "
                "lose. Load the adapter with AutoDrafter.from_pretrained(adapter), or make the drafter with "
                "ReadyDrafter.from_dspark(drafter, ...) from the adapter's reader_config.json first."
            )
