"""Registers what tests train in place of networks, plants a bug where a test asks for one, and
hangs up the clock that a test sets.
"""

import tests.support.arithmetic  # noqa: F401
from tests.support.planted import plant_from_environment
from tests.support.wall_clock import hang_from_environment

plant_from_environment()
hang_from_environment()
