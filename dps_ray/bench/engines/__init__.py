"""``dps-ray bench engine`` and ``pressure``: whole engines, in turns, on the same work."""
