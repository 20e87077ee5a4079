"""Kills parts of a running fleet under load and judges what its clients saw of it."""
