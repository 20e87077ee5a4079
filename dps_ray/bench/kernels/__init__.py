"""``dps-ray bench kernels``: nested GEMMs beside the stock kernels that they replace."""
