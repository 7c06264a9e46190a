"""Small trained models that ship with the package: `tiny`, a 13.5 M parameter GDN-MoE target, and drafters for it.

`tiny-ready` is an adapter on `tiny-dspark`; `AutoDrafter` loads both. `prompts/` beside this file holds held-out
prompts of four kinds (gsm, code, dialogue, prose) for measuring them.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent

# Bundled name -> folder of a checkpoint or an adapter.
BUNDLED_MODELS = {name: _FOLDER / name for name in ("tiny", "tiny-dflash", "tiny-dspark", "tiny-ready")}


def resolve(name_or_path: str) -> str:
    """The folder of a bundled model, for its name; anything else (a path, a Hub id) is returned unchanged."""
    folder = BUNDLED_MODELS.get(name_or_path)
    return name_or_path if folder is None else str(folder)
