"""Registers what tests train in place of networks, and plants a bug where a test asks for one."""

import tests.support.arithmetic  # noqa: F401
from tests.support.planted import plant_from_environment

plant_from_environment()
