"""``dps-ray check floors``: who insists on full precision gets it, over HTTP, from a real fleet."""
