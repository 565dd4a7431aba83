"""Registers what tests train in place of networks."""

import tests.support.arithmetic  # noqa: F401
