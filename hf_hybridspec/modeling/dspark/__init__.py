from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDrafter

__all__ = ["DSparkConfig", "DSparkDrafter"]
