"""``dps-ray bench fleet``: what the fleet's own code costs, without Ray and as it is deployed."""
