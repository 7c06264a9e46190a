from .configuration_ready import ReadyConfig
from .modeling_ready import ReadyDrafter, StateReader

__all__ = ["ReadyConfig", "ReadyDrafter", "StateReader"]
