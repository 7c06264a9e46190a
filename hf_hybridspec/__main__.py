"""python -m hf_hybridspec: the command hf-hybridspec."""

import sys

from .cli import main

sys.exit(main())
