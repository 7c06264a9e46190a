from .configuration_dflash import DFlash2Config, DFlashConfig
from .modeling_dflash import DFlash2Drafter, DFlashDrafter

__all__ = ["DFlash2Config", "DFlash2Drafter", "DFlashConfig", "DFlashDrafter"]
