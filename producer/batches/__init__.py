"""From a planned batch to its arrays: decoding, features, codes and rows."""
