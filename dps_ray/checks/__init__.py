"""Proofs on real engines that elastic memory and nested precision change nothing they must not."""
