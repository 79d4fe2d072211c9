"""Builds the planners and the order of the data, in C++; pyproject.toml declares all else."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("MEGATRON_HDP_BUILD_JOBS", default=2).install()


def extension(name: str, bindings: str, room: str) -> Pybind11Extension:
    """The extension that offers a room of csrc to Python."""
    return Pybind11Extension(
        name,
        sorted([f"csrc/{bindings}", *glob(f"csrc/{room}/**/*.cpp", recursive=True)]),
        include_dirs=["csrc"],
        depends=sorted(glob(f"csrc/{room}/**/*.hpp", recursive=True)),
        cxx_std=17,
        extra_compile_args=[
            *["-O3", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"],
            "-ffp-contract=off",  # fused multiply-add may change a plan
            "-pthread",
        ],
        extra_link_args=["-pthread"],
    )


setup(
    ext_modules=[
        extension("megatron_hdp.planner._core", "bindings.cpp", "planner"),
        extension("megatron_hdp.data._order", "order_bindings.cpp", "data"),
        extension("megatron_hdp.media._items", "media_bindings.cpp", "media"),
    ],
    cmdclass={"build_ext": build_ext},
)
