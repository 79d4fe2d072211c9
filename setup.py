"""Builds the C++ planner; everything else is declared in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("MEGATRON_HDP_BUILD_JOBS", default=2).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron_hdp.planner._core",
            sorted(["csrc/bindings.cpp", *glob("csrc/planner/**/*.cpp", recursive=True)]),
            include_dirs=["csrc"],
            depends=sorted(glob("csrc/planner/**/*.hpp", recursive=True)),
            cxx_std=17,
            extra_compile_args=[
                *["-O3", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"],
                "-ffp-contract=off",  # fused multiply-add may change a plan
            ],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
