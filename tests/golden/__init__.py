"""Values that other implementations computed, and the scripts that made them."""
