"""Package roots: one uniquely named import package in each top-level code folder."""

from setuptools import find_packages, setup

ROOTS = ("kernels", "deployments", "autoscaling")

setup(
    packages=find_packages(include=["dps_ray", "dps_ray.*"])
    + [package for root in ROOTS for package in find_packages(root)],
)
