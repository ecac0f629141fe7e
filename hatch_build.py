"""Compiles the loops over rows; the compiler comes from the package index, like all the rest."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/tukeyreg/kernel")
# No fused or reordered operations: every width of vectors gives the same bits.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-Wall"]


class Kernel(BuildHookInterface):
    """``src/tukeyreg/kernel/kernel.so`` from ``kernel.c``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version, build_data):
        """Compile for the machine's architecture, not for its model, and mark the wheel for it."""
        built = Path(self.root) / SOURCE / "kernel.so"
        with tempfile.TemporaryDirectory() as cache:
            compiler = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "-mcpu=baseline"]
            subprocess.run(
                [*compiler, "-o", str(built), "kernel.c", "-lm"],
                cwd=Path(self.root) / SOURCE,
                env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
                check=True,
            )
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(str(SOURCE / "kernel.so"))
